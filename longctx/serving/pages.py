"""Pages and who holds them: a host-side allocator with reference counts, and the index of what may be shared.

A full page is known by a key that stands for its tokens and all tokens before them (`prefix`), so a sequence that
begins with the same tokens can share it. A page that nobody holds keeps its contents and its key until memory is
needed: the least recently used go first, and of one chain its tail, without which the rest is still of use.

Source: Mooncake, section 3 (blocks hashed in a chain, shared, evicted LRU); PagedAttention (Kwon et al. 2023).
"""

from collections import OrderedDict
from collections.abc import Sequence

Key = bytes | int


class PagePool:
    """Pages 0 to num_pages - 1. A page is free, held (one or more references), or idle: unheld, but found by its key.

    Promises (`reserve`) are counts: pages themselves are allocated as they are needed, so that a step's work depends
    on what the step adds and not on how long a sequence is.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self.num_reserved = 0
        self.num_evicted = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._key_of: list[Key | None] = [None] * num_pages
        self._page_of: dict[Key, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Pages that can still be reserved."""
        return len(self._free) + len(self._idle) - self.num_reserved

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free) - len(self._idle)

    @property
    def num_cached(self) -> int:
        """Pages that can be found by a key, held or idle."""
        return len(self._page_of)

    def reserve(self, count: int) -> None:
        """Promise pages; `allocate(reserved=True)` and `unreserve` take the promise back."""
        assert 0 <= count <= self.num_available, f"{count} pages reserved of {self.num_available} available"
        self.num_reserved += count

    def unreserve(self, count: int) -> None:
        assert 0 <= count <= self.num_reserved
        self.num_reserved -= count

    def allocate(self, reserved: bool) -> int:
        """One page, held once, with nothing of use in it: a free one, else the least recently used idle one."""
        if reserved:
            self.unreserve(1)
        assert self.num_available > 0 or reserved, "no page is available"
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self.forget(page)
            self.num_evicted += 1
        assert self._references[page] == 0
        self._references[page] = 1
        return page

    def find(self, key: Key) -> int | None:
        return self._page_of.get(key)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def share(self, page: int) -> None:
        """Hold a page that is held or idle once more."""
        if self._references[page] == 0:
            del self._idle[page]
        self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give back the pages of one sequence, in order. Those with a key become idle, the first the most recent."""
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} is not held"
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._key_of[page] is not None:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def register(self, page: int, key: Key) -> None:
        """Let a held page be found by a key, unless another page already is."""
        assert self._references[page] > 0
        if key not in self._page_of and self._key_of[page] is None:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget(self, page: int) -> None:
        """Let a page be found no more."""
        key, self._key_of[page] = self._key_of[page], None
        assert key is not None
        del self._page_of[key]

    def clear(self) -> int:
        """Free all idle pages; returns how many there were."""
        count = len(self._idle)
        for page in self._idle:
            self.forget(page)
            self._free.append(page)
        self._idle.clear()
        return count
