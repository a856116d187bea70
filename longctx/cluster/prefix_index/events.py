"""KV events as instances publish them (`serving/server/kv_events.py`), and what they change in an index."""

from collections.abc import Iterator
from itertools import chain, groupby
from typing import Annotated, Literal

import msgspec

from longctx.cluster.prefix_index.index import TIERS, PrefixIndex, Tier

_TIERS: dict[str, Tier] = {"GPU": "device", "CPU": "host", "STORAGE": "disk"}
_Hashes = list[Annotated[int, msgspec.Meta(ge=0)]]
_Medium = Literal["GPU", "CPU", "STORAGE"]


class MalformedMessage(ValueError):
    """A message is not one of KV events."""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Blocks that an instance has got, by their 64-bit keys."""

    block_hashes: _Hashes
    medium: _Medium


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks that an instance has no more."""

    block_hashes: _Hashes
    medium: _Medium


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """An instance has nothing any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Event]


_BATCH = msgspec.msgpack.Decoder(_Batch)


def decode(payload: bytes) -> list[Event]:
    """Decode the last frame of a message: its events, in order.

    Raises:
      MalformedMessage: it says what is wrong.
    """
    try:
        return _BATCH.decode(payload).events
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise MalformedMessage(f"no batch of KV events: {error}") from error


def update_index(index: PrefixIndex, instance: str, events: list[Event], most_blocks: int) -> None:
    """Change what an instance holds by its events.

    Raises:
      MalformedMessage: it claims to hold more than `most_blocks` blocks, over its tiers.
    """
    for event in _joined(events):
        if isinstance(event, AllBlocksCleared):
            index.clear(instance)
        elif isinstance(event, BlockRemoved):
            index.remove(instance, _TIERS[event.medium], event.block_hashes)
        else:
            blocks = sum(index.blocks(instance, tier) for tier in TIERS)
            if blocks + len(event.block_hashes) > most_blocks:
                raise MalformedMessage(f"it claims to hold more than {most_blocks} blocks")
            index.store(instance, _TIERS[event.medium], event.block_hashes)


def _joined(events: list[Event]) -> Iterator[Event]:
    """Make one event of those of a kind and medium that follow each other: one call of the index has many keys."""
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "medium", None))):
        first, *others = group
        if others and not isinstance(first, AllBlocksCleared):
            hashes = chain(first.block_hashes, *(each.block_hashes for each in others))  # type: ignore[union-attr]
            first = type(first)([*hashes], first.medium)
        yield first
