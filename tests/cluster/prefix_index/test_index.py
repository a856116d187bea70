"""`PrefixIndex` against a model of plain dicts and sets, under any order of updates."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.tiers import TIERS, Match, Tier


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

    def match(self, keys: list[int]) -> dict[str, Match]:
        found = {}
        for name in {name for some in self.holders.values() for name, _ in some}:
            tiers = []
            for key in keys:
                here = [tier for tier in TIERS if (name, tier) in self.holders.get(key, ())]
                if not here:
                    break
                tiers.append(here[0])
            if tiers:
                found[name] = Match(len(tiers), *map(tiers.count, TIERS))
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


@settings(max_examples=150, deadline=None)
@given(st.lists(UPDATE, max_size=25), st.lists(KEYS, min_size=1, max_size=5))
def test_any_updates_give_what_a_dict_of_sets_gives(updates: list[tuple], requests: list[list[int]]) -> None:
    index, model = PrefixIndex(), Model()
    for name, *arguments in updates:
        getattr(index, name)(*arguments)
        getattr(model, name)(*arguments)
        assert index.num_blocks == model.num_blocks
    for keys in [*requests, *(update[3] for update in updates if update[0] == "store")]:
        assert index.match(np.array(keys, np.uint64)) == model.match(keys)
