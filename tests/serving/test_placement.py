"""Placement of pages on context ranks: counts are exact, and pages go where there is room."""

import math

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


@given(pages=st.integers(1, 60), seed=st.integers(0, 1000))
def test_interleaved_pages_are_placed_where_all_fit(pages: int, seed: int) -> None:
    available = np.random.default_rng(seed).integers(0, 40, 3).tolist()
    placement = Placer(3, interleave=True).place(seed, Need(0, pages, (0, 0, 0), None), available)
    counts = Interleaved(3, seed % 3).counts(0, pages)
    assert (placement is None) == any(x > y for x, y in zip(counts, available, strict=True))
    assert placement is None or placement.counts(0, pages) == counts


@given(
    pages=st.integers(1, 100),
    limit=st.sampled_from([1, 3, 10, math.inf]),
    seed=st.integers(0, 1000),
    later=st.booleans(),
)
def test_a_sequence_grows_where_there_is_room(pages: int, limit: float, seed: int, later: bool) -> None:
    rng = np.random.default_rng(seed)
    available, load = rng.integers(0, 40, 4).tolist(), rng.random(4).tolist()
    held = rng.integers(0, 12, 4).tolist() if later else [0] * 4
    need = Need(sum(held), sum(held) + pages, tuple(held), int(rng.integers(4)) if later else None)
    run = Placer(4).next_run(need, available, lambda: load, limit)
    if run is None:
        assert not any(available)
        return
    rank, count = run
    assert 0 < count <= min(pages, available[rank])
    room = [min(x, limit - y) for x, y in zip(available, held, strict=True)]
    if need.last is not None and room[need.last] > 0:
        assert rank == need.last
    elif max(room) > 0:
        assert count <= room[rank]
        fitting = [i for i in range(4) if room[i] >= min(pages, limit)]
        assert not fitting or load[rank] == min(load[i] for i in fitting)
    else:  # every rank has its limit, or no memory: one more round
        assert held[rank] // limit == min(held[i] // limit for i in range(4) if available[i])


def test_limits_follow_the_tpot_target_and_are_remembered() -> None:
    asked = []

    def limit(tpot: float | None) -> float:
        asked.append(tpot)
        return math.inf if tpot is None else 100 * tpot

    placer = Placer(2, limit=limit)
    assert [placer.limit(tpot) for tpot in (None, 0.5, 0.001, 0.5, None)] == [math.inf, 50, 1, 50, math.inf]
    assert asked == [None, 0.5, 0.001]


def test_of_equally_busy_ranks_the_one_with_most_memory_is_taken() -> None:
    """As where all prompts are sharded: else all pages would lie on the first rank."""
    need = Need(0, 10, (0, 0, 0), None)
    assert Placer(3).next_run(need, [20, 40, 30], lambda: [1.0, 1.0, 1.0], math.inf) == (1, 10)
    assert Placer(3).next_run(need, [20, 40, 30], lambda: [0.5, 1.0, 1.0], math.inf) == (0, 10)
