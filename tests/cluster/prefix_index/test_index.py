"""`PrefixIndex` against a model of plain dicts and sets, under any order of updates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.cluster.prefix_index.index import TIERS, PrefixIndex, Tier


class Model:
    """Who holds a key, as a dict of sets."""

    def __init__(self) -> None:
        self.holders: dict[int, set[tuple[str, Tier]]] = {}

    def store(self, instance: str, tier: Tier, keys: list[int]) -> None:
        for key in keys:
            self.holders.setdefault(key, set()).add((instance, tier))

    def remove(self, instance: str, tier: Tier, keys: list[int]) -> None:
        for key in keys:
            self.holders.get(key, set()).discard((instance, tier))

    def clear(self, instance: str, tier: Tier | None = None) -> None:
        for key in self.holders:
            for each in TIERS if tier is None else [tier]:
                self.remove(instance, each, [key])

    @property
    def num_blocks(self) -> int:
        return sum(map(bool, self.holders.values()))

    def match(self, keys: list[int]) -> dict[str, int]:
        found = {}
        for name in {name for some in self.holders.values() for name, _ in some}:
            held = [any((name, tier) in self.holders.get(key, ()) for tier in TIERS) for key in [*keys, None]]
            if count := held.index(False):
                found[name] = count
        return found


LARGEST = 2**64 - 1
# Keys with all their bits, at the ends of the range, and 200 that differ in high bits only.
NUMBERS = st.one_of(
    st.integers(0, 60), st.sampled_from([LARGEST, LARGEST - 1]), st.integers(0, 200).map(lambda n: n << 55)
)
KEYS = st.one_of(
    st.lists(NUMBERS, max_size=40),
    st.tuples(st.integers(0, 80), st.integers(1, 60)).map(lambda r: list(range(r[0], sum(r)))),
)
NAMES, TIER = st.integers(0, 70).map("instance-{}".format), st.sampled_from(TIERS)
UPDATE = st.one_of(
    st.tuples(st.just("store"), NAMES, TIER, KEYS),
    st.tuples(st.just("store"), st.just("instance-0"), TIER, KEYS),
    st.tuples(st.just("remove"), NAMES, TIER, KEYS),
    st.tuples(st.just("remove"), st.just("instance-0"), TIER, KEYS),
    st.tuples(st.just("clear"), NAMES, st.none() | TIER),
    st.tuples(st.just("clear"), st.just("instance-0"), st.none() | TIER),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(UPDATE, max_size=25), st.lists(KEYS, min_size=1, max_size=5))
def test_any_updates_give_what_a_dict_of_sets_gives(updates: list[tuple], requests: list[list[int]]) -> None:
    index, model = PrefixIndex(), Model()
    for name, *arguments in updates:
        getattr(index, name)(*arguments)
        getattr(model, name)(*arguments)
        assert index.num_blocks == model.num_blocks
    for keys in [*requests, *(update[3] for update in updates if update[0] == "store")]:
        assert index.match(np.array(keys, np.uint64)) == model.match(keys)


def test_cold_blocks_are_the_longest_unused_and_of_those_the_tails_first() -> None:
    index = PrefixIndex()
    index.store("a", "device", range(10))
    index.store("a", "host", range(5))
    index.store("b", "disk", range(3, 7))
    assert index.cold("a", "device", 1, 100).tolist() == list(range(9, -1, -1))
    index.touch(np.arange(4, dtype=np.uint64), 50.9)
    index.store("a", "device", [20])  # new ones have the last time
    assert index.cold("a", "device", 50, 3).tolist() == [9, 8, 7]
    assert index.cold("a", "device", 51, 100).tolist() == [9, 8, 7, 6, 5, 4, 20, 3, 2, 1, 0]
    assert index.cold("a", "device", 51, 100, held_by=2).tolist() == [6, 5, 4, 3]
    assert index.cold("a", "host", 50, 100).tolist() == [4]
    assert index.cold("b", "device", 100, 100).tolist() == index.cold("c", "disk", 100, 100).tolist() == []


def test_an_index_counts_blocks_and_bytes() -> None:
    index = PrefixIndex()
    for i in range(3):
        index.store("a", "device", range(1000 * i, 1000 * i + 1500))
    index.store("b", "host", [7, 7, 8])
    index.remove("a", "device", [7, 7, 9_999])
    assert (index.num_blocks, index.blocks("a", "device"), index.blocks("b", "host")) == (3500, 3499, 2)
    assert index.blocks("a", "host") == index.blocks("c", "disk") == 0
    assert index.keys("b", "host").tolist() == [7, 8]
    assert 80 * 3500 < index.num_bytes < 250 * 3500
    index.clear("a", "device")
    assert (index.num_blocks, index.blocks("a", "device"), index.instances) == (2, 0, ["a", "b"])
    index.clear("a")
    assert index.instances == ["b"]


@pytest.mark.parametrize("keys", [[-1], [2**64], [1.5], ["1"], [None], 5, np.zeros(3), np.zeros((2, 2), np.uint64)])
def test_keys_that_are_none_are_refused_and_change_nothing(keys: object) -> None:
    index = PrefixIndex()
    index.store("a", "device", [1])
    for change in (index.store, index.remove):
        with pytest.raises((TypeError, OverflowError)):
            change("a", "device", keys)  # type: ignore[arg-type]
    assert (index.num_blocks, index.instances) == (1, ["a"])
    with pytest.raises(TypeError, match="keys must be uint64"):
        index.match(np.zeros(3))


def test_blocks_of_many_instances_and_long_prefixes_with_holes() -> None:
    """More instances than bits in a machine word, and prefixes longer than what is compared or looked up at a time."""
    rng = np.random.default_rng(0)
    index, model = PrefixIndex(), Model()
    chain = rng.integers(0, 2**64, 3000, dtype=np.uint64)
    for number in range(150):
        first, stop = np.sort(rng.integers(0, 3000, 2)).tolist()
        tier, name = TIERS[number % 3], f"i{number}"
        for some in (chain[: max(first, 1)], chain[first:stop]):
            index.store(name, tier, some)
            model.store(name, tier, some.tolist())
    holes = rng.choice(chain, 100, replace=False)
    for number in range(0, 150, 7):
        index.remove(f"i{number}", TIERS[number % 3], holes)
        model.remove(f"i{number}", TIERS[number % 3], holes.tolist())
    index.store("late", "disk", rng.permutation(chain))  # at the positions of those that nobody holds
    model.store("late", "disk", chain.tolist())
    assert index.match(chain) == model.match(chain.tolist())
    shuffled = rng.permutation(chain)
    assert index.match(shuffled) == model.match(shuffled.tolist())
