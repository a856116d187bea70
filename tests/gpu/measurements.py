"""What is here, and times of kernels and of exchanges, by the code of `benchmarks`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_worker import Context, Figures, Unsupported

from benchmarks import kernel_cases, kernels
from benchmarks.context_parallel import RINGS, contender
from benchmarks.kernel_contenders import OURS, attention_mgpu, contiguous, jax_nn, paged
from benchmarks.kernel_report import environment, to_row
from benchmarks.timing import measure
from longctx.kernels import attention, explain
from longctx.kernels.device import Device
from longctx.parallel import shard_sequence
from longctx.parallel.device_tables import DEVICES
from longctx.parallel.topology import device_name


def versions(context: Context) -> Figures:
    """Devices, versions, and what attention takes by itself.

    Raises:
      AssertionError: a Hopper GPU doesn't take the kernels that are made for it.
    """
    target, devices = Device.target(), jax.devices()
    q = jax.ShapeDtypeStruct((16, 8, 128), jnp.bfloat16)
    selection = explain(q, q)
    sheet = DEVICES.get(device_name(devices[0]) or "")
    figures = environment() | {
        "devices": len(devices),
        "multiprocessors": target.num_multiprocessors,
        "memory_bytes": (devices[0].memory_stats() or {}).get("bytes_limit"),
        "ptxas": selection.ptxas,
        "attention": selection.taken,
        "refused": selection.refused,
    }
    if sheet is not None and sheet.name != "cpu":
        figures["limits"] = {"flops": sheet.flops["bfloat16"], "bytes": sheet.memory_bandwidth}
    context.note(figures)
    if target.is_hopper:
        assert selection.taken == "mosaic_gpu", selection.refused["mosaic_gpu"]
    return {}


def copy(context: Context) -> Figures:
    elements = 2**16 if context.small else 2**31 - 2**20
    return {"bytes_per_second": kernels.copy_bytes_per_second(elements, rounds=2 if context.small else 10)}


def kernel(context: Context, name: str) -> Figures:
    """A named shape: ours, ours over pages, cuDNN, and the kernel that comes with JAX."""
    [case] = kernel_cases.all_cases(name)
    contenders = {
        OURS: contiguous("xla" if context.small else explain(*_types(case)).taken),
        "pages of 64": paged(None, 64),
        "cuDNN": jax_nn("cudnn"),
        "attention_mgpu": attention_mgpu,
    }
    if context.small:
        case = _small(case)
    needed = kernel_cases.needed_bytes(case)
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", needed)
    if needed > memory:
        raise Unsupported(f"needs {needed / 1e9:.0f} GB of memory, found {memory / 1e9:.0f}")
    budget, rounds, sets = (0.05, 1, 1) if context.small else (1.5, 5, None)
    results = kernels.run_case(case, kernels.applicable(case, contenders), budget, rounds, sets)
    context.note({"results": [to_row(result) for result in results]})
    for result in results:
        if result.contender in (OURS, "pages of 64") and result.ms is None:
            assert result.reason.startswith("left out"), f"{result.contender}: {result.reason}"
    return {}


def _types(case: kernel_cases.Case) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (case.shape.q_shape, case.shape.kv_shape)]


def _small(case: kernel_cases.Case) -> kernel_cases.Case:
    """The same with few tokens: positions of at most 128 keys, and two heads."""
    factor = -(-case.shape.kv_length // 128)

    def scaled(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((first // factor, max(first // factor + 1, stop // factor)) for first, stop in ranges)

    q_ranges, kv_ranges = scaled(case.q_ranges), scaled(case.kv_ranges)
    q_length, kv_length = (sum(stop - first for first, stop in x) for x in (q_ranges, kv_ranges))
    small: dict[str, int] = {"batch": 1, "heads": 2, "kv_heads": 1, "q_length": q_length, "kv_length": kv_length}
    shape = dataclasses.replace(case.shape, **small)
    return dataclasses.replace(case, shape=shape, q_ranges=q_ranges, kv_ranges=kv_ranges)


def ring(context: Context, ranks: int) -> Figures:
    """Exchanges of 128k tokens of Llama-3 8B's heads, in zigzag, beside one device alone.

    Raises:
      AssertionError: an exchange differs from one device.
    """
    tokens, heads, size = (
        (16 * ranks, (2, 1), 16) if context.small else (2**17 // (2 * ranks) * 2 * ranks, (32, 8), 128)
    )
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(tokens, n, size) for n in (heads[0], heads[1], heads[1])]
    q, k, v = (jax.random.normal(key, x, jnp.bfloat16) for key, x in zip(keys, shapes, strict=True))
    positions = shard_sequence(np.arange(tokens), ranks, layout="zigzag", axis=0)
    operands = (q, k, v, positions, positions)
    contenders: dict[str, Callable[[], Any]] = {
        name: contender(exchange, ranks, operands) for name, exchange in RINGS.items()
    }
    contenders["one device"] = contender(attention, 1, operands)
    rows = np.linspace(0, tokens - 1, 64).astype(int)
    outs = {name: np.asarray(run(), np.float32)[rows] for name, run in contenders.items()}
    error = max(float(np.abs(out - outs["one device"]).max()) for out in outs.values())
    assert error < 2e-2, f"exchanges differ by {error:.1e} from one device"
    times = measure(contenders, rounds=1 if context.small else 5)
    pairs = tokens * (tokens + 1) // 2
    return {"ranks": ranks, "seconds": times, "flops": 4 * size * heads[0] * pairs, "error": error}
