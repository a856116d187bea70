"""Memory of accelerators: what JAX may take of it, what the programs of a step need, and how many pages are left."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax

from longctx.gpu_flags import MEMORY_VARIABLES, memory_fraction
from longctx.serving.kv_cache.window_pages import PageBytes

# Where temporaries exceed 95 % of what arguments and outputs leave of 80 % of a GPU, XLA computes values twice to save
# memory, and copies weights. It counts up to half as many temporaries again as it then allocates.
_XLA_SHARE, _XLA_TEMPORARIES = 0.8, 1.5 / 0.95
_RESERVE = 0.02  # of what JAX may take: what the allocator loses between arrays, and small programs


ADVICE = {
    "pages": "lower num_pages or page_size; about {fit:,} pages fit",
    "steps": "lower max_running or token_budget",
    "others": "delete other arrays",
    "weights": "give plan a larger stage or tensor, or the parameters a smaller dtype",
}
"""Advice by what takes as much as is missing of a `MemoryUse`; `{fit}`: pages that fit."""


class DeviceMemory(NamedTuple):
    """The memory of an accelerator, in bytes; of several, the least; or that of a CPU's host.

    Attributes:
      limit: that JAX may take.
      used: that arrays take now.
      physical: that the device has.
      program_limit: for the arguments, outputs and temporaries of one program, beyond which it becomes slow.
    """

    limit: int
    used: int
    physical: int
    program_limit: int

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> Self | None:
        """The memory of devices; None: of CPUs, or unknown."""
        if devices[0].platform == "cpu":
            return None
        statistics = [device.memory_stats() or {} for device in devices]
        if not all("bytes_limit" in each for each in statistics):
            return None
        limit = min(each["bytes_limit"] for each in statistics)
        free = min(each["bytes_limit"] - each.get("bytes_in_use", 0) for each in statistics)
        if devices[0].platform not in ("gpu", "cuda", "rocm"):
            return cls(limit, limit - free, limit, limit)
        physical = int(limit / memory_fraction())
        return cls(limit, limit - free, physical, int(_XLA_SHARE * physical))


class ProgramMemory(NamedTuple):
    """Memory that programs take on a device, in bytes; of several programs, the most.

    Attributes:
      temporaries: while one runs.
      outputs: that are not written over arguments.
      arguments: parameters, pages and all else that is there before and after.
    """

    temporaries: int = 0
    outputs: int = 0
    arguments: int = 0

    @classmethod
    def of(cls, programs: Iterable[Any]) -> Self:
        """Return the memory of compiled programs, as XLA reports it."""
        found = [program.memory_analysis() for program in programs]
        temporaries = max((each.temp_size_in_bytes for each in found), default=0)
        outputs = max((each.output_size_in_bytes - each.alias_size_in_bytes for each in found), default=0)
        return cls(temporaries, max(0, outputs), max((each.argument_size_in_bytes for each in found), default=0))

    def union(self, other: "ProgramMemory") -> "ProgramMemory":
        return ProgramMemory(*map(max, zip(self, other, strict=True)))


class MemoryUse(NamedTuple):
    """Uses of a device's memory, in bytes, as its text shows line by line.

    Attributes:
      device: its memory; `used` counts the weights, and arrays that are not the engine's.
      weights: parameters.
      slots: what a step keeps for sequences beside their pages: page tables, counts of tokens, outputs of a stage.
      pages: of the KV cache, window pages among them.
      page: one page, of the layers without a window.
      page_tokens: of the KV cache, in a page.
      temporaries, outputs: of the largest program, and of the steps in flight.
      autotuning: operands with which XLA tries ways to compute a product, when it compiles a program.
      transfers: pages on their way to and from other memory.
      arguments: of the largest program, beside pages; weights and slots at least.
      window_page: one window page, of the layers with one.
      most_windows: window pages that pages have at most, however many they are.
    """

    device: DeviceMemory
    weights: int
    slots: int
    pages: int
    page: int
    page_tokens: int
    temporaries: int = 0
    outputs: int = 0
    autotuning: int = 0
    transfers: int = 0
    arguments: int = 0
    window_page: int = 0
    most_windows: int = 0

    @property
    def steps(self) -> int:
        """Bytes that steps compute with, and keep for each slot."""
        return self.slots + self.temporaries + self.outputs

    @property
    def total(self) -> int:
        return self.weights + self.pages + self.steps + self.autotuning + self.transfers

    @property
    def summary(self) -> str:
        """The parts that take most, in a line."""
        names = {"parameters": self.weights, "pages": self.pages, "steps": self.steps}
        names |= {"other arrays": self.others} if self.others else {}
        return ", ".join(f"{name} {in_units(count)}" for name, count in names.items())

    @property
    def others(self) -> int:
        """Arrays that are not the engine's."""
        return max(0, self.device.used - self.weights)

    @property
    def reserve(self) -> int:
        """Bytes that the allocator loses between arrays, and those of small programs."""
        return int(_RESERVE * self.device.limit)

    @property
    def unused(self) -> int:
        """Bytes that are left; negative: bytes that are missing."""
        return self.device.limit - self.total - self.others - self.reserve

    @property
    def num_fitting(self) -> int:
        """Pages for which there is room, and no more than leave programs fast, unless those are none."""
        arguments = max(self.arguments, self.weights + self.slots) + self.outputs
        fast = self.device.program_limit - arguments - int(self.temporaries * _XLA_TEMPORARIES)
        fitting, fast = self.pages_within(self.unused + self.pages), self.pages_within(fast)
        return min(fitting, fast) or fitting

    def pages_within(self, room: int) -> int:
        """Pages that, with their window pages, take a number of bytes."""
        return PageBytes(self.page, self.window_page).pages_within(room, self.most_windows)

    def with_programs(self, programs: ProgramMemory, in_flight: int) -> Self:
        """Return the use with programs compiled for as many pages, of which `in_flight` run at a time."""
        arguments = max(0, programs.arguments - self.pages)
        outputs = programs.outputs * in_flight
        return self._replace(temporaries=programs.temporaries, outputs=outputs, arguments=arguments)

    def with_pages(self, num_pages: int) -> Self:
        pages = PageBytes(self.page, self.window_page).of_pages(num_pages, self.most_windows)
        return self._replace(pages=pages)

    def check(self, needed: int = 0, advice: Mapping[str, str] = ADVICE) -> None:
        """Check that what is there, and what the largest program takes beside it, fit.

        Args:
          needed: bytes for which there must be room besides.
          advice: as `ADVICE`.
        """
        missing = needed - self.unused - (0 if needed else self.autotuning + self.transfers + self.reserve)
        if missing <= 0:
            return
        helpful = [text for name, text in advice.items() if getattr(self, name) >= missing] or [*advice.values()]
        helpful = [text.format(fit=self.num_fitting) for text in helpful]
        if self.device.limit < 0.85 * self.device.physical:
            helpful.append(f"raise {MEMORY_VARIABLES[0]}, as JAX takes {memory_fraction():.0%} of the device")
        raise ValueError(
            f"{in_units(missing)} are missing of {in_units(self.device.limit)} of memory for {self.summary}: "
            + "; or ".join(helpful)
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        gib, tokens = 2**30, (self.page + self.window_page) / self.page_tokens
        yield f"{'':<12} {'GiB':>7}  as tokens of KV cache"
        rows = ("weights", "pages", "slots", "temporaries", "outputs", "autotuning", "transfers", "others", "reserve")
        for name in (*rows, "unused"):
            count = getattr(self, name)
            if count or name in ("weights", "pages", "temporaries", "unused"):
                yield f"{name:<12} {count / gib:>7.2f}  {count / tokens:>12,.0f}"
        share = self.device.limit / self.device.physical
        yield f"{'for JAX':<12} {self.device.limit / gib:>7.2f}  {share:.0%} of {self.device.physical / gib:.2f} GiB"


def in_units(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
