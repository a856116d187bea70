"""The cases of a run on a GPU: a fixed list, in the order in which their answers are worth knowing.

No module of JAX is imported here: the process that reads this list starts, times and ends those that use the GPU.
"""

from dataclasses import dataclass, field
from typing import Any

STAGES = {
    "device": (30, "versions, and one kernel of each head size"),
    "correct": (180, "kernels against the dense oracle"),
    "kernels": (150, "times of kernels beside their peers"),
    "engine": (150, "an engine with the layers of Llama-3 8B"),
    "pages": (60, "pages to and from the host, sampling, memory"),
    "rings": (120, "exchanges over several GPUs"),
}
"""Seconds of each stage of a run of ten minutes, and what it is about. Without several GPUs the last one is empty."""


@dataclass(frozen=True)
class Case:
    """A call of `function(context, **arguments)` in the worker, as `module.function`.

    Attributes:
      limit: seconds after which the worker is ended.
      devices: GPUs that it needs.
      flags: of XLA, which its worker has besides those of the command line.
    """

    stage: str
    name: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    limit: float = 60
    devices: int = 1
    flags: str = ""

    def __str__(self) -> str:
        return f"{self.stage}/{self.name}"


def _device() -> list[Case]:
    kernels = [
        Case("device", f"kernel-h{size}", "kernel_checks.attend", {"lengths": "decode", "head_size": size, "group": 4})
        for size in (64, 128, 256)
    ]
    return [Case("device", "versions", "measurements.versions"), *kernels]


# Groups of 1, 4, 7 and 8 query heads to a KV head, each head size and each shape at least once.
_ATTENTION = {
    "prefill-4k": ((128, 8), (64, 4), (256, 1)),
    "decode": ((128, 8), (64, 7), (256, 4)),
    "chunk-64-at-8k": ((128, 4), (64, 1), (256, 8)),
    "ragged-2100": ((128, 1), (64, 8), (256, 7)),
}
# Page size, head size, group.
_PAGES = ((64, 128, 8), (16, 64, 4), (256, 256, 1), (64, 128, 7))
_FP8_PAGES = ((64, 128, 8), (32, 64, 4), (256, 256, 1))


def _correct() -> list[Case]:
    def case(name: str, function: str, **arguments: Any) -> Case:
        return Case("correct", name, f"kernel_checks.{function}", arguments)

    attention = [
        case(f"{lengths}-h{size}-g{group}", "attend", lengths=lengths, head_size=size, group=group)
        for lengths, pairs in _ATTENTION.items()
        for size, group in pairs
    ]
    pages = [
        case(f"{kind}-{page}-h{size}-g{group}", "attend_to_pages", page_size=page, head_size=size, group=group, fp8=fp8)
        for kind, fp8, cases in (("pages", False, _PAGES), ("fp8-pages", True, _FP8_PAGES))
        for page, size, group in cases
    ]
    far = [
        case(name, "attend_to_far_pages", fp8=fp8)
        for name, fp8 in (("pages-past-2^31", False), ("fp8-pages-past-2^31", True))
    ]
    backward = [
        case(f"backward-h{size}-g{group}", "backward", head_size=size, group=group)
        for size, group in ((128, 4), (64, 8), (256, 1))
    ]
    repeats = [case(f"repeats-{kind}", "repeat", kind=kind) for kind in ("decode", "prefill", "pages", "backward")]
    merges = [case(f"merge-0-to-132-h{size}", "merge", head_size=size) for size in (128, 64, 256)]
    one_of_each = [attention[0], attention[3], pages[0], pages[4], backward[0], *repeats[:1], *far, merges[0]]
    rest = [x for x in (*attention, *pages, *backward, *merges, *repeats) if x not in one_of_each]
    return one_of_each + rest


# Named as in `benchmarks.kernel_shapes`.
_TIMED = (
    "mha/tp1/prefill@16k",
    "llama3-8b/tp1/decode@128k/b1",
    "llama3-8b/tp1/prefill@8k",
    "llama3-70b/tp8/chunk64@1m",
    "llama3-70b/tp8/chunk2048@1m",
    "llama3-8b/tp1/decode@8k/b64",
    "llama3-8b/tp1/chunk512@128k",
    "mha/tp1/prefill@16k/forward+backward",
    "llama3-8b/tp1/decode@128k/b32",
    "zigzag/own",
    "zigzag/dense",
    "llama3-70b/tp8/prefill@16k",
)


def _kernels() -> list[Case]:
    copy = Case("kernels", "copy", "measurements.copy")
    return [copy, *(Case("kernels", name, "measurements.kernel", {"name": name}) for name in _TIMED)]


def _engine() -> list[Case]:
    decodes = [
        Case("engine", f"decode-b{batch}", "engine_checks.decode", {"batch": batch}, limit=120) for batch in (1, 64)
    ]
    tokens = Case("engine", "tokens", "engine_checks.tokens", limit=120)
    # What compares tokens forgets all programs, so it comes last.
    return [*decodes, Case("engine", "prefill", "engine_checks.prefill"), tokens]


def _pages() -> list[Case]:
    names = ("transfers", "sampling", "memory")
    return [Case("pages", name, f"engine_checks.{name}") for name in names]


# What moves keys and queries while a kernel computes: NCCL on a few multiprocessors, or as it likes, or copy engines.
_OVERLAPS = {
    "channels": "--xla_gpu_nccl_p2p_max_nchannels=4",
    "copy-engines": "--xla_gpu_use_memcpy_local_p2p=true",
    "nccl": "--xla_gpu_nccl_p2p_max_nchannels=0",
}


def _rings() -> list[Case]:
    """One worker after another, as flags count for a process; the sizes that machines have come first."""
    return [
        Case("rings", f"ring-{ranks}-{name}", "measurements.ring", {"ranks": ranks}, 90, ranks, flags)
        for sizes in ((8, 4, 2), (3, 5, 6, 7))
        for name, flags in _OVERLAPS.items()
        for ranks in sizes
    ]


CASES = [*_device(), *_correct(), *_kernels(), *_engine(), *_pages(), *_rings()]
