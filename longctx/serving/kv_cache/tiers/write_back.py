"""Pages that wait to be written below host memory: at most so many bytes, of which the coldest are dropped."""

from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.host_memory import HostPage
from longctx.serving.kv_cache.tiers.index import TierIndex


class WriteBackQueue:
    """First in, first out. What is dropped for room is chosen as a tier chooses: by the rule, from tails of chains.

    Attributes:
      num_bytes: that wait. since: when the oldest of them came, in seconds of the caller's clock.
    """

    def __init__(self, capacity: int, page_bytes: int, eviction: str) -> None:
        self._page_bytes = page_bytes
        self._index: TierIndex[Key] = TierIndex(capacity, eviction)
        self._waiting: dict[Key, tuple[HostPage, float]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: Key) -> bool:
        return key in self._waiting

    @property
    def num_bytes(self) -> int:
        return self._index.used

    @property
    def since(self) -> float | None:
        return next((when for _, when in self._waiting.values()), None)

    def add(self, page: HostPage, now: float) -> list[HostPage]:
        """Let a page wait; returns those that don't wait any more, which may be this one."""
        key, parent, number = page.name
        if key in self._waiting:
            return [page]
        evicted = self._index.make_room(self._page_bytes)
        dropped = [self._waiting.pop(name)[0] for name in evicted]
        if not self._index.has_room(self._page_bytes):
            return [*dropped, page]
        self._index.add(key, self._page_bytes, number, parent or None)
        self._waiting[key] = page, now
        return dropped

    def take(self, max_bytes: int) -> list[HostPage]:
        """The pages that came first, of at most so many bytes together, and at least one if there is one."""
        keys = list(self._waiting)[: max(1, max_bytes // self._page_bytes)]
        return [self._pop(key) for key in keys]

    def clear(self) -> list[HostPage]:
        """Let nothing wait; returns what did."""
        return [self._pop(key) for key in list(self._waiting)]

    def forget(self, key: Key) -> HostPage | None:
        """Let a page wait no more; None if it didn't."""
        return self._pop(key) if key in self._waiting else None

    def _pop(self, key: Key) -> HostPage:
        self._index.remove(key)
        return self._waiting.pop(key)[0]
