"""Which full pages leave the devices, and when: each once it is complete, and again before it is evicted.

Source: Mooncake, section 3: what prefill computes is stored while it runs, chunk by chunk.
"""

from collections import deque
from collections.abc import Iterable

from longctx.serving.kv_cache.connector import PageStore
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.prefix import with_followers


class PageStores:
    """Full pages of the pool that something beyond the devices may keep.

    A page whose last row is in one step is complete in all stages `stages` steps later: only then it can be read.

    Attributes:
      step: the step that is planned, or planned next.
    """

    def __init__(self, stages: int) -> None:
        self.step = 0
        self._stages = stages
        self._waiting: deque[tuple[int, PageStore]] = deque()  # with the step before which each can be read
        self._of_page: dict[int, PageStore] = {}  # of each page that can be found
        self._incomplete: dict[int, int] = {}  # until when
        self._evicted: list[PageStore] = []

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Whoever looks ahead stores nothing."""
        return

    def __bool__(self) -> bool:
        """Whether pages wait."""
        return bool(self._waiting or self._evicted)

    def note(self, stores: Iterable[PageStore]) -> None:
        """Pages can be found from now on; their rows are planned."""
        for store in stores:
            self._of_page[store.page] = store
            self._incomplete[store.page] = self.step + self._stages
            self._waiting.append((self.step + self._stages, store))

    def note_evicted(self, page: int, key: Key) -> None:
        """A page is about to be overwritten: it is stored now, unless it is not complete."""
        store = self._of_page.pop(page, None)
        if store is not None and store.key == key and self._incomplete.get(page, 0) <= self.step:
            self._evicted.append(store)

    def forget(self, page: int) -> None:
        """Don't store what a page has now."""
        self._of_page.pop(page, None)

    def with_followers(self, keys: Iterable[Key]) -> list[Key]:
        """Pages and those that can be found which come after them."""
        return with_followers(keys, {store.key: store.parent for store in self._of_page.values()})

    def take(self) -> list[PageStore]:
        """Those that are read before the step that is planned: what the step overwrites is the first of them."""
        stores, self._evicted = self._evicted, []
        gone = {store.page for store in stores}
        while self._waiting and self._waiting[0][0] <= self.step:
            _, store = self._waiting.popleft()
            self._incomplete.pop(store.page, None)
            # Whatever was evicted since then is another page by now.
            if self._of_page.get(store.page) is store and store.page not in gone:
                stores.append(store)
        return stores
