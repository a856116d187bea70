"""What a tier holds and what goes first: the index against a naive one."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.serving.kv_cache.tiers.index import EVICTION, PageName, TierIndex, TierPage


class Index(TierIndex[TierPage]):
    """An index whose pages have names of texts or numbers in place of keys."""

    def __init__(self, capacity: int, eviction: str = "lru") -> None:
        super().__init__("host", capacity, eviction)

    def put(self, name: str | int, size: int, number: int = 0, parent: str | int | None = None) -> None:
        before = b"" if parent is None else str(parent).encode()
        self.add(TierPage(PageName(str(name).encode(), before, number), size))

    def at(self, name: str | int) -> TierPage:
        page = self.find(str(name).encode())
        assert page is not None
        return page

    def free(self, size: int) -> list[str]:
        return [page.name.key.decode() for page in self.make_room(size)]

    @property
    def names(self) -> list[str]:
        return [page.name.key.decode() for page in self]


@dataclass
class Known:
    """An entry of the naive index."""

    size: int
    number: int
    parent: int | None
    tick: int
    uses: int = 0
    holds: int = 0
    is_pinned: bool = False


class NaiveIndex:
    """Looks at all entries whenever room is needed."""

    def __init__(self, capacity: int, eviction: str) -> None:
        self.capacity, self.eviction, self.entries, self.tick = capacity, eviction, {}, 0

    @property
    def used(self) -> int:
        return sum(entry.size for entry in self.entries.values())

    @property
    def pinned(self) -> int:
        return sum(entry.size for entry in self.entries.values() if entry.is_pinned)

    def may_go(self) -> list[int]:
        followed = {entry.parent for entry in self.entries.values()}
        return [
            name
            for name, entry in self.entries.items()
            if not entry.holds and not entry.is_pinned and name not in followed
        ]

    def rank(self, name: int) -> tuple[int, ...]:
        entry = self.entries[name]
        before: int | None = name
        while before in self.entries:
            before = self.entries[before].parent
        rules = {
            "lru": (entry.tick,),
            "lfu": (entry.uses, entry.tick),
            "length": (entry.uses, -entry.number, entry.tick),
        }
        return before is None, *rules[self.eviction]

    def make_room(self, size: int) -> list[int]:
        gone = []
        while self.used + size > self.capacity and self.may_go():
            gone.append(min(self.may_go(), key=self.rank))
            del self.entries[gone[-1]]
        return gone


NAMES = st.integers(0, 12)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "use", "hold", "release", "pin", "unpin", "remove"]),
        NAMES,
        st.integers(1, 4),
        st.one_of(st.none(), NAMES),
    ),
    max_size=60,
)


@given(CALLS, st.sampled_from(sorted(EVICTION)), st.integers(4, 20))
@settings(max_examples=100, deadline=None)
def test_the_index_does_what_a_naive_one_does(
    calls: list[tuple[str, int, int, int | None]], eviction: str, capacity: int
) -> None:
    index, naive = Index(capacity, eviction), NaiveIndex(capacity, eviction)
    for call, name, size, parent in calls:
        entry = naive.entries.get(name)
        naive.tick += 1
        if call == "add" and entry is None:
            assert index.free(size) == list(map(str, naive.make_room(size)))
            assert index.has_room(size) == (naive.used + size <= capacity)
            if index.has_room(size) and (parent is None or parent < name):
                index.put(name, size, size, parent)
                naive.entries[name] = Known(size, size, parent, naive.tick)
        elif entry is None:
            assert str(name).encode() not in index
        elif call == "use":
            index.use(index.at(name))
            entry.uses, entry.tick = entry.uses + 1, naive.tick
        elif call == "hold":
            index.hold(index.at(name))
            entry.holds += 1
        elif call == "release" and entry.holds:
            index.release(index.at(name))
            entry.holds -= 1
        elif call == "pin":
            fits = entry.is_pinned or naive.pinned + entry.size <= capacity // 2
            assert index.pin(str(name).encode()) == fits
            entry.is_pinned = fits
        elif call == "unpin":
            index.unpin(str(name).encode())
            entry.is_pinned = False
        elif call == "remove":
            index.remove(index.at(name))
            del naive.entries[name]
        assert (index.used, index.pinned) == (naive.used, naive.pinned)
        assert index.names == list(map(str, naive.entries))


@pytest.mark.parametrize("eviction", sorted(EVICTION))
def test_chains_go_from_their_tails(eviction: str) -> None:
    index = Index(6, eviction)
    for number in range(3):
        index.put(f"a{number}", 1, number, f"a{number - 1}" if number else None)
    for number in range(3):
        index.put(f"b{number}", 1, number, f"b{number - 1}" if number else None)
    assert (
        index.free(3)
        == {
            "lru": ["a2", "a1", "a0"],
            "lfu": ["a2", "a1", "a0"],
            "length": ["a2", "b2", "a1"],
        }[eviction]
    )


def test_rules_differ_in_what_they_keep() -> None:
    def first_to_go(eviction: str) -> str:
        index = Index(3, eviction)
        index.put("often", 1, 0)
        for _ in range(3):
            index.use(index.at("often"))
        index.put("deep", 1, 9)
        index.put("shallow", 1, 0)
        index.use(index.at("deep"))
        index.use(index.at("shallow"))
        return index.free(1)[0]

    assert [first_to_go(eviction) for eviction in ("lru", "lfu", "length")] == ["often", "deep", "deep"]


def test_a_chain_longer_than_the_tier_keeps_its_beginning() -> None:
    index = Index(10)
    for number in range(30):
        parent = number - 1 if number else None
        index.free(1)
        index.put(number, 1, number, parent)
    assert index.names == [*map(str, range(9)), "29"]


def test_what_is_cut_off_from_its_beginning_goes_first() -> None:
    index = Index(5)
    index.put("a0", 1, 0)
    index.put("b2", 1, 2, "b1")
    index.put("b3", 1, 3, "b2")
    index.put("c0", 1, 0)
    assert index.free(2) == ["b3"]
    index.put("b1", 1, 1, "b0")
    index.put("b0", 1, 0)
    assert index.free(1) == ["a0"]  # the chain is whole again, and newer
    index.remove(index.at("b0"))
    assert index.free(3) == ["b2"]


def test_what_may_not_go_leaves_no_room() -> None:
    index = Index(2)
    index.put("held", 1)
    index.hold(index.at("held"))
    index.put("pinned", 1)
    assert index.pin(b"pinned")
    assert index.free(1) == []
    assert not index.has_room(1)
    index.unpin(b"pinned")
    assert index.free(1) == ["pinned"]
