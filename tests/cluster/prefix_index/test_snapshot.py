"""What `KvSnapshot` tells of messages that are gone is what they told."""

import itertools

import msgspec
from cluster.prefix_index.publishers import removed, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.cluster.prefix_index.tiers import TIERS
from longctx.serving.server import kv_snapshot
from longctx.serving.server.kv_events import AllBlocksCleared, BlockStored, Event, EventBatch
from longctx.serving.server.kv_snapshot import KvSnapshot

TIER = st.sampled_from(TIERS)
EVENT = st.one_of(
    st.tuples(st.integers(0, 20), st.integers(1, 6), TIER, st.sampled_from(["", "salt"])).map(
        lambda e: stored(list(range(e[0], e[0] + e[1])), e[0] - 1 if e[0] else None, e[2], "" if e[0] else e[3])
    ),
    st.tuples(st.lists(st.integers(0, 25), min_size=1, max_size=5), TIER).map(lambda e: removed(*e)),
    st.just(AllBlocksCleared()),
)


class Reader:
    """What a consumer knows: of each block its media, and the parent, tokens and salt it was last told."""

    def __init__(self) -> None:
        self.media: dict[int, set[str]] = {}
        self.content: dict[int, tuple] = {}

    def take(self, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            self.media.clear()
        elif isinstance(event, BlockStored):
            parent, size = event.parent_block_hash, event.block_size
            for i, key in enumerate(event.block_hashes):
                if key not in self.media:
                    self.content.pop(key, None)
                self.media.setdefault(key, set()).add(event.medium)
                if event.token_ids:
                    extra = event.extra_keys[i] if event.extra_keys else None
                    tokens = tuple(event.token_ids[size * i : size * (i + 1)])
                    self.content[key] = parent, tokens, tuple(extra) if extra else None
                parent = key
        else:
            for key in event.block_hashes:
                self.media.get(key, set()).discard(event.medium)
                if not self.media.get(key, True):
                    del self.media[key]

    @property
    def known(self) -> dict[int, tuple]:
        return {key: (frozenset(media), self.content.get(key)) for key, media in self.media.items()}


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENT, max_size=30), st.integers(1, 40))
def test_a_snapshot_tells_of_all_blocks_parents_first(events: list[Event], most: int) -> None:
    decoder = msgspec.msgpack.Decoder(EventBatch)
    snapshot, told, read = KvSnapshot(), Reader(), Reader()
    for event in events:
        snapshot.fold(b"topic", msgspec.msgpack.encode(EventBatch(1.5, [event], 0)))
        told.take(event)
    kv_snapshot._BLOCKS, before = 4, kv_snapshot._BLOCKS
    try:
        count, messages = snapshot.messages(most)
        payloads = list(itertools.islice(messages, 100))
    finally:
        kv_snapshot._BLOCKS = before
    assert 1 <= len(payloads) == count <= most
    batches = [decoder.decode(payload) for _, payload in payloads]
    assert isinstance(batches[0].events[0], AllBlocksCleared)
    for batch in batches:
        for event in batch.events:
            if isinstance(event, BlockStored) and event.parent_block_hash in told.media:
                assert event.parent_block_hash in read.media
            read.take(event)
    assert read.known == told.known
