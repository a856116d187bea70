"""What `benchmarks.tier_hit_rates` counts, on traces small enough to count by hand."""

import random

import pytest

from benchmarks.tier_hit_rates import HitRate, hit_rate
from longctx.serving.kv_cache.tiers.index import EVICTION

TURNS = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 7], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("eviction", sorted(EVICTION))
def test_with_room_for_all_blocks_only_new_ones_are_missed(eviction: str) -> None:
    assert hit_rate(TURNS, 6, eviction) == HitRate(0 + 3 + 2 + 4, 15)
    assert hit_rate([], 6, eviction).percent == 0


def test_what_was_used_least_recently_is_missed() -> None:
    # 0 1 2 | 0 1 2 3 | 7 takes the place of 3 | 3 and 4 come back in the places of 7 and 3.
    assert hit_rate(TURNS, 4, "lru") == HitRate(0 + 3 + 2 + 3, 15)
    assert hit_rate([[0], [1], [0], [1]], 1, "lru").hits == 0
    assert hit_rate([[0], [0], [1], [0]], 1, "lru").hits == 1


def test_a_block_without_those_before_it_is_no_hit() -> None:
    # The third prompt finds 5 and 6, which are cut off from its beginning.
    assert hit_rate([[4, 5, 6], [9], [8, 5, 6]], 10, "lru").hits == 0


def test_lru_over_single_blocks_is_the_textbook_one() -> None:
    generator = random.Random(0)
    trace = [[int(generator.expovariate(0.1))] for _ in range(2000)]
    recent: list[int] = []
    hits = 0
    for (block,) in trace:
        hits += block in recent
        recent = [block, *(other for other in recent if other != block)][:8]
    assert 0 < hit_rate(trace, 8, "lru").hits == hits
