"""What the tests of readers share: an engine's view of its blocks, published by the real `KvPublisher`."""

import time
from collections.abc import Callable

import msgspec
import numpy as np

from longctx.cluster.prefix_index.index import TIERS, PrefixIndex, Tier
from longctx.serving.server.kv_events import (
    KIND,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)
from longctx.serving.server.kv_publisher import KvPublisher

MEDIA: dict[Tier, str] = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
ANY = "tcp://127.0.0.1:*"
SIZE = 4  # tokens of a block


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stored(keys: list[int], parent: int | None = None, tier: Tier = "device", salt: str = "") -> BlockStored:
    """The tokens of a block are its key's."""
    tokens = [key % 1000 for key in keys for _ in range(SIZE)] if tier == "device" else []
    extra = [(salt,), *[None] * (len(keys) - 1)] if salt else None
    return BlockStored(list(keys), parent, tokens, SIZE, None, MEDIA[tier], None, extra, 0, KIND)


def removed(keys: list[int], tier: Tier = "device") -> BlockRemoved:
    return BlockRemoved(list(keys), MEDIA[tier], 0)


class Instance:
    """Publishes events of blocks, and knows which there are."""

    def __init__(self, endpoint: str = ANY, replay: str | None = ANY, topic: str = "") -> None:
        self.publisher = KvPublisher(endpoint, replay, topic)
        self.held: dict[Tier, set[int]] = {tier: set() for tier in TIERS}

    @property
    def endpoints(self) -> tuple[str, str | None]:
        return self.publisher.endpoint, self.publisher.replay_endpoint

    def publish(self, *events: Event) -> None:
        tiers = {medium: tier for tier, medium in MEDIA.items()}
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.held = {tier: set() for tier in TIERS}
            elif isinstance(event, BlockStored):
                self.held[tiers[event.medium]].update(event.block_hashes)
            else:
                self.held[tiers[event.medium]].difference_update(event.block_hashes)
        payload = msgspec.msgpack.encode(EventBatch(time.time(), list(events), 0))
        self.publisher.publish(lambda: payload)

    def close(self) -> None:
        self.publisher.close()


def held_by(index: PrefixIndex, name: str) -> dict[Tier, set[int]]:
    return {tier: set(index.keys(name, tier).tolist()) for tier in TIERS}


def keys(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64).tolist()
