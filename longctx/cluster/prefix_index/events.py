"""What the messages of a publisher of KV events say: vLLM's maps and ours, or SGLang's arrays."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from longctx.cluster.prefix_index.tiers import Tier

_MEDIA: dict[str, Tier] = {"GPU": "device", "CPU": "host", "CPU_PINNED": "host", "STORAGE": "disk", "DISK": "disk"}
_NAMES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_ALL = (1 << 64) - 1
_Hashes = list[int | bytes]
_EMPTY = msgspec.Raw(b"\x90")


class MalformedMessage(ValueError):
    """A message is not one of KV events."""


class Stored(NamedTuple):
    """Consecutive blocks that an instance has got.

    Attributes:
      keys: their hashes, 64 bits each.
      parent: the hash of the block before them; None: there is none.
      tokens: msgpack of their token ids; of blocks beyond the devices it may be an empty list.
      extra: msgpack of what else their hashes depend on, per block.
    """

    tier: Tier
    keys: Sequence[int]
    parent: int | None
    tokens: msgspec.Raw
    block_size: int
    lora_name: str | None
    extra: msgspec.Raw


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
      seconds: since 1970, by the publisher's clock.
      dropped: how many more there were: of media or types that nobody here knows.
    """

    seconds: float
    events: list[Event]
    rank: int | None
    dropped: int

    @property
    def is_snapshot(self) -> bool:
        """It begins with what the instance has in all."""
        return bool(self.events) and isinstance(self.events[0], Cleared)


class _StoredFields(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: _Hashes
    parent_block_hash: int | bytes | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = _EMPTY


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
        batch = _BATCH.decode(payload)
        events, dropped = [], 0
        for raw in batch.events:
            event = _event(raw)
            if event is None:
                dropped += 1
            else:
                events.append(event)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
        raise MalformedMessage(f"no batch of KV events: {error}") from error
    return Batch(batch.ts, events, batch.data_parallel_rank, dropped)


def _event(raw: msgspec.Raw) -> Event | None:
    """None: it is of a type or a medium that nobody here knows."""
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
    keys = _keys(fields.block_hashes)
    if isinstance(fields, _RemovedFields):
        return Removed(tier, keys)
    parent = None if fields.parent_block_hash is None else _keys([fields.parent_block_hash])[0]
    # A `Raw` is a part of the message, which would be kept with it.
    return Stored(tier, keys, parent, fields.token_ids, fields.block_size, fields.lora_name, fields.extra_keys)


def _is_of_another_type(raw: msgspec.Raw, is_array: bool) -> bool:
    content = msgspec.msgpack.decode(raw)
    where = 0 if is_array else "type"
    try:
        name = content[where]
    except (LookupError, TypeError):
        return False
    return isinstance(name, str) and name not in _NAMES


def _keys(hashes: _Hashes) -> list[int]:
    """Their last 64 bits."""
    if all(type(each) is int and 0 <= each <= _ALL for each in hashes):
        return hashes  # type: ignore[return-value]
    return [(each if isinstance(each, int) else int.from_bytes(each[-8:], "big")) & _ALL for each in hashes]
