"""A predictor of measured steps over several context ranks, whose rows are local, replicated and sharded."""

import dataclasses
import math
from bisect import bisect_left
from typing import Any

from longctx.serving.predictor.runtime import keys_by_tile, split_into_tiles, sum_of_steps
from longctx.serving.predictor.work import Work

KINDS = ("local", "replicated", "pass_kv", "pass_q", "all_gather")
"""Of batches: whose rows are all local, some replicated, or some sharded, by their exchange."""


def kind_of(work: Work) -> str:
    """The kind of a batch; `""`: its rows are sharded, and the exchange is not known."""
    if work.sharded:
        return work.exchange
    return "replicated" if work.replicated else "local"


@dataclasses.dataclass(frozen=True)
class MeshProgram:
    """The steps of one kind.

    seconds = fixed + sum(per_bucket of the buckets of sharded, replicated and local rows) + sum(per_key * keys of each
    tile size) + per_sample * samples + per_message * keys of a ring's message + per_score * rows * keys of a message
    + per_pair * pairs elsewhere

    Attributes:
      kind: one of `KINDS`.
      per_bucket: seconds of each bucket of rows, for sharded, replicated and local ones: linear layers, merges of
        states, queries that travel.
      tiles, per_key: as of `Program`.
      per_message, per_score: of a ring whose messages hold cached and new keys: sending a key, and comparing it with a
        row where padding is computed too.
      per_pair: of the pairs of other ranks, see `Work.elsewhere`: 0 where devices share nothing.

    Raises:
      ValueError: lengths differ, or a number is negative or not finite.
    """

    kind: str
    fixed: float
    per_bucket: tuple[tuple[float, ...], ...]
    tiles: tuple[int, ...]
    per_key: tuple[float, ...]
    per_sample: float
    per_message: float
    per_score: float
    per_pair: float

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if len(self.per_bucket) != 3 or len(self.tiles) != len(self.per_key):
            raise ValueError("per_bucket must be of three kinds of rows, and per_key as long as tiles")
        numbers = [*self.numbers]
        if not all(math.isfinite(x) and x >= 0 for x in numbers):
            raise ValueError(f"coefficients must be finite and not negative, got {numbers}")

    @property
    def numbers(self) -> tuple[float, ...]:
        """All coefficients, in the order of `features`."""
        rows = (cost for kind in self.per_bucket for cost in kind)
        rest = (self.per_sample, self.per_message, self.per_score, self.per_pair)
        return (self.fixed, *rows, *self.per_key, *rest)

    @classmethod
    def of(cls, kind: str, buckets: tuple[int, ...], tiles: tuple[int, ...], numbers: list[float]) -> "MeshProgram":
        """From all coefficients, in the order of `features`."""
        fixed, *rest = numbers
        n = len(buckets)
        rows, per_key = rest[: 3 * n], tuple(rest[3 * n : 3 * n + len(tiles)])
        return cls(kind, fixed, tuple(tuple(rows[i * n : i * n + n]) for i in range(3)), tiles, per_key, *rest[-4:])

    def seconds(self, work: Work, buckets: tuple[int, ...]) -> float:
        total = self.fixed + self.per_sample * work.samples + self.per_key[0] * work.decode_keys
        for rows, costs in zip((work.sharded, work.replicated, work.local), self.per_bucket, strict=True):
            if rows:
                total += costs[min(bisect_left(buckets, rows), len(buckets) - 1)]
        for start, count in work.chunks:
            keys, at, rest = split_into_tiles(self.tiles, start, count)
            total += self.per_key[-1] * keys + self.per_key[at] * rest
        message = work.ring_cached + work.sharded if work.sharded else 0
        return total + message * (self.per_message + self.per_score * work.sharded) + self.per_pair * work.elsewhere


def features(work: Work, buckets: tuple[int, ...], tiles: tuple[int, ...]) -> list[float]:
    """Return the factors of the coefficients of a `MeshProgram`."""
    rows = [0.0] * (3 * len(buckets))
    for i, count in enumerate((work.sharded, work.replicated, work.local)):
        if count:
            rows[i * len(buckets) + bisect_left(buckets, count)] = 1.0
    message = work.ring_cached + work.sharded if work.sharded else 0
    rest = [work.samples, message, message * work.sharded, work.elsewhere]
    return [1.0, *rows, *keys_by_tile(tiles, work), *rest]


@dataclasses.dataclass(frozen=True)
class MeshPredictor:
    """Predicts an engine over several context ranks, by the work of its slowest rank.

    Steps with sharded rows whose exchange isn't known take the one that is predicted to be faster; a kind that was not
    measured takes the nearest one that was.

    Attributes:
      buckets: numbers of rows of each kind that steps are compiled for, ascending.
      programs: one for each kind that was measured.

    Raises:
      ValueError: there is no program of local or of sharded rows, or buckets don't ascend.
    """

    buckets: tuple[int, ...]
    programs: tuple[MeshProgram, ...]

    def __post_init__(self) -> None:
        if not self.buckets or list(self.buckets) != sorted({*self.buckets}):
            raise ValueError(f"buckets must be ascending numbers of rows, got {self.buckets}")
        by_kind = {program.kind: program for program in self.programs}
        if not by_kind:
            raise ValueError("programs must not be empty")
        sharded = tuple(by_kind[kind] for kind in KINDS[2:] if kind in by_kind)
        chosen = {kind: (by_kind[kind],) for kind in by_kind} | {"": sharded}
        for kind, others in (("local", "replicated"), ("replicated", "local"), *((kind, "") for kind in KINDS[2:])):
            chosen[kind] = chosen.get(kind) or chosen.get(others) or self.programs[:1]
        chosen[""] = sharded or chosen["replicated"]
        object.__setattr__(self, "_chosen", chosen)

    @property
    def kinds(self) -> set[str]:
        """Those that were measured."""
        return {program.kind for program in self.programs}

    def seconds(self, work: Work) -> float:
        if not work.rows:
            return 0.0
        if work.rows > self.buckets[-1]:
            raise ValueError(f"a batch of {work.rows} rows is more than the {self.buckets[-1]} that can be predicted")
        programs = self._chosen[kind_of(work)]  # type: ignore[attr-defined]
        return min(program.seconds(work, self.buckets) for program in programs)

    def prefill_seconds(self, start: int, stop: int, chunk: int) -> float:
        def per_sample() -> float:
            return self.seconds(Work(1, 1, 1)) - self.seconds(Work(1, 0, 1))

        return sum_of_steps(self.seconds, start, stop, chunk, per_sample)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "MeshPredictor":
        """From plain data, as `dataclasses.asdict` makes it; KeyError, TypeError or ValueError if it isn't that."""
        programs = []
        for each in fields["programs"]:
            rows = tuple(tuple(costs) for costs in each["per_bucket"])
            programs.append(
                MeshProgram(**each | {"per_bucket": rows} | {n: tuple(each[n]) for n in ("tiles", "per_key")})
            )
        return cls(tuple(fields["buckets"]), tuple(programs))
