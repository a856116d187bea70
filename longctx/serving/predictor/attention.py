"""Seconds of attention beside pairs and keys: what kernels add, and layers with a sliding window."""

import bisect
import dataclasses
import math
from collections.abc import Sequence as List
from typing import Any

import numpy as np

from longctx.parallel.operators import DECODE_KEYS, decode_ratio
from longctx.serving.predictor.work import Work, window_keys, window_pairs


@dataclasses.dataclass(frozen=True)
class KernelSeconds:
    """Seconds of attention's kernels in all layers of a stage, beside products and reading keys.

    Attributes:
      prompts: of a step with longer chunks.
      path, path_most: of each row of the longest chunk, until that is `path_most`.
      row, chunk: of each row of the longer chunks, and of each of these.
      decode: of a decode; `decode_overlap`: of these and reading keys, the longer hides so much of the shorter.
      latency: of calls, which is part of each step's seconds, and of what `decode_ratios` multiply.
      kv_heads, decode_ratios: of a device, and what the decodes of their number take, as of `AttentionCost`.

    Raises:
      ValueError: a number is negative or not finite, or decode_overlap is above 1.

    Source: `longctx.parallel.operators.AttentionCost`, times layers.
    """

    prompts: float = 0.0
    path: float = 0.0
    path_most: float = 0.0
    row: float = 0.0
    chunk: float = 0.0
    decode: float = 0.0
    decode_overlap: float = 0.0
    latency: float = 0.0
    kv_heads: float = 1.0
    decode_ratios: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        *numbers, _ = dataclasses.astuple(self)
        object.__setattr__(self, "_curves", {})  # ratios by the number of decodes
        if not all(0 <= number < math.inf for number in numbers) or self.decode_overlap > 1:
            raise ValueError(f"kernel must have finite numbers that are not negative, and an overlap, got {numbers}")

    def of_prompts(self, counts: List[int]) -> float:
        """Seconds of longer chunks of that many tokens, at least one chunk."""
        path = min(self.path * max(counts), self.path_most)
        return self.prompts + path + self.row * sum(counts) + self.chunk * len(counts)

    def of_decodes(self, decodes: int, keys: Any, read: Any) -> Any:
        """Seconds by which decodes take longer than the `read` seconds of their keys at the full rate; or arrays."""
        each = self.decode * decodes
        shorter_one = min(each, read) if isinstance(read, float) else np.minimum(each, read)
        seconds = each - self.decode_overlap * shorter_one
        if not (self.decode_ratios and decodes):
            return seconds
        return seconds + (self._ratio(decodes, keys / decodes) - 1) * (self.latency + read + seconds)

    def _ratio(self, decodes: int, keys: Any) -> Any:
        """The ratio of decodes with so many keys each, linear between the knots; or of arrays."""
        curves: dict[int, tuple[list[float], list[float]]] = self._curves  # type: ignore[attr-defined]
        if decodes not in curves:
            ratios = decode_ratio(self.decode_ratios, decodes * self.kv_heads, np.array(DECODE_KEYS))
            curves[decodes] = ratios.tolist(), (np.diff(ratios) / np.diff(DECODE_KEYS)).tolist()
        ratios, slopes = curves[decodes]
        if isinstance(keys, float):
            keys = min(max(keys, DECODE_KEYS[0]), DECODE_KEYS[-1])
            at = min(bisect.bisect_right(DECODE_KEYS, keys), len(slopes)) - 1
            return ratios[at] + slopes[at] * (keys - DECODE_KEYS[at])
        keys = np.clip(keys, DECODE_KEYS[0], DECODE_KEYS[-1])
        places = np.minimum(np.searchsorted(DECODE_KEYS, keys, side="right"), len(slopes)) - 1
        return np.take(ratios, places) + np.take(slopes, places) * (keys - np.take(DECODE_KEYS, places))


NO_KERNEL = KernelSeconds()


@dataclasses.dataclass(frozen=True)
class SlidingCost:
    """Cost of attention in the layers with a sliding window, of the stage that takes longest.

    Attributes:
      window: tokens that a query sees, itself included.
      per_pair, per_key: as of `CurvePredictor`, for the pairs and keys that windows leave.
      share: of a stage's layers, those with the window.

    Raises:
      ValueError: a number is out of range.
    """

    window: int
    per_pair: float
    per_key: float
    share: float

    def __post_init__(self) -> None:
        if self.window < 1 or not 0 < self.share <= 1:
            raise ValueError(f"window must be at least 1, and share above 0 and at most 1, got {self}")
        if not all(0 <= seconds < math.inf for seconds in (self.per_pair, self.per_key)):
            raise ValueError(f"seconds must be finite and not negative, got {self}")

    def seconds(self, work: Work, overlap: float) -> tuple[float, float, int]:
        """Seconds of longer chunks, and of decodes; and the keys that these see."""
        work, hidden = work.seen_through(self.window), overlap * min(self.per_pair, self.per_key)
        prompts = sum([self._attention(pairs, keys, overlap) for pairs, keys in work.window_chunks])
        return prompts, (self.per_pair + self.per_key - hidden) * work.window_decode_keys, work.window_decode_keys

    def prefill_seconds(self, start: int, stop: int, chunk: int, overlap: float) -> float:
        """Seconds of the chunks of a prompt, as `Predictor.prefill_seconds`."""
        window, steps = self.window, (stop - start) // chunk
        inside = min(steps, max(0, window - start) // chunk)  # chunks whose queries see all before them
        edge = start + inside * chunk
        pairs, keys = pairs_and_keys(start, edge, chunk)
        seconds = self.per_pair * pairs + self.per_key * keys
        seconds -= overlap * shorter_of_steps(self.per_pair, self.per_key, start, edge, chunk)
        if edge < stop and edge < window - 1:  # the one that reaches beyond the window
            count = min(chunk, stop - edge)
            seconds += self._of_chunk(edge, count, overlap)
            edge += count
        steps, rest = divmod(stop - edge, chunk)  # all others are alike
        return seconds + steps * self._of_chunk(edge, chunk, overlap) + self._of_chunk(edge, rest, overlap)

    def _of_chunk(self, start: int, count: int, overlap: float) -> float:
        if not count:
            return 0.0
        pairs, keys = window_pairs(start, count, self.window), window_keys(start, count, self.window)
        return self._attention(pairs, keys, overlap)

    def _attention(self, pairs: int, keys: int, overlap: float) -> float:
        products, reading = self.per_pair * pairs, self.per_key * keys
        return products + reading - overlap * min(products, reading)


def pairs_and_keys(start: int, stop: int, chunk: int) -> tuple[int, int]:
    """Pairs, and keys that are read, of the chunks of a prompt from `start` to `stop`."""
    steps, rest = divmod(stop - start, chunk)
    pairs = (stop * (stop + 1) - start * (start + 1)) // 2
    return pairs, steps * start + chunk * steps * (steps + 1) // 2 + (stop if rest else 0)


def shorter(per_pair: float, per_key: float, start: int, count: int) -> float:
    """The smaller of a chunk's seconds of products and of reading keys; `start` may be an array."""
    pairs = count * start + count * (count + 1) // 2
    products, reads = per_pair * pairs, per_key * (start + count)
    return min(products, reads) if isinstance(start, int) else np.minimum(products, reads)


def shorter_of_steps(per_pair: float, per_key: float, start: int, stop: int, chunk: int) -> float:
    """The sum of `shorter` over the chunks from `start` to `stop`."""
    steps, rest = divmod(stop - start, chunk)
    # Both are linear in where a chunk starts; so from some chunk on, the other one is the smaller.
    pair, key = per_pair * chunk, per_key
    first, slope = per_pair * (chunk * (chunk + 1) // 2) - key * chunk, pair - key
    at = steps if not slope else min(steps, max(0, math.ceil((-first / slope - start) / chunk)))
    total = shorter(per_pair, per_key, stop - rest, rest) if rest else 0.0
    for begin, end in ((0, at), (at, steps)):
        if begin < end:
            ends = (start + begin * chunk, start + (end - 1) * chunk)
            total += (end - begin) * sum(shorter(per_pair, per_key, each, chunk) for each in ends) / 2
    return total
