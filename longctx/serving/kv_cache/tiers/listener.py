"""`TierListener`: what hears which pages tiers have, for events that routers read."""

from typing import Protocol, runtime_checkable

from longctx.serving.kv_cache.page_pool import Key


@runtime_checkable
class TierListener(Protocol):
    """Hears of whole pages in host memory (`"host"`) and on disk (`"disk"`), change by change.

    It is called by any thread, under the store's lock: it must be quick, and call no method of the store.
    """

    def stored(self, tier: str, key: Key, parent: Key) -> None:
        """A tier has a page from now on; `parent` is the key of the page before it, empty if there is none or it is
        not known."""
        ...

    def removed(self, tier: str, key: Key) -> None:
        """A tier has a page no more."""
        ...
