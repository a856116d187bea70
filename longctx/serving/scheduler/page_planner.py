"""Placement of the pages of sequences: which of them are found, promised now or reserved for later, and on which ranks.

A sequence that is longer than its limit on a rank begins with promises of one rank's pages, and gets the next rank's
when it reaches them. Pages of any rank serve it, so memory is one resource, and sequences that grow beside each other
could each hold what the other needs. They can't: promises are made only if afterwards there is an order in which all
running sequences can end, each with what those before it give back (Dijkstra's banker's algorithm).

Under `admission="reserve"` a sequence may need pages for its prompt and max_tokens, and is promised all of them before
its prompt ends: decodes never wait. Under `"optimistic"` it may need those of its prompt.

Source: growth, Mnemosyne 4.4; the choice of the rank when it is needed, Medha 4.3; Dijkstra 1965, EWD 123.
Reservations: EASY backfilling of batch schedulers (Lifka 1995; Mu'alem and Feitelson 2001), with pages for nodes.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable
from collections.abc import Sequence as List
from itertools import accumulate
from typing import NamedTuple

from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.kv_cache.placement import Grown, Need, Placement, Placer
from longctx.serving.kv_cache.window_pages import NO_PAGE
from longctx.serving.scheduler.forecast import Forecast
from longctx.serving.scheduler.running import Running
from longctx.serving.scheduler.sequence import Sequence


class Claim(NamedTuple):
    """`needs`: pages that a sequence may still need. `releasable`: those that it gives back besides when it ends."""

    needs: int
    releasable: int


def grantable(needs: int, free: int, others: List[Claim], rest: int) -> int:
    """Return how many of the pages that a sequence needs can be promised now so that all sequences can still end.

    Args:
      free: pages that are available.
      others: other sequences that need pages.
      rest: pages that sequences give back which need none.
    """
    grant = min(needs, free)
    if needs <= free:
        return max(0, grant)  # when it has ended, the others can end as they could before
    free += rest
    for other in sorted(others):
        if needs <= free:
            break
        grant = min(grant, free - other.needs)
        free += other.releasable
    return max(0, grant) if needs <= free else 0


class Growth:
    """Assigns pages of ranks to sequences that grow.

    Args:
      rows: tokens of one prompt in a step, at most.
    """

    def __init__(self, running: Running, placer: Placer, forecast: Forecast, rows: int, optimistic: bool) -> None:
        self._running, self._pool, self._placer, self._forecast = running, running.pool, placer, forecast
        self._rows, self._optimistic = rows, optimistic

    def rank_load(self) -> list[float]:
        """Seconds of prompts that each rank has to compute."""
        return self._forecast.rank_load(self._running.prefilling)

    def limit(self, sequence: Sequence) -> int:
        """Pages that a sequence has on one rank, at most, if others have room."""
        return int(min(self._placer.limit(sequence.tpot_target), self._pool.per_rank))

    def grantable(
        self, sequence: Sequence, needs: int, free: int, shared: int = 0, without: Collection[Sequence] = ()
    ) -> int:
        """Return how many of the pages that a sequence needs can be promised to it now, see `grantable`.

        Args:
          shared: pages that it would share with one other, which gives them back only when both have ended.
          without: sequences that would be preempted; `free` has what they give back.
        """
        rest, others = self._pool.num_alone + self._pool.num_reserved - shared, []
        for other in self._running:
            if other is sequence or other.claim or other in without:
                rest -= (gives := self.releasable_pages(other))
                if other is not sequence and other not in without:
                    others.append(Claim(other.claim, gives))
        return grantable(needs, free, others, rest)

    def releasable_pages(self, sequence: Sequence) -> int:
        """Pages that a running sequence gives back when it ends, of those that it has or is promised."""
        return sum(self._pool.alone(sequence.order)) + sum(sequence.reserved) + sequence.promised

    def is_due(self, sequence: Sequence) -> bool:
        """Whether a prompt needs promises for the next step."""
        return sequence.claim > 0 and sequence.plannable < min(sequence.remaining, self._rows)

    def grow(self, sequence: Sequence) -> bool:
        """Promise a prompt what it needs in the next step; False if it must wait for some of it."""
        while sequence.claim and sequence.reach < sequence.computed + min(sequence.remaining, self._rows):
            if not self._promise_run(sequence):
                return False
        if not self.is_due(sequence):
            return True
        if self._free() < sequence.claim:
            return False
        self._running.promise_rest(sequence)
        return True

    def needs(self, sequence: Sequence) -> int:
        """Pages that a prompt lacks for the next step."""
        tokens = sequence.computed + min(sequence.remaining, self._rows) - sequence.reach
        return min(max(1, self._running.pages_of(int(tokens))), sequence.claim)

    def could_grow(self, sequence: Sequence, without: Collection[Sequence]) -> bool:
        """Whether a prompt would get what it needs in the next step, if others were preempted."""
        free = self._free() + sum(map(self.releasable_pages, without))
        return self.grantable(sequence, sequence.claim, free, without=without) >= self.needs(sequence)

    def place_promised(self, sequence: Sequence) -> None:
        """Choose the rank of a decode's next pages, which it is promised."""
        is_there = self._promise_run(sequence)
        assert is_there, "a page that was promised is not there"

    def _promise_run(self, sequence: Sequence) -> bool:
        grant = sequence.promised or self.grantable(sequence, sequence.claim, self._free())
        run = self.next_run(sequence, grant) if grant else None
        if run is not None:
            self._running.promise_run(sequence, *run)
        return run is not None

    def next_run(self, sequence: Sequence, count: int) -> tuple[int, int] | None:
        """Return rank and number of up to `count` pages that follow those a running sequence has or is promised."""
        held = tuple(a + b for a, b in zip(sequence.rank_pages, sequence.reserved, strict=True))
        stop = sum(held)
        assert sequence.placement is not None
        need = Need(stop, stop + count, held, sequence.placement.rank(stop))
        return self._placer.next_run(need, self._pool.by_rank, self.rank_load, self.limit(sequence))

    def _free(self) -> int:
        """Pages that can be promised to those that grow."""
        # Nothing is promised to optimistic decodes: they shall not preempt at once who grows.
        return self._pool.num_available - self._optimistic * len(self._running.decoding)


class PagePlan(NamedTuple):
    """Pages of a sequence: those `found` in the cache, of which the first `num_full` are full, then new ones.

    New ones are promised up to page `stop` of `total`; if it grows, the others when it reaches them.
    """

    found: list[int]
    num_full: int
    placement: Placement
    stop: int
    total: int


class PagePlanner:
    """Plans the pages of sequences that are admitted.

    Args:
      optimistic: a sequence needs the pages of its prompt; else all pages that it may ever need.
    """

    def __init__(self, running: Running, placer: Placer, growth: Growth, optimistic: bool) -> None:
        self._running, self._pool, self._placer = running, running.pool, placer
        self._growth, self._optimistic = growth, optimistic

    def total_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence may need: all that it may ever compute, or only before it can sample."""
        reach = sequence.prompt_length + sequence.max_tokens - 1
        return self._running.pages_of(min(sequence.length, reach) if self._optimistic else reach)

    def least_pages(self, sequence: Sequence) -> int:
        """Return how many of these it needs to begin."""
        total = self.total_pages(sequence)
        return min(total, self._growth.limit(sequence)) if self._placer.grows and not sequence.preemptions else total

    @property
    def grows(self) -> bool:
        """Whether sequences grow from rank to rank, so that pages of any rank serve them."""
        return self._placer.grows

    def needs(self, sequence: Sequence, shared: list[int], to_begin: bool = True) -> list[int]:
        """Pages of each rank that a waiting sequence takes, or keeps from being returned by others that end.

        Where sequences grow, all ranks are counted together.

        Args:
          shared: full pages of its prefix that are in the cache.
          to_begin: only those that it needs to begin; else all.
        """
        pool, num_found = self._pool, len(shared)
        taken = [0] * pool.num_ranks
        for page in shared:
            taken[pool.rank_of(page)] += pool.is_idle(page) or pool.is_held_alone(page)
        if self._placer.grows:
            pages = self.least_pages(sequence) if to_begin else self.total_pages(sequence)
            return [sum(taken) + max(0, pages - num_found)]
        total, last = self.total_pages(sequence), pool.rank_of(shared[-1]) if shared else None
        need = Need(num_found, total, (0,) * pool.num_ranks, last)
        placement = self._placer.place(sequence.order, need, [total] * pool.num_ranks)
        assert placement is not None
        return [x + y for x, y in zip(taken, placement.counts(num_found, total), strict=True)]

    def check(self, prompt_length: int, max_tokens: int) -> None:
        """Check that a request could be admitted by an empty engine.

        Raises:
          ValueError: the pool is too small for one of its completions.
        """
        pool, pages = self._pool, self._running.pages_of(prompt_length + max_tokens - 1)
        need, ranks = Need(0, pages, (0,) * pool.num_ranks, None), [pool.per_rank] * pool.num_ranks
        fits = pages <= pool.num_pages if self._placer.grows else self._placer.place(0, need, ranks) is not None
        if not fits:
            raise ValueError(
                f"prompt and max_tokens need {pages} pages of {self._running.page_size} tokens, "
                f"more than the {pool.num_pages} that the engine has"
                + (f", {pool.per_rank} on each rank" if pool.num_ranks > 1 else "")
            )

    def plan(
        self, sequence: Sequence, shared: list[int], without: Collection[Sequence] = (), begin: int | None = None
    ) -> PagePlan | None:
        """Plan the pages of a waiting sequence; None if there is not enough memory.

        Args:
          shared: full pages of its prefix that are in the cache.
          without: running sequences that would be preempted.
          begin: the rank to begin on, if it has room and nothing was found.
        """
        partial = self._find_partial_page(sequence, len(shared))
        found = shared if partial is None else [*shared, partial]
        plan = self._place(sequence, found, len(shared), without, begin)
        if plan is None and not self._running:
            # No running sequence will give memory back: the pages that were found lie where the rest has no room.
            plan = self._place(sequence, [], 0, without, begin)
        return plan

    def _place(
        self, sequence: Sequence, found: list[int], num_full: int, without: Collection[Sequence], begin: int | None
    ) -> PagePlan | None:
        pool, total = self._pool, self.total_pages(sequence)
        available, held, num_shared = pool.by_rank, [0] * pool.num_ranks, 0
        for other in without:
            given = zip(pool.alone(other.order), other.reserved, strict=True)
            available = [pages + sum(more) for pages, more in zip(available, given, strict=True)]
        for page in found:
            rank, is_alone = pool.rank_of(page), pool.is_held_alone(page)
            held[rank] += 1
            num_shared += is_alone
            available[rank] -= pool.is_idle(page) or (is_alone and bool(without))
        if min(available) < 0:
            return None  # idle pages that were found may be promised to others
        if self._optimistic:
            # Nothing is promised to decodes: running sequences shall not be preempted at once for a new one.
            for other in self._running:
                if other not in without:
                    assert other.placement is not None
                    available[other.placement.rank(len(other.pages))] -= 1
        if not self._placer.grows:
            need = Need(len(found), total, tuple(held), pool.rank_of(found[-1]) if found else None)
            placement = self._placer.place(sequence.order, need, [max(0, pages) for pages in available])
            return None if placement is None else PagePlan(found, num_full, placement, total, total)
        need = Need(len(found), total, tuple(held), pool.rank_of(found[-1]) if found else begin)
        begun = self._begin_growth(sequence, need, available, num_shared, without)
        return None if begun is None else PagePlan(found, num_full, *begun, total)

    def _begin_growth(
        self, sequence: Sequence, need: Need, available: list[int], num_shared: int, without: Collection[Sequence]
    ) -> tuple[Grown, int] | None:
        """The first pages of a sequence that grows, and where they stop: all, or if these exceed its limit, one run.

        One that was preempted begins again only with all: decodes would take one run from it while it waits for more.
        """
        rest, limit = need.stop - need.first, self._growth.limit(sequence)
        # A prompt of which one token is left could compute nothing if it had to wait for the rest.
        is_last = sequence.length - need.first * self._running.page_size <= 1
        first = rest if is_last or sequence.preemptions else min(rest, limit)
        free = sum(available) - self._pool.promised
        if self._growth.grantable(sequence, rest, free, num_shared, without) < first:
            return None
        placement, number, held, last = Grown(self._pool.num_ranks), need.first, list(need.held), need.last
        if not first:
            assert last is not None
            placement.grow(number, last)
        while number < need.first + first:
            here = Need(number, need.first + first, tuple(held), last)
            run = self._placer.next_run(here, available, self._growth.rank_load, limit)
            assert run is not None, "pages that are available are on no rank"
            last, count = run
            placement.grow(number, last)
            held[last] += count
            available[last] -= count
            number += count
            if rest > first:
                break
        return placement, number

    def _find_partial_page(self, sequence: Sequence, num_full: int) -> int | None:
        """The partial page of its session, if all pages before it were found. Its holder hides it from others."""
        page = sequence.partial_page
        if (
            page is None
            or not sequence.may_share
            or num_full != page.number
            or num_full * self._running.page_size + page.tokens >= sequence.length
            or sequence.available > (num_full + 1) * self._running.page_size  # it is loaded with what follows
        ):
            return None
        found, windows = self._pool.find(page.key), self._pool.windows
        return None if windows is not None and found is not None and windows.find(found) == NO_PAGE else found


# Of the pages, what a reservation leaves for those that stay. With none, a reservation that takes just what comes back
# would keep every short prompt with a long answer waiting; with it, the sequence may wait for one more end.
_SPARE = 1 / 32


class PredictedEnds:
    """Predicts when sequences return their pages: prompts take turns, and all max_tokens are sampled.

    Args:
      prompts: (order, seconds) of the prompts that are read: the least order comes first.
      shares: prompts share steps, so that a short one does not wait for the whole of a longer one before it.
      token_seconds: between two tokens of a sequence.
    """

    def __init__(
        self, prompts: Iterable[tuple[tuple[float, float], float]], shares: bool, token_seconds: float, now: float
    ) -> None:
        by_order = sorted(prompts)
        self._orders = [order for order, _ in by_order]
        self._before = [0.0, *accumulate(seconds for _, seconds in by_order)]
        self._seconds = sorted(seconds for _, seconds in by_order) if shares else []
        self._shorter = [0.0, *accumulate(self._seconds)]
        self._shares, self.token_seconds, self._now = shares, token_seconds, now

    def decode_end(self, sequence: Sequence) -> float:
        """Return when a sequence ends whose prompt has been read."""
        tokens = sequence.prompt_length + sequence.max_tokens - sequence.length
        return self._now + tokens * self.token_seconds

    def end(self, sequence: Sequence, order: tuple[float, float]) -> float:
        """Return when a sequence ends that is read, or would be: after the prompts before it, or in turns with all.

        In turns, each of the others has had as much time as this one when it ends, or all that it needs.
        """
        seconds = sequence.prefill_remaining
        ahead = self._before[bisect_left(self._orders, order)]
        if self._shares:
            shorter = bisect_left(self._seconds, seconds)
            ahead = min(ahead, self._shorter[shorter] + seconds * (len(self._seconds) - shorter))
        return self.decode_end(sequence) + seconds + ahead


class Reservation:
    """Memory for a sequence without room: enough pages, at the time when they have come back by prediction.

    Of those that run, some have passed it. These don't put the reservation off, however wrong predictions are: neither
    the time nor what is left by then rests on when they end. So a sequence waits at most until all that run beside it
    when it is blocked have ended, and then for those that were to have ended by then.

    Attributes:
      time: when enough of the others will have returned their pages, and a small share besides; `-inf` if they have,
        and only sequences that were to return theirs by now hold what is missing.
      surplus: pages of each rank that are left then; of all ranks together where sequences grow.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.needs = list[int]()
        self.time, self.surplus = -math.inf, list[int]()
        # Those that have passed: some return their pages by the time of the reservation, others it does not need.
        self._returning, self._staying = set[Sequence](), set[Sequence]()

    def update(
        self, pool: PagePool, needs: list[int], others: Iterable[tuple[Sequence, float]], in_all: bool, margin: int
    ) -> None:
        """Find time and surplus anew.

        Args:
          needs: pages of each rank, or in all, that must be there.
          others: sequences that run, with their predicted ends.
          in_all: pages of all ranks are counted together.
          margin: pages of each rank, or in all, that are not available though they are free.
        """
        self.needs = needs
        returning, staying = set[Sequence](), set[Sequence]()
        back, left = list[Sequence](), list[tuple[float, int, Sequence]]()
        for other, end in others:
            if other in self._returning:
                returning.add(other)
                back.append(other)
            elif other in self._staying:
                staying.add(other)
            elif other is not self.sequence:
                left.append((end, other.order, other))
        self._returning, self._staying = returning, staying
        free = [pool.num_available] if in_all else pool.by_rank
        claims = sum(other.claim for other in staying)
        self.surplus = [pages - need - margin - claims for pages, need in zip(free, self.needs, strict=True)]
        for other in back:
            self._return(pool, other, in_all)
        self.time = -math.inf
        for end, _, other in sorted(left):
            if min(self.surplus) >= _SPARE * (pool.num_pages if in_all else pool.per_rank):
                break
            self._return(pool, other, in_all)
            self.time = end

    def allows(self, pages: List[int], end: float) -> bool:
        """Return whether a sequence that takes `pages` until `end` may pass."""
        return end <= self.time or all(count <= left for count, left in zip(pages, self.surplus, strict=True))

    def pass_by(self, other: Sequence, pages: List[int], end: float) -> None:
        """Let another sequence pass."""
        if end <= self.time:
            self._returning.add(other)
        else:
            self._staying.add(other)
            self.surplus = [left - count for count, left in zip(pages, self.surplus, strict=True)]

    def _return(self, pool: PagePool, other: Sequence, in_all: bool) -> None:
        pages = [x + y for x, y in zip(pool.alone(other.order), other.reserved, strict=True)]
        pages = [sum(pages) + other.promised] if in_all else pages
        self.surplus = [left + count for left, count in zip(self.surplus, pages, strict=True)]
