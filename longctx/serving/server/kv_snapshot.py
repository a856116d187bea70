"""What messages that a publisher no longer keeps have told: all blocks of then, as a few messages more.

A reader that comes late asks for all messages from the first on. Those that are too old are gone, and so would be the
blocks that nobody has told of since. A snapshot tells of them in the same words: that everything is cleared, and then
what there was. Whoever reads events reads a snapshot, too: as if its publisher had done all this at once.
"""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from longctx.serving.server.kv_events import KIND, AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch

_BLOCKS, _TOKENS = 4096, 1 << 20  # of a message, at most

Message = tuple[bytes, bytes]
"""Topic and payload."""


@runtime_checkable
class Snapshot(Protocol):
    """Makes messages in place of others that are gone. Calls do not overlap."""

    def fold(self, topic: bytes, payload: bytes) -> None:
        """A message is kept no more."""
        ...

    def messages(self, most: int) -> tuple[int, Iterator[Message]]:
        """How many there are, `most` at most and at least one, and each: what those that are gone have told.

        They are made while others are published: the iterator has what it needs for itself.
        """
        ...


class _Block(msgspec.Struct, gc=False):
    parent: int | None
    tokens: bytes  # int32
    size: int
    extra: tuple[str, ...] | None
    media: tuple[str, ...]


class KvSnapshot:
    """A `Snapshot` of one engine's events: about 300 bytes a block, and 4 for each of its tokens."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(EventBatch)
        self._encoder = msgspec.msgpack.Encoder()
        self._blocks: dict[int, _Block] = {}
        self._topic, self._time = b"", 0.0

    def fold(self, topic: bytes, payload: bytes) -> None:
        batch = self._decoder.decode(payload)
        self._topic, self._time = topic, batch.ts
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self._blocks.clear()

    def messages(self, most: int) -> tuple[int, Iterator[Message]]:
        blocks = dict(self._blocks)  # what a block was is never changed, but replaced
        tokens = sum(block.size for block in blocks.values())
        count = min(most, 1 + max(len(blocks) // _BLOCKS, tokens // _TOKENS))
        return count, self._encode(blocks, -(-len(blocks) // count), count, self._topic, self._time)

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        tokens = np.array(event.token_ids, np.int32).tobytes()
        for i, key in enumerate(event.block_hashes):
            old = self._blocks.get(key)
            if old is None or tokens:
                extra = event.extra_keys[i] if event.extra_keys else None
                own = tokens[4 * size * i : 4 * size * (i + 1)]
                self._blocks[key] = _Block(parent, own, size, extra, _with(old.media if old else (), event.medium))
            else:
                self._blocks[key] = msgspec.structs.replace(old, media=_with(old.media, event.medium))
            parent = key

    def _remove(self, event: BlockRemoved) -> None:
        for key in event.block_hashes:
            if (old := self._blocks.get(key)) is not None:
                media = tuple(medium for medium in old.media if medium != event.medium)
                if media:
                    self._blocks[key] = msgspec.structs.replace(old, media=media)
                else:
                    del self._blocks[key]

    def _encode(
        self, blocks: dict[int, _Block], step: int, count: int, topic: bytes, seconds: float
    ) -> Iterator[Message]:
        order = _parents_first(blocks)
        for number in range(count):
            events: list[Event] = [AllBlocksCleared()] if number == 0 else []
            keys = order[step * number : step * (number + 1)]
            for i in range(max((len(blocks[key].media) for key in keys), default=0)):
                for key in keys:
                    if i < len(blocks[key].media):
                        _append(events, key, blocks[key], i)
            yield topic, self._encoder.encode(EventBatch(seconds, events, 0))


def _with(media: tuple[str, ...], medium: str) -> tuple[str, ...]:
    return media if medium in media else (*media, medium)


def _parents_first(blocks: dict[int, _Block]) -> list[int]:
    """Keys, each after that of the block before it, and right after it if possible."""
    children: dict[int | None, list[int]] = {}
    for key, block in blocks.items():
        parent = block.parent if block.parent in blocks else None
        children.setdefault(parent, []).append(key)
    order: list[int] = []
    pending = children.get(None, [])[::-1]
    while pending:
        order.append(pending.pop())
        pending += children.get(order[-1], [])
    return order


def _append(events: list[Event], key: int, block: _Block, i: int) -> None:
    """Tell of a block in its i-th medium, in the last event if that ends with the block before it."""
    medium = block.media[i]
    tokens = [] if i else np.frombuffer(block.tokens, np.int32).tolist()
    extra = None if i else block.extra
    last = events[-1] if events else None
    if (
        isinstance(last, BlockStored)
        and (last.block_hashes[-1], last.medium, last.block_size) == (block.parent, medium, block.size)
        and bool(last.token_ids) == bool(tokens)
        and extra is None
    ):
        last.block_hashes.append(key)
        last.token_ids += tokens
        if last.extra_keys:
            last.extra_keys.append(None)
    else:
        extras: list[tuple[str, ...] | None] | None = None if extra is None else [extra]
        events.append(BlockStored([key], block.parent, tokens, block.size, None, medium, None, extras, 0, KIND))
