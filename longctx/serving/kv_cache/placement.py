"""On which context rank each page of a sequence lives: pages grow from rank to rank, or are sharded round.

Plain data and arithmetic: nothing here depends on how long a sequence is, but for the number of its runs.

Source: growth, Mnemosyne 4.4 (figure 10); the balancer, Medha 4.3; dealing, context parallelism paper 3.6.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Protocol


class Placement(Protocol):
    """The ranks of one sequence's pages, by the pages' numbers."""

    @property
    def num_ranks(self) -> int:
        """Of the `context` axis."""
        ...

    def rank(self, number: int) -> int:
        """The rank of a page."""
        ...

    def counts(self, first: int, stop: int) -> list[int]:
        """How many of the pages `first` to `stop - 1` each rank has."""
        ...

    def until(self, number: int, ranks: tuple[int, ...]) -> float:
        """The first page from this number on that is on none of some ranks; infinite if there is none."""
        ...


@dataclass(frozen=True)
class Interleaved:
    """Page m is on rank `(home + m) % num_ranks`."""

    num_ranks: int
    home: int

    def rank(self, number: int) -> int:
        return (self.home + number) % self.num_ranks

    def counts(self, first: int, stop: int) -> list[int]:
        count, n = max(0, stop - first), self.num_ranks
        return [(count - (rank - self.home - first) % n + n - 1) // n for rank in range(n)]

    def until(self, number: int, ranks: tuple[int, ...]) -> float:
        return next((number + i for i in range(self.num_ranks) if self.rank(number + i) not in ranks), math.inf)


@dataclass
class Grown:
    """Runs `(first, rank)`: from page `first` on pages are on that rank, until the next run begins."""

    num_ranks: int
    runs: list[tuple[int, int]] = field(default_factory=list)

    def rank(self, number: int) -> int:
        runs = self.runs
        if number >= runs[-1][0] or len(runs) == 1:
            return runs[-1][1]
        return runs[bisect_right(runs, number, key=lambda run: run[0]) - 1][1]

    def counts(self, first: int, stop: int) -> list[int]:
        found = [0] * self.num_ranks
        for i, (begin, rank) in enumerate(self.runs):
            end = self.runs[i + 1][0] if i + 1 < len(self.runs) else stop
            found[rank] += max(0, min(end, stop) - max(begin, first))
        return found

    def until(self, number: int, ranks: tuple[int, ...]) -> float:
        if self.rank(number) not in ranks:
            return number
        return next((first for first, rank in self.runs if first > number and rank not in ranks), math.inf)

    def grow(self, number: int, rank: int) -> None:
        """Place the pages from this number on on a rank."""
        assert not self.runs or number > self.runs[-1][0]
        if not self.runs or self.runs[-1][1] != rank:
            self.runs.append((number, rank))


@dataclass(frozen=True)
class Need:
    """Pages `first` to `stop - 1` of a sequence.

    `held`: how many of its pages before these, found in the cache, each rank has; `last` is the rank of the last one.
    """

    first: int
    stop: int
    held: tuple[int, ...]
    last: int | None


class Placer:
    """Places new sequences by the load and the free memory of each rank.

    Args:
      num_ranks: of the `context` axis.
      interleave: place pages round over all ranks; else they stay on one rank until it is full or has `limit` pages of
        the sequence, and grow to the next.
    """

    def __init__(self, num_ranks: int = 1, interleave: bool = False, limit: float = math.inf) -> None:
        self.num_ranks, self.interleave, self.limit = num_ranks, interleave, limit

    def place(self, order: int, need: Need, available: List[int], load: List[float]) -> Placement | None:
        """The placement of a sequence; None if there is not enough memory now.

        Args:
          order: of the sequence's arrival, which staggers interleaved pages.
          available: pages on each rank.
          load: seconds of work that each rank has.
        """
        if self.interleave or self.num_ranks == 1:
            home = order % self.num_ranks if need.last is None else (need.last - need.first + 1) % self.num_ranks
            placement: Placement | None = Interleaved(self.num_ranks, home)
        else:
            placement = self._grow(need, list(available), load)
        if placement is None:
            return None
        counts = placement.counts(need.first, need.stop)
        return placement if all(x <= y for x, y in zip(counts, available, strict=True)) else None

    def _grow(self, need: Need, available: list[int], load: List[float]) -> Grown | None:
        placement, number = Grown(self.num_ranks), need.first
        held, limit = list(need.held), self.limit
        while number < need.stop or not placement.runs:
            rank = self._next(need, number, held, limit, available, load, placement)
            if rank is None:
                if not any(available):
                    return None
                limit += self.limit  # every rank has its share: once more round
                continue
            count = max(int(min(available[rank], limit - held[rank], need.stop - number)), 0)
            placement.grow(number, rank)
            available[rank] -= count
            held[rank] += count
            number += count
        return placement

    def _next(
        self,
        need: Need,
        number: int,
        held: list[int],
        limit: float,
        available: List[int],
        load: List[float],
        placement: Grown,
    ) -> int | None:
        """The rank to go on with: where the sequence's pages are, else one that can take them all, the least busy."""
        room = [min(pages, limit - mine) for pages, mine in zip(available, held, strict=True)]
        rest = need.stop - number
        if rest == 0:
            return need.last if need.last is not None else load.index(min(load))
        if not placement.runs and need.last is not None and room[need.last] > 0:
            return need.last
        fitting = [rank for rank in range(self.num_ranks) if room[rank] > 0]
        wanted = min(rest, self.limit)
        return min(fitting, key=lambda rank: (room[rank] < wanted, load[rank], -room[rank], rank), default=None)
