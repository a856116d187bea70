"""Pages in the memory of hosts, as keys alone; loads share the link to the devices.

Source: Mooncake, section 3 (KV cache in CPU memory), and 5.2 (loading takes a prefix's bytes over a bandwidth).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List

from longctx.serving.kv_cache.connector import Loaded, PageLoad
from longctx.serving.kv_cache.page_pool import Key
from longctx.simulation.event_loop import EventLoop, Link

HOST_BANDWIDTH = 25e9
"""Bytes per second between a device and its host: about 80 % of the 31.5 GB/s of PCIe 4.0 with 16 lanes."""


TierListener = Callable[[List[Key], List[Key]], object]
"""Called with the pages that a tier keeps from now on, and those that it dropped; a page may be in both lists."""


class VirtualTier:
    """Tiers of an engine: as many pages as fit into some bytes, of which the least recently used go first.

    Pages are written without taking time: they leave the devices while these compute.

    Args:
      num_bytes: of all pages. page_bytes: of one, on all devices together.

    Attributes:
      listener: is called with changes.
    """

    def __init__(self, num_bytes: float, page_bytes: float) -> None:
        self._most, self._page_bytes = int(num_bytes // page_bytes), page_bytes
        self._keys: OrderedDict[Key, None] = OrderedDict()
        self.listener: TierListener | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def put(self, keys: Iterable[Key]) -> None:
        """Keep pages."""
        new, removed = [], []
        for key in keys:
            if key not in self._keys:
                new.append(key)
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            removed.append(self._keys.popitem(last=False)[0])
        if self.listener is not None and (new or removed):
            self.listener(new, removed)

    def discard(self, keys: Iterable[Key]) -> None:
        """Keep pages no more."""
        removed = [key for key in keys if self._keys.pop(key, key) is None]
        if self.listener is not None and removed:
            self.listener([], removed)

    def look_up(self, keys: List[Key]) -> int:
        """Count the leading pages that it has."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def load(self, load: PageLoad, loop: EventLoop, link: Link, on_end: Callable[[Loaded], object]) -> None:
        """Move those leading pages over a link that it still has; `on_end` is called when they are there."""
        found, begun = self.look_up(load.keys), loop.now
        self.put(load.keys[:found])
        link.send(found * self._page_bytes, lambda: on_end(Loaded(load.name, found, loop.now - begun)))
