"""Messages of KV events that are anything at all: they are decoded, or malformed, and nothing else happens."""

import contextlib
from collections.abc import Iterator

import msgspec
from cluster.prefix_index.publishers import removed, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.cluster.prefix_index.events import BlockRemoved, MalformedMessage, decode, update_index
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.serving.server.kv_events import AllBlocksCleared, EventBatch

REAL = msgspec.msgpack.encode(
    EventBatch(1.0, [stored([1, 2, 3], 7, salt="x"), removed([2]), stored([4], 3, "disk"), AllBlocksCleared()], 0)
)
FIELDS = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "lora_name", "extra_keys"]
NAMES = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other", "GPU", "CPU", "", "STORAGE"])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), NAMES, st.binary(max_size=40)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6), st.dictionaries(st.one_of(st.sampled_from(FIELDS), SCALARS), inner, max_size=8)
    ),
    max_leaves=12,
)
EVENTS = st.one_of(
    VALUES,
    st.fixed_dictionaries({"type": NAMES, **dict.fromkeys(FIELDS[1:5], VALUES)}),
    st.tuples(NAMES, st.lists(SCALARS, max_size=4), VALUES, VALUES, VALUES, VALUES, NAMES).map(list),
)


def take(payload: bytes) -> None:
    """Decode a message, and update an index by it."""
    with contextlib.suppress(MalformedMessage):
        update_index(PrefixIndex(), "a", decode(payload), 1000)


@settings(max_examples=40, deadline=None)
@given(st.lists(EVENTS, max_size=4), VALUES)
def test_any_events_are_taken_or_malformed(events: list[object], rank: object) -> None:
    take(msgspec.msgpack.encode([1.0, events, rank]))


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_malformed(payload: bytes) -> None:
    take(payload)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(REAL) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.booleans())
def test_real_messages_with_wrong_bytes_are_taken_or_malformed(changes: list[tuple[int, int]], is_cut: bool) -> None:
    payload = bytearray(REAL)
    for place, value in changes:
        payload[place] = value
    take(bytes(payload[: changes[0][0]] if is_cut else payload))


def test_events_of_a_message_are_joined_once() -> None:
    """Each key is copied once: a message of so many events as a frame has room for must not stop the reader."""

    class Counted(list[int]):
        reads = 0

        def __iter__(self) -> Iterator[int]:
            Counted.reads += 1
            return super().__iter__()

    events = [BlockRemoved(Counted([i]), "CPU") for i in range(100)]
    index = PrefixIndex()
    index.store("a", "host", range(101))
    update_index(index, "a", [*events, BlockRemoved([100], "GPU")], 1000)
    assert (index.num_blocks, Counted.reads) == (1, 100)
