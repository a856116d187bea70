"""Placement of pages on context ranks: counts are exact, and what fits is placed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from longctx.serving.kv_cache.placement import Grown, Interleaved, Need, Placer


@given(stop=st.integers(0, 30), first=st.integers(0, 30), home=st.integers(0, 3), seed=st.integers(0, 1000))
def test_placement_counts_equal_the_ranks_of_its_pages(stop: int, first: int, home: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    starts = sorted({0, *rng.integers(1, 30, 3).tolist()})
    for placement in (Interleaved(4, home), Grown(4, [(at, int(rng.integers(4))) for at in starts])):
        ranks = [placement.rank(number) for number in range(80)]
        assert placement.counts(first, stop) == [ranks[first:stop].count(rank) for rank in range(4)]
        some = tuple(set(ranks[first : first + 2]))
        other = next((number for number in range(first, 80) if ranks[number] not in some), np.inf)
        assert placement.until(first, some) == other


@given(
    pages=st.integers(1, 60),
    limit=st.sampled_from([1, 3, 10, np.inf]),
    seed=st.integers(0, 1000),
    interleave=st.booleans(),
)
def test_placed_pages_fit_and_fitting_pages_are_placed(pages: int, limit: float, seed: int, interleave: bool) -> None:
    rng = np.random.default_rng(seed)
    available, load = rng.integers(0, 40, 3).tolist(), rng.random(3).tolist()
    placement = Placer(3, interleave, limit).place(0, Need(0, pages, (0, 0, 0), None), available, load)
    if placement is None:
        assert interleave or sum(available) < pages
        return
    needed = placement.counts(0, pages)
    assert sum(needed) == pages
    assert all(x <= y for x, y in zip(needed, available, strict=True))
    if not interleave and limit * 3 >= pages and min(available) >= limit:
        assert max(needed) <= limit
