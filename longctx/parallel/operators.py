"""Seconds of single operators as they were measured: products with weights, attention, all-reduces.

Products and all-reduces are tables of a few hundred numbers, attention is a dozen numbers a kernel; `operators.json`.
`longctx.parallel.operator_fit` fits both, and docs/simulation_hardware.md has the errors.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longctx.annotations import Real

LATENCY = 3e-6  # seconds of a kernel in a graph that computes next to nothing
# Knots of `AttentionCost.decode_ratios`: sequences times KV heads, and keys of a sequence.
DECODE_HEADS = (1, 4, 16, 64, 128, 256, 1024, 4096)
DECODE_KEYS = (2, 64, 128, 256, 512, 2048, 8192, 32768, 131072)
# NumPy's own round otherwise on CPUs with AVX-512, and a simulation should come to the same on each machine.
_exp, _log = (np.vectorize(function, otypes=[float]) for function in (math.exp, math.log))


def product_physics(m: Any, n: Any, k: Any, element_bytes: Real, flops: Real, bandwidth: Real) -> Any:
    """Seconds of `[m, k] x [k, n]` by a data sheet: a kernel's latency, products, and bytes read and written."""
    moved = element_bytes * (n * k + m * k) + 2 * m * n
    return LATENCY + 2 * m * n * k / flops + moved / bandwidth


@dataclasses.dataclass(frozen=True)
class ProductTable:
    """Measured products of rows with weights, as ratios to what a data sheet says.

    Seconds are linear in rows between the knots and beyond the last. Between sizes of weights the logarithm of the
    ratio is linear in that of the sizes, and beyond them constant.

    Attributes:
      rows: knots of m, ascending.
      sizes: knots of n and of k, ascending.
      ratios: `[rows, sizes, sizes]`, flat, of `100 * ln(measured / product_physics)`.

    Raises:
      ValueError: the numbers of knots and ratios don't agree, or knots do not ascend.

    Examples:
      >>> from longctx.parallel.operators import ProductTable
      >>> twice = ProductTable(rows=(1, 1024), sizes=(64, 8192), ratios=(69,) * 8)  # of the data sheet's seconds
      >>> twice.curve(4096, 4096, element_bytes=2, flops=989e12, bandwidth=3.35e12).round(7).tolist()
      [2.6e-05, 0.0001052]
    """

    rows: Sequence[int]
    sizes: Sequence[int]
    ratios: Sequence[int]

    def __post_init__(self) -> None:
        for name in ("rows", "sizes", "ratios"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for knots in (self.rows, self.sizes):
            if len(knots) < 2 or list(knots) != sorted(set(knots)) or knots[0] < 1:
                raise ValueError(f"knots of products must be positive and ascend, got {knots}")
        expected = len(self.rows) * len(self.sizes) ** 2
        if len(self.ratios) != expected:
            raise ValueError(f"ratios of products must be {expected}, a number for each knot, got {len(self.ratios)}")

    def curve(self, n: Real, k: Real, element_bytes: Real, flops: Real, bandwidth: Real) -> np.ndarray:
        """Seconds of each of `rows` with weights `[k, n]`: `[len(rows)]` float64, which do not decrease.

        Args:
          n, k: sizes of the weights.
          element_bytes: of rows and weights; results have 2.
          flops, bandwidth: of the device's data sheet.
        """
        ratios = np.reshape(self.ratios, (len(self.rows), len(self.sizes), len(self.sizes))) / 100
        for size in (n, k):  # of the two axes left, the first
            at, share = between_knots(size, self.sizes)
            ratios = ratios[:, at] * (1 - share) + ratios[:, at + 1] * share
        seconds = _exp(ratios) * product_physics(np.array(self.rows, float), n, k, element_bytes, flops, bandwidth)
        # More rows may be measured to take less time. Midway between the least and the most curve that never falls.
        below = np.minimum.accumulate(seconds[::-1])[::-1]
        return (np.maximum.accumulate(seconds) + below) / 2


def between_knots(sizes: Any, knots: Any, is_linear: bool = False) -> tuple[Any, Any]:
    """Numbers of the knots before sizes, and where these are from there to the next, 0 to 1: by logarithms or not."""
    at = np.clip(np.searchsorted(knots, sizes, side="right") - 1, 0, len(knots) - 2)
    places, size = (np.array(knots, float), sizes) if is_linear else (_log(knots), _log(sizes))
    return at, np.clip((size - places[at]) / (places[at + 1] - places[at]), 0, 1)


def on_line(x: Any, knots: Any, values: Any) -> Any:
    """Values at `x` of a line through knots, continued beyond the last and constant before the first."""
    slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
    return np.interp(x, knots, values) + slope * np.maximum(0, np.asarray(x) - knots[-1])


@dataclasses.dataclass(frozen=True)
class AttentionCost:
    """Seconds of a layer's attention on one device, as a kernel was measured.

    A call takes `latency`; with prompts also `prompt_latency`, for the longest chunk `path`, and for each chunk
    products by its pairs, `row` and the like by its rows, and `chunk_kv_head`; with decodes `decode_head` and
    `decode_kv_head` for each, beside reading keys. How a kernel divides few sequences, or short ones, has no such form:
    decodes take `decode_ratios` times that.

    Attributes:
      head_size, key_bytes: H, and bytes of a number of cached keys, that it was measured with.
      latency: seconds of a call. prompt_latency: by which one with prompts takes longer.
      prompt_share: of the 16-bit FLOP/s, 4 H a pair and query head, that prompts reach.
      path, path_seconds: seconds of each row of the longest chunk, whose last tile all wait for, until that is
        `path_seconds`.
      row, row_head, row_kv_head: seconds of a row, of each of its query heads, and of each KV head: tiles begin and
        end, keys are copied.
      chunk_kv_head: seconds of a chunk and KV head, whose last tile is not full.
      key_share: of the bytes/s, at which decodes read keys.
      decode_head, decode_kv_head: seconds of a decode and query head, and KV head.
      decode_overlap: of these and reading keys, the longer hides so much of the shorter.
      decode_ratios: percent of what these numbers say, `[DECODE_HEADS, DECODE_KEYS]`, flat; empty: 100 for all.

    Raises:
      ValueError: a number is negative or not finite, a share is 0 or above 1, or ratios are too few or too many.
    """

    head_size: int
    key_bytes: Real
    prompt_share: Real
    key_share: Real
    latency: Real = 0.0
    prompt_latency: Real = 0.0
    path: Real = 0.0
    path_seconds: Real = 0.0
    row: Real = 0.0
    row_head: Real = 0.0
    row_kv_head: Real = 0.0
    chunk_kv_head: Real = 0.0
    decode_head: Real = 0.0
    decode_kv_head: Real = 0.0
    decode_overlap: Real = 0.0
    decode_ratios: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "decode_ratios", tuple(self.decode_ratios))
        expected = len(DECODE_HEADS) * len(DECODE_KEYS)
        if self.decode_ratios and (len(self.decode_ratios) != expected or min(self.decode_ratios) <= 0):
            raise ValueError(f"decode_ratios must be {expected} positive numbers, got {len(self.decode_ratios)}")
        for name, value in dataclasses.asdict(self).items():
            if name == "decode_ratios":
                continue
            is_share = name.endswith(("share", "overlap"))
            if not isinstance(value, Real) or not 0 <= value < np.inf or (is_share and value > 1):
                raise ValueError(f"{name} of attention must be finite and not negative, a share at most 1, got {value}")
        if not (self.prompt_share and self.key_share and self.key_bytes and self.head_size):
            raise ValueError("attention must have shares, a head's size and bytes of a key that are not 0")

    def prompt_seconds(
        self, pairs: Any, rows: Any, chunks: Any, longest: Any, heads: Any, kv_heads: Any, flops: Real
    ) -> Any:
        """Seconds of prompts' chunks beside both latencies; arrays of one shape, or numbers.

        Args:
          pairs: of a query and a key, each head's.
          rows, chunks, longest: of all chunks, how many these are, and rows of the longest.
          heads, kv_heads: N and K of the device.
          flops: 16-bit FLOP/s of the device's data sheet.
        """
        products = pairs * heads * 4 * self.head_size / (flops * self.prompt_share)
        each = rows * (self.row + self.row_head * heads + self.row_kv_head * kv_heads)
        return (
            products
            + each
            + chunks * kv_heads * self.chunk_kv_head
            + np.minimum(self.path * longest, self.path_seconds)
        )

    def decode_seconds(self, decodes: Any, keys: Any, heads: Any, kv_heads: Any, bandwidth: Real) -> Any:
        """Seconds of decodes, `latency` included; arrays of one shape, or numbers.

        Args:
          decodes: sequences.
          keys: that all of them read, each head's.
          heads, kv_heads: N and K of the device.
          bandwidth: bytes/s of the device's data sheet.
        """
        read = keys * kv_heads * 2 * self.head_size * self.key_bytes / (bandwidth * self.key_share)
        each = decodes * (heads * self.decode_head + kv_heads * self.decode_kv_head)
        seconds = self.latency + read + each - self.decode_overlap * np.minimum(read, each)
        if not self.decode_ratios:
            return seconds
        return seconds * decode_ratio(self.decode_ratios, decodes * kv_heads, keys / decodes)


def decode_ratio(percents: Sequence[int], heads: Any, keys: Any) -> Any:
    """Ratios of measured decodes to `AttentionCost`'s closed form, between the knots and as at the nearest beyond them.

    Keys of longer sequences than were measured count as those of more sequences: long ones are divided among
    multiprocessors, as many are.

    Args:
      percents: `AttentionCost.decode_ratios`.
      heads: sequences times KV heads; ratios are linear in the logarithm.
      keys: of a sequence; ratios are linear. Arrays of shapes that broadcast, or numbers.
    """
    table = np.reshape(percents, (len(DECODE_HEADS), len(DECODE_KEYS))) / 100
    heads = heads * np.maximum(1, np.asarray(keys) / DECODE_KEYS[-1])
    at, share = between_knots(heads, DECODE_HEADS)
    place, part = between_knots(keys, DECODE_KEYS, is_linear=True)
    first, last = (table[at, each] * (1 - share) + table[at + 1, each] * share for each in (place, place + 1))
    return first + (last - first) * part


@dataclasses.dataclass(frozen=True)
class ReduceTable:
    """Measured all-reduces of a host's devices.

    Attributes:
      sizes: knots of a message's bytes, ascending.
      seconds: by devices, `[len(sizes)]` each. Between the knots, and beyond, seconds are linear in bytes.

    Raises:
      ValueError: numbers don't agree, or they don't ascend.
    """

    sizes: Sequence[int]
    seconds: Mapping[Any, Sequence[float]] = dataclasses.field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        rows = {int(devices): tuple(row) for devices, row in self.seconds.items()}
        object.__setattr__(self, "seconds", rows)
        for row in (self.sizes, *rows.values()):
            if len(row) < 2 or len(row) != len(self.sizes) or list(row) != sorted(row) or row[0] <= 0:
                raise ValueError(f"all-reduces must have positive numbers that ascend, one for each size, got {row}")
        if not rows:
            raise ValueError("all-reduces must be of some number of devices")

    def reduce(self, num_bytes: Any, devices: int) -> Any:
        """Seconds of an all-reduce, of the fewest devices in the table that are enough, or of its most."""
        known = min((count for count in self.seconds if count >= devices), default=max(self.seconds))
        return on_line(num_bytes, self.sizes, self.seconds[known])


@functools.cache
def _stored() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "operators.json").read_text(encoding="utf-8"))


@functools.cache
def stored_operators(kind: str, name: str) -> Any:
    """The stored operators of a device or link.

    Args:
      kind: `"products"`, `"attention"` or `"all_reduces"`.
      name: of the device or link.

    Returns:
      Product tables by dtype, a tuple of kernels of attention, or a table of all-reduces.

    Raises:
      ValueError: there are none of that name.
    """
    known = _stored()[kind]
    if name not in known:
        raise ValueError(f"{kind} must be one of {', '.join(known)}, or given in full, got {name!r}")
    if kind == "products":
        return {dtype: ProductTable(**table) for dtype, table in known[name].items()}
    if kind == "attention":
        return tuple(AttentionCost(**kernel) for kernel in known[name])
    return ReduceTable(**known[name])
