"""On which context rank each page of a sequence lives: pages grow from rank to rank, or are sharded round.

Plain data and arithmetic: nothing here depends on how long a sequence is, but for the number of its runs.

Source: growth, Mnemosyne 4.4 (figure 10); the balancer, Medha 4.3; dealing, context parallelism paper 3.6.
"""

import functools
import math
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field

# TPOT targets whose limits are remembered.
_REMEMBERED = 256


@dataclass(frozen=True)
class Interleaved:
    """The ranks of one sequence's pages: page m is on rank `(home + m) % num_ranks`."""

    num_ranks: int
    home: int

    def copy(self) -> "Interleaved":
        """The same, for a copy of the sequence: what either does the other does not see."""
        return self

    def rank(self, number: int) -> int:
        """The rank of a page."""
        return (self.home + number) % self.num_ranks

    def counts(self, first: int, stop: int) -> list[int]:
        """Return how many of the pages `first` to `stop - 1` each rank has."""
        count, n = max(0, stop - first), self.num_ranks
        return [(count - (rank - self.home - first) % n + n - 1) // n for rank in range(n)]

    def until(self, number: int, ranks: tuple[int, ...]) -> float:
        """The first page from this number on that is on none of some ranks; infinite if there is none."""
        return next((number + i for i in range(self.num_ranks) if self.rank(number + i) not in ranks), math.inf)


@dataclass
class Grown:
    """The same as runs `(first, rank)`: from page `first` on pages are on that rank, until the next run begins.

    A sequence that grows gets one run more when it needs it: pages after those that it is promised are not placed yet,
    and count as on the last rank.
    """

    num_ranks: int
    runs: list[tuple[int, int]] = field(default_factory=list)

    def copy(self) -> "Grown":
        """One that grows by itself."""
        return Grown(self.num_ranks, self.runs.copy())

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


Placement = Interleaved | Grown


@dataclass(frozen=True)
class Need:
    """Pages `first` to `stop - 1` of a sequence.

    `held`: how many of its pages before these each rank has, or is promised; `last` is the rank of the last one.
    """

    first: int
    stop: int
    held: tuple[int, ...]
    last: int | None


class Placer:
    """Places pages by the load and the free memory of each rank.

    Args:
      num_ranks: of the `context` axis.
      interleave: place pages round over all ranks; else they stay on one rank until it is full or has its limit of the
        sequence's pages, and grow to the next.
      limit: pages of one sequence on a rank, before it grows: as a function of its TPOT target in seconds, or None if
        it has none.
    """

    def __init__(
        self, num_ranks: int = 1, interleave: bool = False, limit: Callable[[float | None], float] = lambda _: math.inf
    ) -> None:
        self.num_ranks, self.interleave = num_ranks, interleave
        self._limit = functools.lru_cache(_REMEMBERED)(limit)

    @property
    def grows(self) -> bool:
        """Whether sequences grow from rank to rank, and get pages as they do; else all when they begin."""
        return self.num_ranks > 1 and not self.interleave

    def limit(self, tpot: float | None) -> float:
        """The most pages on a rank, if others have room, of a sequence with this TPOT target: at least 1."""
        return max(1, self._limit(tpot))

    def place(self, order: int, need: Need, available: List[int]) -> Placement | None:
        """The placement of all pages of a sequence that does not grow; None if there is not enough memory now.

        Args:
          order: of the sequence's arrival, which staggers interleaved pages.
          available: pages on each rank.
        """
        home = order % self.num_ranks if need.last is None else (need.last - need.first + 1) % self.num_ranks
        placement = Interleaved(self.num_ranks, home)
        counts = placement.counts(need.first, need.stop)
        return placement if all(x <= y for x, y in zip(counts, available, strict=True)) else None

    def next_run(
        self, need: Need, available: List[int], load: Callable[[], List[float]], limit: float
    ) -> tuple[int, int] | None:
        """Choose where a sequence grows: a rank, and how many pages it gets there; None if no page is available.

        It stays on its last rank while there is room within the limit. Else it takes the rank with the least work among
        those that have room for all that it needs there, or if none has, among all; of equals the one with the most
        memory. Where every rank has its limit of the sequence's pages, or no memory, the limit rises.

        Args:
          available: pages on each rank.
          load: gives the seconds of work that each rank has.
          limit: see `limit`.
        """
        most = min(limit, need.stop)  # as good as no limit
        if not any(pages > 0 for pages in available):
            return None
        rounds = 1 + min(mine // most for pages, mine in zip(available, need.held, strict=True) if pages > 0)
        room = [min(pages, rounds * most - mine) for pages, mine in zip(available, need.held, strict=True)]
        if need.last is not None and room[need.last] > 0:
            rank = need.last
        else:
            wanted = min(need.stop - need.first, most)
            fitting, seconds = [rank for rank in range(self.num_ranks) if room[rank] > 0], load()

            def order(rank: int) -> tuple[bool, float, float, int, int]:
                # Where sharded prompts load all ranks alike, memory decides.
                return room[rank] < wanted, seconds[rank], -min(room[rank], wanted), -available[rank], rank

            rank = min(fitting, key=order)
        return rank, int(min(room[rank], need.stop - need.first))
