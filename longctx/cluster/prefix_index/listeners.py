"""Who hears what instances' KV events say, and the listener that keeps an index by it."""

from collections.abc import Iterator
from itertools import chain, groupby
from typing import Protocol, runtime_checkable

from longctx.cluster.prefix_index.events import Batch, Cleared, MalformedMessage, Removed, Stored
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.tiers import TIERS

_MOST_BLOCKS = 100_000_000


@runtime_checkable
class KvEventListener(Protocol):
    """Hears the batches of many instances, those of one in order, in the thread of a `KvEventReader`."""

    def take(self, instance: str, batch: Batch, payload: bytes) -> None:
        """An instance has sent a batch, which was decoded from `payload`.

        Raises:
          MalformedMessage: it can't be true.
        """
        ...

    def clear(self, instance: str) -> None:
        """Nothing is known of an instance any more."""
        ...


class IndexUpdater:
    """Keeps an index by events.

    Args:
      most_blocks: of one instance, over its tiers; one that says it has more is not believed.
    """

    def __init__(self, index: PrefixIndex, most_blocks: int = _MOST_BLOCKS) -> None:
        self._index, self._most_blocks = index, most_blocks

    def take(self, instance: str, batch: Batch, payload: bytes) -> None:
        index = self._index
        for event in _joined(batch):
            if isinstance(event, Cleared):
                index.clear(instance)
            elif isinstance(event, Removed):
                index.remove(instance, event.tier, event.keys)
            else:
                blocks = sum(index.blocks(instance, tier) for tier in TIERS)
                if blocks + len(event.keys) > self._most_blocks:
                    raise MalformedMessage(f"it claims to hold more than {self._most_blocks} blocks")
                index.store(instance, event.tier, event.keys)

    def clear(self, instance: str) -> None:
        self._index.clear(instance)


def _joined(batch: Batch) -> Iterator[Stored | Removed | Cleared]:
    """Events, those of a kind and tier that follow each other in one: an index is quicker with many keys at a time."""
    for _, group in groupby(batch.events, lambda event: (type(event), getattr(event, "tier", None))):
        first, *others = group
        if others and not isinstance(first, Cleared):
            keys = chain(first.keys, *(each.keys for each in others if not isinstance(each, Cleared)))
            first = first._replace(keys=[*keys])
        yield first
