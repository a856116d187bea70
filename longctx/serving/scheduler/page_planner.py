"""Placement of the pages of sequences that are admitted, and whether there is room for them."""

from collections.abc import Collection
from typing import NamedTuple

from longctx.serving.kv_cache.placement import Grown, Need, Placement, Placer
from longctx.serving.scheduler.growth import Growth
from longctx.serving.scheduler.running import Running
from longctx.serving.scheduler.sequence import Sequence


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
        return self._pool.find(page.key)
