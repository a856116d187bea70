"""`KvIndexer`: which instances have which prefixes, of many models and tenants, by events of engines of any kind."""

import sys
from array import array
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from longctx.cluster.prefix_index.events import Batch, Cleared, MalformedMessage, Removed, Stored
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.indexer.sequence_hash import sequence_hashes
from longctx.cluster.prefix_index.tiers import TIERS, Tier

_TOKENS = msgspec.msgpack.Decoder(list[int])
_EXTRA = msgspec.msgpack.Decoder(list[list[str] | None] | None)


class Publisher(NamedTuple):
    """Who publishes events, and of what.

    Attributes:
      instance: whom requests can be sent to; `rank` is one of its data-parallel ranks.
      lora_name, salt: of its blocks, where their events say nothing else.
      sends_sequence_hashes: its hashes are those of `sequence_hashes` already.
    """

    instance: str
    tenant: str
    rank: int
    model: str
    block_size: int
    lora_name: str = ""
    salt: str = ""
    sends_sequence_hashes: bool = False

    @property
    def name(self) -> str:
        """No two publishers at a time have the same."""
        return f"{self.instance}|{self.tenant}|{self.rank}"


class Context(NamedTuple):
    """What blocks must have in common to be the same."""

    tenant: str
    model: str
    lora_name: str
    block_size: int
    salt: str


class InstanceHits(NamedTuple):
    """Tokens of a request's prefix that an instance has.

    Attributes:
      longest: the longest prefix on any of its ranks, whatever tiers it is in.
      ranks: the prefix on each rank.
      tiers: in the order of `TIERS`, how much of a rank's prefix is in each, on the rank that has most of it there.
    """

    longest: int
    ranks: dict[int, int]
    tiers: tuple[int, ...]


class _Block(msgspec.Struct, gc=False):
    """What an engine's hash stands for: about 150 bytes a block and publisher."""

    context: Context
    hash: int
    tiers: int


class _Source:
    """A publisher, and the blocks of which it has told."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.blocks: dict[int, _Block] = {}
        self.unplaced = 0  # blocks whose prefix is not known


class KvIndexer:
    """Hears events (`KvEventListener`), and answers which instances have a prefix.

    Engines' hashes may be of any kind: those of their prefixes are computed from the tokens in the events.

    Args:
      seed: of hashes, as clients have it who send hashes.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._sources: dict[str, _Source] = {}
        self._indexes: dict[Context, PrefixIndex] = {}

    @property
    def publishers(self) -> list[Publisher]:
        return [source.publisher for source in list(self._sources.values())]

    @property
    def num_blocks(self) -> int:
        """Distinct ones, over all contexts."""
        return sum(index.num_blocks for index in list(self._indexes.values()))

    def unplaced(self, publisher: str) -> int:
        """Blocks of a publisher that are not found, as those before them were never told of."""
        source = self._sources.get(publisher)
        return source.unplaced if source else 0

    def register(self, publisher: Publisher) -> None:
        """Events of this publisher may come; one of the same name is another one from now on."""
        self._sources[publisher.name] = _Source(publisher)

    def unregister(self, name: str) -> None:
        """Events of it are ignored from now on; `clear` forgets what it has."""
        self._sources.pop(name, None)

    def hits(
        self, context: Context, hashes: Iterable[int] | np.ndarray, instance: str | None = None
    ) -> dict[str, InstanceHits]:
        """What each registered instance has of a prefix; none or all of them are 0, if it has nothing.

        Args:
          hashes: of its blocks, by `sequence_hashes`.
          instance: only this one.
        """
        keys = hashes if isinstance(hashes, np.ndarray) else np.array(list(hashes), np.uint64)
        index = self._indexes.get(context)
        found = index.availability(keys) if index is not None else {}
        hits: dict[str, InstanceHits] = {}
        size = context.block_size
        for each in self.publishers:
            if (each.tenant, each.model, each.block_size) != (context.tenant, context.model, size):
                continue
            if instance is not None and each.instance != instance:
                continue
            blocks, *tiers = found.get(each.name, (0,) * (1 + len(TIERS)))
            before = hits.get(each.instance, InstanceHits(0, {}, (0,) * len(TIERS)))
            hits[each.instance] = InstanceHits(
                max(before.longest, size * blocks),
                {**before.ranks, each.rank: size * blocks},
                tuple(max(old, size * new) for old, new in zip(before.tiers, tiers, strict=True)),
            )
        return hits

    # In the reader's thread.

    def take(self, instance: str, batch: Batch, payload: bytes) -> None:
        source = self._sources.get(instance)
        if source is None:
            return
        for event in batch.events:
            if isinstance(event, Cleared):
                self._forget(instance)
                source.blocks.clear()
            elif isinstance(event, Removed):
                self._remove(source, event.tier, event.keys)
            else:
                self._store(source, event)

    def clear(self, instance: str) -> None:
        self._forget(instance)
        if (source := self._sources.get(instance)) is not None:
            source.blocks.clear()

    def _forget(self, name: str) -> None:
        for context, index in list(self._indexes.items()):
            index.clear(name)
            if not index.num_blocks:
                del self._indexes[context]

    def _remove(self, source: _Source, tier: Tier, keys: Iterable[int]) -> None:
        bit, gone = 1 << TIERS.index(tier), dict[Context, list[int]]()
        for key in keys:
            block = source.blocks.get(key)
            if block is not None and block.tiers & bit:
                gone.setdefault(block.context, []).append(block.hash)
                block.tiers &= ~bit
                if not block.tiers:
                    del source.blocks[key]
        for context, hashes in gone.items():
            # It is gone already if another of the engine's hashes stood for the same tokens.
            if (index := self._indexes.get(context)) is not None:
                index.remove(source.publisher.name, tier, hashes)
                if not index.num_blocks:
                    del self._indexes[context]

    def _store(self, source: _Source, event: Stored) -> None:
        publisher = source.publisher
        try:
            tokens = _TOKENS.decode(event.tokens)
            data = array("I", tokens)
        except (msgspec.MsgspecError, OverflowError, TypeError, ValueError) as error:
            raise MalformedMessage(f"token_ids are no list of numbers below 2^32: {error}") from error
        if not tokens and not publisher.sends_sequence_hashes:
            self._store_known(source, event)
            return
        if event.block_size != publisher.block_size and not publisher.sends_sequence_hashes:
            source.unplaced += len(event.keys)
            return
        if publisher.sends_sequence_hashes:
            context: Context | None = self._context(publisher, event, "")
            hashes: Iterable[int] = event.keys
        else:
            if len(tokens) != event.block_size * len(event.keys):
                raise MalformedMessage(f"token_ids are {len(tokens)}, not {event.block_size} for each block")
            if sys.byteorder == "big":
                data.byteswap()
            parent = None if event.parent is None else source.blocks.get(event.parent)
            is_orphan = event.parent is not None and parent is None
            salt = None if is_orphan else _salt(event)
            context = None if salt is None else parent.context if parent else self._context(publisher, event, salt)
            hashes = sequence_hashes(data.tobytes(), event.block_size, self.seed, parent.hash if parent else None)
        if context is None:
            source.unplaced += len(event.keys)
            return
        self._place(source, context, event.tier, list(zip(event.keys, hashes, strict=True)))

    def _store_known(self, source: _Source, event: Stored) -> None:
        """Blocks that were told of with their tokens before, in another tier."""
        known: dict[Context, list[tuple[int, int]]] = {}
        for key in event.keys:
            if (block := source.blocks.get(key)) is None:
                source.unplaced += 1
            else:
                known.setdefault(block.context, []).append((key, block.hash))
        for context, pairs in known.items():
            self._place(source, context, event.tier, pairs)

    def _place(self, source: _Source, context: Context, tier: Tier, pairs: list[tuple[int, int]]) -> None:
        bit = 1 << TIERS.index(tier)
        for key, own in pairs:
            block = source.blocks.get(key)
            if block is not None and (block.context, block.hash) != (context, own):
                for each in TIERS:  # the engine's hash stands for other tokens now
                    self._remove(source, each, [key])
                block = None
            if block is not None:
                block.tiers |= bit
            else:
                source.blocks[key] = _Block(context, own, bit)
        index = self._indexes.setdefault(context, PrefixIndex())
        index.store(source.publisher.name, tier, [own for _, own in pairs])

    def _context(self, publisher: Publisher, event: Stored, salt: str) -> Context:
        lora = event.lora_name or publisher.lora_name
        return Context(publisher.tenant, publisher.model, lora, publisher.block_size, salt or publisher.salt)


def _salt(event: Stored) -> str | None:
    """The salt of a prompt's first block; "": there is none; None: the hashes depend on what no query can say."""
    try:
        extra = _EXTRA.decode(event.extra)
    except (msgspec.MsgspecError, ValueError):
        return None
    salt = ""
    for i, names in enumerate(extra or []):
        others = [name for name in names or [] if name != event.lora_name]
        if others and (i or event.parent is not None or len(others) > 1):
            return None
        salt = others[0] if others else salt
    return salt
