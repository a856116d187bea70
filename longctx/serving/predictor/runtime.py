"""The runtime predictor: seconds of a batch from its features, non-negative and linear, so that it extrapolates.

Source: Mnemosyne, 4.2, and Medha, 4.1 (which take Vidur's).
"""

import dataclasses
import math
from bisect import bisect_left
from typing import Protocol

from longctx.serving.predictor.work import Work


class Predictor(Protocol):
    """Pure functions."""

    def seconds(self, work: Work) -> float:
        """Of one batch; 0 for an empty one."""
        ...

    def prefill_seconds(self, start: int, stop: int, chunk: int) -> float:
        """Of reading a prompt's tokens from `start` to `stop` alone, in chunks of `chunk` tokens."""
        ...


def check_predictor(predictor: Predictor, rows: int) -> Predictor:
    """A predictor of steps of up to so many rows.

    Raises:
      TypeError: it lacks a method.
      ValueError: it knows no step so large, or says something that is no number of seconds.
    """
    if not all(callable(getattr(predictor, name, None)) for name in ("seconds", "prefill_seconds")):
        raise TypeError(f"predictor must have `seconds` and `prefill_seconds`, got {predictor!r}")
    for seconds in (predictor.seconds(Work(rows)), predictor.prefill_seconds(0, 2 * rows, rows)):
        if not 0 <= seconds < math.inf:
            raise ValueError(f"predictor must give finite seconds of at least 0, got {seconds}")
    return predictor


def readable_tokens(predictor: Predictor, tpot: float | None, stages: int, most: int) -> float:
    """How many tokens one decode alone can read within its target, which `stages` steps share.

    Infinite beyond `most`, and where it can't be met with one either: then more ranks don't help.

    Source: the limit at which a request takes on one more rank, Mnemosyne 4.4.
    """

    def is_met(tokens: int) -> bool:
        return predictor.seconds(Work(1, 1, tokens)) <= tpot / stages  # type: ignore[operator]

    if tpot is None or is_met(most) or not is_met(1):
        return math.inf
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


@dataclasses.dataclass(frozen=True)
class Program:
    """The step compiled for so many rows: seconds = fixed + per_key . keys by tile + per_sample * samples.

    Attributes:
      rows: computed in any case, whatever a batch has.
      fixed: seconds of the linear layers and all else that only the rows decide.
      tiles: attention cuts a chunk into tiles of so many tokens, ascending: of the largest, and of the least that holds
        what is left.
      per_key: seconds of a tile of each size for each key that it sees; its rows beyond the chunk cost like others.
      per_sample: seconds of a row of logits.

    Raises:
      ValueError: lengths differ, or something is not finite, negative, or out of order.
    """

    rows: int
    fixed: float
    tiles: tuple[int, ...]
    per_key: tuple[float, ...]
    per_sample: float

    def __post_init__(self) -> None:
        numbers = (self.fixed, *self.per_key, self.per_sample)
        if not all(math.isfinite(x) and x >= 0 for x in numbers):
            raise ValueError(f"seconds must be finite and not negative, got {numbers}")
        if not self.tiles or len(self.tiles) != len(self.per_key):
            raise ValueError(f"per_key must have a number for each of tiles={self.tiles}, got {self.per_key}")
        if self.rows < 1 or self.tiles[0] < 1 or list(self.tiles) != sorted(set(self.tiles)):
            raise ValueError(f"rows must be positive, tiles positive and ascending, got {self.rows} and {self.tiles}")

    def seconds(self, work: Work) -> float:
        total = self.fixed + self.per_sample * work.samples + self.per_key[0] * work.decode_keys
        for start, count in work.chunks:
            keys, at, rest = cut(self.tiles, start, count)
            total += self.per_key[-1] * keys + self.per_key[at] * rest
        return total


def cut(tiles: tuple[int, ...], start: int, count: int) -> tuple[int, int, int]:
    """The keys that all of a chunk's tiles of the largest size see, the last tile's size (its index), and its keys."""
    size = tiles[-1]
    whole, rest = divmod(count, size)
    keys = whole * start + size * whole * (whole + 1) // 2
    return keys, bisect_left(tiles, rest) if rest else 0, start + count if rest else 0


def keys_by_tile(tiles: tuple[int, ...], work: Work) -> list[int]:
    """What `Program.per_key` is multiplied by."""
    found = [0] * len(tiles)
    found[0] += work.decode_keys
    for start, count in work.chunks:
        keys, at, rest = cut(tiles, start, count)
        found[-1] += keys
        found[at] += rest
    return found


@dataclasses.dataclass(frozen=True)
class RuntimePredictor:
    """Of an engine whose steps are compiled for a few numbers of rows: a batch runs in the least that holds it.

    Each is a program of its own and has coefficients of its own. `programs` ascend in rows; ValueError otherwise.
    """

    programs: tuple[Program, ...]

    def __post_init__(self) -> None:
        rows = [program.rows for program in self.programs]
        if not rows or rows != sorted(set(rows)):
            raise ValueError(f"programs must be of ascending numbers of rows, got {rows}")
        object.__setattr__(self, "_rows", rows)

    def seconds(self, work: Work) -> float:
        return self._program(work.rows).seconds(work) if work.rows else 0.0

    def prefill_seconds(self, start: int, stop: int, chunk: int) -> float:
        if stop <= start:
            return 0.0
        steps, rest = divmod(stop - start, chunk)
        last = self.seconds(Work().with_chunk(stop - rest, rest, True)) if rest else 0.0
        if not steps:
            return last
        # Steps differ in their context only, and linearly: as many of the mean.
        program = self._program(chunk)
        ends = [program.seconds(Work().with_chunk(at, chunk, False)) for at in (start, stop - rest - chunk)]
        return steps * sum(ends) / 2 + last + (0.0 if rest else program.per_sample)

    def _program(self, rows: int) -> Program:
        """ValueError for more rows than there is a program for."""
        at = bisect_left(self._rows, rows)  # type: ignore[attr-defined]
        if at == len(self.programs):
            raise ValueError(f"a batch of {rows} rows is more than the {self.programs[-1].rows} that can be predicted")
        return self.programs[at]


@dataclasses.dataclass(frozen=True)
class CurvePredictor:
    """Of operators that run for just the rows there are: from data sheets (`roofline`) or tables (`from_tables`).

    seconds = linear(rows) + per_pair * pairs + per_key * keys + per_sample * samples, see `Work`.

    Attributes:
      rows, linear: numbers of rows, ascending, and the seconds of each in all but attention and logits. What lies
        between is interpolated, beyond them goes on as between the last two; fewer than the first cost the same.

    Raises:
      ValueError: lengths differ, or something is not finite, negative, or out of order.
    """

    rows: tuple[int, ...]
    linear: tuple[float, ...]
    per_pair: float
    per_key: float
    per_sample: float

    def __post_init__(self) -> None:
        if len(self.rows) < 2 or len(self.rows) != len(self.linear):
            raise ValueError(f"rows and linear must be of one length, 2 or more: {len(self.rows)}, {len(self.linear)}")
        if self.rows[0] < 1 or list(self.rows) != sorted(set(self.rows)):
            raise ValueError(f"rows must be positive and ascending, got {self.rows}")
        numbers = (*self.linear, self.per_pair, self.per_key, self.per_sample)
        if not all(math.isfinite(x) and x >= 0 for x in numbers) or list(self.linear) != sorted(self.linear):
            raise ValueError(f"seconds must be finite, not negative, and linear not decreasing, got {numbers}")

    def seconds(self, work: Work) -> float:
        if not work.rows:
            return 0.0
        attention = self.per_pair * work.pairs + self.per_key * work.keys
        return self._of_rows(work.rows) + attention + self.per_sample * work.samples

    def prefill_seconds(self, start: int, stop: int, chunk: int) -> float:
        if stop <= start:
            return 0.0
        steps, rest = divmod(stop - start, chunk)
        linear = steps * self._of_rows(chunk) + (self._of_rows(rest) if rest else 0.0)
        pairs = (stop * (stop + 1) - start * (start + 1)) // 2
        keys = steps * start + chunk * steps * (steps + 1) // 2 + (stop if rest else 0)
        return linear + self.per_pair * pairs + self.per_key * keys + self.per_sample

    def _of_rows(self, rows: int) -> float:
        at = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        if at == 0:
            return self.linear[0]
        slope = (self.linear[at] - self.linear[at - 1]) / (self.rows[at] - self.rows[at - 1])
        return self.linear[at] + slope * (rows - self.rows[at])
