"""The predictor that is fitted to an engine's measured steps, whose rows are local, replicated and sharded.

Source: Mnemosyne, section 4.2, and Medha, section 4.1, which both use Vidur's predictor.
"""

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping

from longctx.serving.predictor.work import Work, window_keys

KINDS = ("local", "replicated", "pass_kv", "pass_q", "all_gather")
"""Of batches: whose rows are all local, some replicated, or some sharded, by their exchange."""


def kind_of(work: Work) -> str:
    """The kind of a batch; `""`: its rows are sharded, and the exchange is not known."""
    if work.sharded:
        return work.exchange
    return "replicated" if work.replicated else "local"


@dataclasses.dataclass(frozen=True)
class Program:
    """The steps of one kind.

    seconds = fixed + sum(per_bucket of the buckets of sharded, replicated and local rows) + sum(per_key * keys of each
    tile size) + per_sample * samples + per_message * keys of a ring's message + per_score * rows * keys of a message
    + per_pair * pairs elsewhere

    Attributes:
      kind: one of `KINDS`.
      per_bucket: seconds of each bucket of rows, for sharded, replicated and local ones: linear layers, merges of
        states, queries that travel, and padding.
      tiles: sizes of attention's tiles in tokens, ascending. A chunk is divided into tiles of the largest size, and a
        last one of the smallest size that holds the rest.
      per_key: for each tile size, seconds for each key that a tile attends to. Padding in a tile costs like its rows.
      per_sample: seconds of a row of logits.
      fixed: seconds of everything that depends on nothing.
      per_message, per_score: of a ring whose messages hold cached and new keys: sending a key, and comparing it with a
        row where padding is computed too.
      per_pair: of the pairs of other ranks, see `Work.elsewhere`: 0 where devices share nothing.

    Raises:
      ValueError: lengths differ, or a number is negative, not finite or out of order.
    """

    kind: str
    per_bucket: tuple[tuple[float, ...], ...]
    tiles: tuple[int, ...]
    per_key: tuple[float, ...]
    per_sample: float
    fixed: float = 0.0
    per_message: float = 0.0
    per_score: float = 0.0
    per_pair: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if len(self.per_bucket) != 3:
            raise ValueError(f"per_bucket must be of three kinds of rows, got {len(self.per_bucket)}")
        if not self.tiles or len(self.tiles) != len(self.per_key):
            raise ValueError(f"per_key must have a number for each of tiles={self.tiles}, got {self.per_key}")
        if self.tiles[0] < 1 or list(self.tiles) != sorted(set(self.tiles)):
            raise ValueError(f"tiles must be positive and ascending, got {self.tiles}")
        if not all(math.isfinite(x) and x >= 0 for x in self.numbers):
            raise ValueError(f"coefficients must be finite and not negative, got {self.numbers}")

    @property
    def numbers(self) -> tuple[float, ...]:
        """All coefficients, in the order of attributes, sharded rows before replicated and local ones."""
        rows = (cost for kind in self.per_bucket for cost in kind)
        rest = (self.per_sample, self.per_message, self.per_score, self.per_pair)
        return (self.fixed, *rows, *self.per_key, *rest)

    @classmethod
    def of(cls, kind: str, buckets: tuple[int, ...], tiles: tuple[int, ...], numbers: list[float]) -> "Program":
        """Make it of all coefficients in the order of `numbers`, for such numbers of rows of each kind, ascending."""
        fixed, *rest = numbers
        n = len(buckets)
        rows, per_key = rest[: 3 * n], tuple(rest[3 * n : 3 * n + len(tiles)])
        per_bucket = tuple(tuple(rows[i * n : i * n + n]) for i in range(3))
        per_sample, *others = rest[-4:]
        return cls(kind, per_bucket, tiles, per_key, per_sample, fixed, *others)

    def seconds(self, work: Work, buckets: tuple[int, ...], window: int = 0, share: float = 0.0) -> float:
        """Seconds of a batch.

        Args:
          buckets: numbers of rows that steps are compiled for, ascending.
          window, share: tokens of the window, and share of the layers that have it; 0: none. Keys are those of a layer
            on average.
        """
        decode_keys: float = work.decode_keys
        if window:
            decode_keys = decode_keys - share * (decode_keys - work.seen_through(window).window_decode_keys)
        total = self.fixed + self.per_sample * work.samples + self.per_key[0] * decode_keys
        for rows, costs in zip((work.sharded, work.replicated, work.local), self.per_bucket, strict=True):
            if rows:
                total += costs[min(bisect_left(buckets, rows), len(buckets) - 1)]
        for start, count in work.chunks:
            keys, at, rest = split_into_tiles(self.tiles, start, count, window, share)
            total += self.per_key[-1] * keys + self.per_key[at] * rest
        message = work.ring_cached + work.sharded if work.sharded else 0
        return total + message * (self.per_message + self.per_score * work.sharded) + self.per_pair * work.elsewhere


def split_into_tiles(
    tiles: tuple[int, ...], start: int, count: int, window: int = 0, share: float = 0.0
) -> tuple[float, int, float]:
    """Divide a chunk of `count` tokens after `start` others into tiles, see `Program.tiles` and `Program.seconds`.

    Returns:
      (keys that its tiles of the largest size attend to, summed; index of the last tile's size; keys of the last tile).
    """
    size = tiles[-1]
    whole, rest = divmod(count, size)
    keys: float = whole * start + size * whole * (whole + 1) // 2
    last: float = start + count if rest else 0
    if window:
        within = min(whole, max(0, -(-(window - 1 - start) // size)))  # tiles that begin before the window is full
        seen = within * start + size * within * (within - 1) // 2 + (whole - within) * (window - 1) + whole * size
        keys -= share * (keys - seen)
        last -= share * (last - window_keys(start + whole * size, rest, window)) if rest else 0
    return keys, bisect_left(tiles, rest) if rest else 0, last


@dataclasses.dataclass(frozen=True)
class RuntimePredictor:
    """Predicts an engine whose steps are compiled for a few numbers of rows, by the work of its slowest rank.

    Steps with sharded rows whose exchange isn't known take the one that is predicted to be faster; a kind that was not
    measured takes the nearest one that was, and where that is of local rows, all rows count as such.

    Attributes:
      buckets: numbers of rows of each kind that steps are compiled for, ascending.
      programs: one for each kind that was measured; on one context rank, `"local"` alone.
      window, sliding_share: tokens of the sliding window, and the share of the layers that have it; 0: none.

    Raises:
      ValueError: there is no program, or buckets don't ascend.

    Examples:
      >>> from longctx.serving.predictor import RuntimePredictor, Work
      >>> predictor = RuntimePredictor.of_rows({8: 0.01, 64: 0.012, 512: 0.02}, tiles=(1, 64), per_key=(1e-8, 4e-7))
      >>> [predictor.seconds(Work(rows=rows)) for rows in (8, 9, 64)]  # 9 rows run in the program of 64
      [0.01, 0.012, 0.012]
      >>> round(predictor.seconds(Work.of([(0, 128, False)])), 7)  # two tiles of 64, with 64 and 128 keys
      0.0200768
    """

    buckets: tuple[int, ...]
    programs: tuple[Program, ...]
    window: int = 0
    sliding_share: float = 0.0

    def __post_init__(self) -> None:
        if not self.buckets or self.buckets[0] < 1 or list(self.buckets) != sorted({*self.buckets}):
            raise ValueError(f"buckets must be ascending numbers of rows, got {self.buckets}")
        if self.window < 0 or not 0 <= self.sliding_share <= 1:
            raise ValueError(f"window and sliding_share are out of range: {self.window}, {self.sliding_share}")
        by_kind = {program.kind: program for program in self.programs}
        if not by_kind:
            raise ValueError("programs must not be empty")
        sharded = tuple(by_kind[kind] for kind in KINDS[2:] if kind in by_kind)
        chosen = {kind: (by_kind[kind],) for kind in by_kind} | {"": sharded}
        for kind, others in (("local", "replicated"), ("replicated", "local"), *((kind, "") for kind in KINDS[2:])):
            chosen[kind] = chosen.get(kind) or chosen.get(others) or self.programs[:1]
        chosen[""] = sharded or chosen["replicated"]
        object.__setattr__(self, "_chosen", chosen)

    @classmethod
    def of_rows(
        cls, seconds: Mapping[int, float], tiles: tuple[int, ...], per_key: tuple[float, ...], per_sample: float = 0.0
    ) -> "RuntimePredictor":
        """Make a predictor of one context rank, of the seconds of the program of each number of rows; see `Program`."""
        rows = ((0.0,) * len(seconds), (0.0,) * len(seconds), tuple(seconds.values()))
        return cls(tuple(seconds), (Program("local", rows, tiles, per_key, per_sample),))

    @property
    def kinds(self) -> set[str]:
        """Those that were measured."""
        return {program.kind for program in self.programs}

    def seconds(self, work: Work) -> float:
        """Seconds of a batch, as `Predictor.seconds`.

        Raises:
          ValueError: it has more rows than can be predicted.
        """
        if not work.rows:
            return 0.0
        if work.rows > self.buckets[-1]:
            raise ValueError(f"a batch of {work.rows} rows is more than the {self.buckets[-1]} that can be predicted")
        kind = kind_of(work)
        programs: tuple[Program, ...] = self._chosen[kind]  # type: ignore[attr-defined]
        if kind != "local" and programs[0].kind == "local":
            work = work._replace(replicated=0, sharded=0)
        return min(program.seconds(work, self.buckets, self.window, self.sliding_share) for program in programs)

    def prefill_seconds(self, start: int, stop: int, chunk: int) -> float:
        """Seconds of prefilling a prompt alone, as `Predictor.prefill_seconds`."""
        if stop <= start:
            return 0.0
        steps, rest = divmod(stop - start, chunk)
        last = self.seconds(Work().with_chunk(stop - rest, rest, True)) if rest else 0.0
        if not steps:
            return last
        edges, whole, total = {start, stop - rest}, stop - rest, 0.0
        if self.window:  # a window is full within one step
            full = start + max(0, self.window - 1 - start) // chunk * chunk
            edges |= {edge for edge in (full, full + chunk) if edge < whole}
        # Between edges, the seconds of a step are linear in its context: the mean of the first and the last counts.
        for begin, end in itertools.pairwise(sorted(edges)):
            ends = [self.seconds(Work().with_chunk(at, chunk, False)) for at in (begin, end - chunk)]
            total += (end - begin) // chunk * sum(ends) / 2
        sample = 0.0 if rest else self._chosen["local"][0].per_sample  # type: ignore[attr-defined]
        return total + last + sample
