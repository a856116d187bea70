"""KV events as publishers send them, vLLM's maps and ours or SGLang's arrays, and what they change in an index."""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import msgspec

from longctx.cluster.prefix_index.index import TIERS, PrefixIndex, Tier

_MEDIA: dict[str, Tier] = {"GPU": "device", "CPU": "host", "CPU_PINNED": "host", "STORAGE": "disk", "DISK": "disk"}
_NAMES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_ALL = (1 << 64) - 1
_Hashes = list[int | bytes]


class MalformedMessage(ValueError):
    """A message is not one of KV events."""


class Stored(NamedTuple):
    """Blocks that an instance has got, by their 64-bit keys."""

    tier: Tier
    keys: Sequence[int]


class Removed(NamedTuple):
    """Blocks that an instance has no more."""

    tier: Tier
    keys: Sequence[int]


class Cleared(NamedTuple):
    """An instance has nothing any more."""


Event = Stored | Removed | Cleared


class Batch(NamedTuple):
    """The events of a message, in order.

    Attributes:
      dropped: number of events that were left out, as their medium or type is not known here.
    """

    events: list[Event]
    dropped: int


class _StoredFields(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: _Hashes
    parent_block_hash: int | bytes | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class _RemovedFields(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: _Hashes
    medium: str | None = None


class _ClearedFields(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(_StoredFields, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(_RemovedFields, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(_ClearedFields, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _BatchFields(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_BATCH = msgspec.msgpack.Decoder(_BatchFields)
_MAP = msgspec.msgpack.Decoder(_StoredFields | _RemovedFields | _ClearedFields)
_ARRAY = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


def decode(payload: bytes) -> Batch:
    """Decode the last frame of a message.

    Raises:
      MalformedMessage: it says what is wrong.
    """
    try:
        batch = [_event(raw) for raw in _BATCH.decode(payload).events]
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
        raise MalformedMessage(f"no batch of KV events: {error}") from error
    events = [event for event in batch if event is not None]
    return Batch(events, len(batch) - len(events))


def update_index(index: PrefixIndex, instance: str, batch: Batch, most_blocks: int) -> None:
    """Change what an instance holds by its events.

    Raises:
      MalformedMessage: it claims to hold more than `most_blocks` blocks, over its tiers.
    """
    for event in _joined(batch):
        if isinstance(event, Cleared):
            index.clear(instance)
        elif isinstance(event, Removed):
            index.remove(instance, event.tier, event.keys)
        else:
            blocks = sum(index.blocks(instance, tier) for tier in TIERS)
            if blocks + len(event.keys) > most_blocks:
                raise MalformedMessage(f"it claims to hold more than {most_blocks} blocks")
            index.store(instance, event.tier, event.keys)


def _joined(batch: Batch) -> Iterator[Event]:
    """Make one event of those of a kind and tier that follow each other: one call of the index has many keys."""
    for _, group in groupby(batch.events, lambda event: (type(event), getattr(event, "tier", None))):
        first, *others = group
        if others and not isinstance(first, Cleared):
            keys = chain(first.keys, *(each.keys for each in others if not isinstance(each, Cleared)))
            first = first._replace(keys=[*keys])
        yield first


def _event(raw: msgspec.Raw) -> Event | None:
    """Decode an event; None: its type or medium is not known here."""
    data = memoryview(raw)
    is_array = len(data) > 0 and (0x90 <= data[0] <= 0x9F or data[0] in (0xDC, 0xDD))
    try:
        fields = (_ARRAY if is_array else _MAP).decode(raw)
    except msgspec.ValidationError:
        if _is_of_another_type(raw, is_array):
            return None
        raise
    if isinstance(fields, _ClearedFields):
        return Cleared()
    tier = "device" if fields.medium is None else _MEDIA.get(fields.medium.upper())
    if tier is None:
        return None
    kind = Removed if isinstance(fields, _RemovedFields) else Stored
    return kind(tier, _keys(fields.block_hashes))


def _is_of_another_type(raw: msgspec.Raw, is_array: bool) -> bool:
    content = msgspec.msgpack.decode(raw)
    where = 0 if is_array else "type"
    try:
        name = content[where]
    except (LookupError, TypeError):
        return False
    return isinstance(name, str) and name not in _NAMES


def _keys(hashes: _Hashes) -> list[int]:
    """Return the last 64 bits of each hash."""
    if all(type(each) is int and 0 <= each <= _ALL for each in hashes):
        return hashes  # type: ignore[return-value]
    return [(each if isinstance(each, int) else int.from_bytes(each[-8:], "big")) & _ALL for each in hashes]
