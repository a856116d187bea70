"""Pages and who holds them: a host-side allocator with reference counts, and the index of what may be shared.

A full page is known by a key that stands for its tokens and all tokens before them (`prefix`), so a sequence that
begins with the same tokens can share it. A page without a holder keeps its contents and its key until memory is
needed: the least recently used go first, and of one chain its tail, without which the rest is still of use.

Source: Mooncake, section 3 (blocks hashed in a chain, shared, evicted LRU); PagedAttention (Kwon et al. 2023).
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from longctx.serving.kv_cache.window_pages import NO_PAGE, WindowPages

Key = bytes


@runtime_checkable
class PageListener(Protocol):
    """Hears which full pages can be found, change by change, within steps: it must be quick."""

    def stored(self, parent: Key | None, keys: list[Key], tokens: np.ndarray, salt: str) -> None:
        """Consecutive pages of tokens `[T]` can be found from now on; `parent` is the key of the page before them."""
        ...

    def removed(self, key: Key) -> None:
        """The page of a key can be found no more. It may be one that was not told of, as it was not full."""
        ...

    def cleared(self) -> None:
        """No page without a holder can be found any more; each was reported to `removed`."""
        ...


class PagePool:
    """Pages 0 to num_pages - 1. A page is free, held (one or more references), or idle: unheld, but found by its key.

    The first `per_rank` pages live on context rank 0, the next on rank 1, and so on. Promises (`reserve`) are counts:
    pages themselves are allocated as they are needed, so that a step's work depends on what the step adds and not on
    how long a sequence is. A promise may leave the rank open (`promise`).

    Holders have numbers, so that a pool knows which pages each of them holds alone: those that it would give back.

    Attributes:
      reserved: pages promised of each rank.
      promised: pages promised of whichever rank.
      num_alone: pages that have one holder.
      listener: is told of what can be found, if there is one.
      windows: the window pages of its pages; None: the model has no layer with a window.

    Args:
      on_evict: is called with a page and its key before it is overwritten, as memory is needed.
    """

    def __init__(
        self,
        per_rank: int,
        num_ranks: int = 1,
        on_evict: Callable[[int, Key], object] | None = None,
        windows: WindowPages | None = None,
    ) -> None:
        if per_rank < 1:
            raise ValueError(f"num_pages must be at least 1, got {per_rank}")
        self.per_rank, self.num_ranks, self.num_pages = per_rank, num_ranks, per_rank * num_ranks
        self.reserved = [0] * num_ranks
        self.promised = self.num_alone = 0
        self.num_evicted = 0
        self.num_returned = 0  # how often pages became available
        self.listener: PageListener | None = None
        self.on_evict, self.windows = on_evict, windows
        self._free = [list(range((rank + 1) * per_rank - 1, rank * per_rank - 1, -1)) for rank in range(num_ranks)]
        self._references = [0] * self.num_pages
        self._holders = [0] * self.num_pages  # the sum of the numbers of a page's holders: with one left, its number
        self._alone: dict[int, list[int]] = {}  # pages of each rank that a holder holds alone
        self._key_of: list[Key | None] = [None] * self.num_pages
        self._page_of: dict[Key, int] = {}
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_ranks)]

    def __deepcopy__(self, memo: dict[int, object]) -> "PagePool":
        """For looking ahead, without going through every page."""
        memo[id(self)] = twin = copy.copy(self)
        twin.listener = twin.on_evict = None
        twin.windows = copy.deepcopy(self.windows, memo)
        for name in ("reserved", "_references", "_holders", "_key_of", "_page_of"):
            setattr(twin, name, getattr(self, name).copy())
        twin._alone = {holder: pages.copy() for holder, pages in self._alone.items()}
        twin._free = [free.copy() for free in self._free]
        twin._idle = [idle.copy() for idle in self._idle]
        return twin

    def rank_of(self, page: int) -> int:
        return page // self.per_rank

    def available(self, rank: int) -> int:
        """Pages of a rank that can still be reserved."""
        return len(self._free[rank]) + len(self._idle[rank]) - self.reserved[rank]

    @property
    def num_available(self) -> int:
        """Pages that can still be promised, on all ranks together."""
        return sum(self.by_rank) - self.promised

    @property
    def by_rank(self) -> list[int]:
        """Pages of each rank that can still be reserved."""
        return [self.available(rank) for rank in range(self.num_ranks)]

    @property
    def num_reserved(self) -> int:
        """Pages that are promised, of given ranks or of any."""
        return sum(self.reserved) + self.promised

    def alone(self, holder: int) -> list[int]:
        """Return how many pages of each rank a holder holds alone."""
        return self._alone.get(holder) or [0] * self.num_ranks

    @property
    def num_held(self) -> int:
        return sum(map(self.held_on, range(self.num_ranks)))

    def held_on(self, rank: int) -> int:
        """Pages of a rank that sequences hold."""
        return self.per_rank - len(self._free[rank]) - len(self._idle[rank])

    @property
    def num_cached(self) -> int:
        """Pages that can be found by a key, held or idle."""
        return len(self._page_of)

    @property
    def keys(self) -> Collection[Key]:
        """Keys of the pages that can be found."""
        return self._page_of.keys()

    def reserve(self, counts: Sequence[int]) -> None:
        """Promise pages of each rank; `allocate(reserved=True)` and `unreserve` take the promise back."""
        for rank, count in enumerate(counts):
            available = self.available(rank)
            assert 0 <= count <= available, f"{count} pages reserved of {available} available on rank {rank}"
            self.reserved[rank] += count

    def unreserve(self, counts: Sequence[int]) -> None:
        self.num_returned += 1
        for rank, count in enumerate(counts):
            assert 0 <= count <= self.reserved[rank]
            self.reserved[rank] -= count

    def promise(self, count: int) -> None:
        """Promise pages of whichever rank; a negative number takes promises back."""
        assert -self.promised <= count <= self.num_available
        self.promised += count

    def allocate(self, rank: int, reserved: bool, holder: int = 0) -> int:
        """A page of a rank, held once, with nothing of use in it: a free one, else the least recently used idle one."""
        return self.allocate_many(rank, 1, int(reserved), holder)[0]

    def allocate_many(self, rank: int, count: int, reserved: int, holder: int = 0) -> list[int]:
        """Return as many pages of a rank, of which the first `reserved` were promised, as `allocate` does."""
        self.reserved[rank] -= reserved
        assert self.available(rank) >= count, f"no page is available on rank {rank}"
        free, idle, references, holders = self._free[rank], self._idle[rank], self._references, self._holders
        kept = max(0, len(free) - count)
        pages = free[kept:]
        pages.reverse()
        del free[kept:]
        evicted = [idle.popitem(last=False)[0] for _ in range(count - len(pages))]
        if self.on_evict is None and self.windows is None and self.listener is None:  # at once, for there are many
            key_of, page_of = self._key_of, self._page_of
            for page in evicted:
                del page_of[key_of[page]]  # type: ignore[arg-type]
                key_of[page] = None
        else:
            for page in evicted:
                key = self.forget(page)
                if self.on_evict is not None:
                    self.on_evict(page, key)
        self.num_evicted += len(evicted)
        pages += evicted
        for page in pages:
            assert references[page] == 0
            references[page], holders[page] = 1, holder
        self._count_alone(holder, rank, count)
        return pages

    def find(self, key: Key) -> int | None:
        return self._page_of.get(key)

    def finds_none(self, keys: Iterable[Key]) -> bool:
        """Whether no page can be found by any of some keys."""
        return self._page_of.keys().isdisjoint(keys)

    def leading(self, keys: Iterable[Key]) -> list[int]:
        """Return the pages of the longest prefix of such keys that a sequence can begin after.

        The window pages that its next token sees are there too.
        """
        pages = list[int]()
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        if self.windows is not None:
            del pages[self.windows.count_usable(pages) :]
        return pages

    def is_found(self, page: int) -> bool:
        """Whether a page can be found by a key."""
        return self._key_of[page] is not None

    def is_idle(self, page: int) -> bool:
        return page in self._idle[self.rank_of(page)]

    def is_held_alone(self, page: int) -> bool:
        """Whether a page has one holder."""
        return self._references[page] == 1

    def share(self, page: int, holder: int = 0) -> None:
        """Hold a page that is held or idle once more."""
        rank, references = self.rank_of(page), self._references[page]
        if references == 0:
            del self._idle[rank][page]
            self._count_alone(holder, rank, 1)
        elif references == 1:
            self._count_alone(self._holders[page], rank, -1)
        self._references[page] += 1
        self._holders[page] += holder

    def release(self, pages: Sequence[int], holder: int = 0) -> None:
        """Give back the pages of one sequence, in order. Those with a key become idle, the first the most recent."""
        self.num_returned += 1
        references, holders, key_of, per_rank = self._references, self._holders, self._key_of, self.per_rank
        returned = [0] * self.num_ranks
        for page in reversed(pages):
            left, rank = references[page] - 1, page // per_rank
            assert left >= 0, f"page {page} is not held"
            references[page] = left
            holders[page] -= holder
            if not left:
                returned[rank] += 1
                if key_of[page] is not None:
                    self._idle[rank][page] = None
                else:
                    self._free[rank].append(page)
            elif left == 1:
                self._count_alone(holders[page], rank, 1)
        for rank, count in enumerate(returned):
            self._count_alone(holder, rank, -count)
        if not any(self.alone(holder)):
            self._alone.pop(holder, None)

    def _count_alone(self, holder: int, rank: int, change: int) -> None:
        pages = self._alone.get(holder)
        if pages is None:
            pages = self._alone[holder] = [0] * self.num_ranks
        pages[rank] += change
        self.num_alone += change

    def register(self, page: int, key: Key) -> bool:
        """Let a held page be found by a key, unless another page already is; whether it is found by it now.

        It takes the place of one that has lost its window page, if it has one itself.
        """
        assert self._references[page] > 0
        if self._key_of[page] is not None:
            return False
        other = self._page_of.get(key)
        if other is not None and not self._replace(other, page):
            return False
        self._page_of[key] = page
        self._key_of[page] = key
        return True

    def register_many(self, pages: Sequence[int], keys: Sequence[Key]) -> list[bool]:
        """Let held pages be found by their keys, as `register` does."""
        key_of, page_of, are_new = self._key_of, self._page_of, []
        for page, key in zip(pages, keys, strict=True):
            is_new = key_of[page] is None and key not in page_of
            if is_new:
                page_of[key], key_of[page] = page, key
            are_new.append(is_new or self.register(page, key))
        return are_new

    def _replace(self, other: int, page: int) -> bool:
        """Let a page be found no more if it has lost its window page and another one with its contents has not."""
        if self.windows is None or self.windows.find(other) != NO_PAGE or self.windows.find(page) == NO_PAGE:
            return False
        self.forget(other)
        if not self._references[other]:
            rank = self.rank_of(other)
            del self._idle[rank][other]
            self._free[rank].append(other)
        return True

    def forget(self, page: int) -> Key:
        """Let a page be found no more; the key that it had."""
        key, self._key_of[page] = self._key_of[page], None
        assert key is not None
        del self._page_of[key]
        if self.windows is not None:
            self.windows.drop(page)
        if self.listener is not None:
            self.listener.removed(key)
        return key

    def evict(self, is_wanted: Callable[[Key], bool]) -> int:
        """Free those idle pages whose keys are wanted so, as if memory were needed; returns how many there were."""
        count = 0
        for free, idle in zip(self._free, self._idle, strict=True):
            for page in [page for page in idle if is_wanted(self._key_of[page] or b"")]:
                key = self.forget(page)
                if self.on_evict is not None:
                    self.on_evict(page, key)
                del idle[page]
                free.append(page)
                count += 1
        self.num_evicted += count
        self.num_returned += count > 0
        return count

    def clear(self) -> int:
        """Free all idle pages; returns how many there were."""
        count = 0
        self.num_returned += 1
        for free, idle in zip(self._free, self._idle, strict=True):
            count += len(idle)
            for page in idle:
                self.forget(page)
                free.append(page)
            idle.clear()
        if self.listener is not None:
            self.listener.cleared()
        return count
