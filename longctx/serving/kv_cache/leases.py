"""Pages that outlive their request, or are read while it runs, for another engine that goes on with it.

Source: Mooncake, section 3, figure 4 (pages are streamed to the decoding side while prefill still runs).
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from longctx.serving.kv_cache.page_pool import Key, PagePool
from longctx.serving.kv_cache.window_pages import NO_PAGE


class LeaseGone(Exception):
    """A lease is unknown, released or expired, or its pages are not there; the text says which.

    Examples:
      >>> from longctx.cluster.transfer import LeaseGone
      >>> leases = {}
      >>> def open_lease(lease_id):
      ...     if lease_id not in leases:
      ...         raise LeaseGone(f"there is no lease {lease_id}")
      ...     return leases[lease_id]
      >>> try:
      ...     _ = open_lease("0123")
      ... except LeaseGone as error:
      ...     print(error)  # who would have fetched its pages computes them
      there is no lease 0123
    """


@dataclass
class LeasedPages:
    """Pages of one completion: `length` tokens in `pages`, of which the last may be partial and has a key of its own.

    While its sequence runs, that holds the pages, and `length` grows; once it has ended, `holder` holds them, unless
    they are not wanted any more by then. `owner` is its sequence: no other one adds to its pages. `windows` has the
    window page of each page, or `NO_PAGE`: the sequence's own list, which goes on, until it has ended.
    """

    owner: Any
    keys: list[Key] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    length: int = 0
    total: int = 0  # tokens that there are to be
    windows: list[int] = field(default_factory=list)
    holder: int | None = None  # in the pool, once its sequence has ended
    is_wanted: bool = True
    preemptions: int = 0  # of its sequence, when its pages were noted

    @property
    def is_over(self) -> bool:
        """Whether its sequence has ended: nothing more will come."""
        return self.holder is not None

    @property
    def num_windows(self) -> int:
        """Window pages that it holds itself."""
        return len(self.windows) - self.windows.count(NO_PAGE) if self.is_over else 0


class Leases:
    """The pages that an engine's pool keeps for others, by the ids of leases. Decides nothing by itself."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        self._leases: dict[str, LeasedPages] = {}
        self._holders = itertools.count(-2, -1)  # sequences have numbers from 0 on

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases or f"{lease_id}/0" in self._leases

    def get(self, lease_id: str) -> LeasedPages | None:
        return self._leases.get(lease_id)

    @property
    def num_pages(self) -> int:
        """Pages that are held for ended sequences, each as often as leases have it."""
        leases = tuple(self._leases.values())  # metrics are read while an engine runs
        return sum(len(lease.pages) for lease in leases if lease.is_over)

    def exceed(self, most: float, lease_id: str) -> bool:
        """Whether leases hold more than `most` pages, and the tenant of this one more than an equal share of these."""
        if self.num_pages <= most:
            return False
        by_tenant = Counter[str]()
        for lease in self._leases.values():
            by_tenant[lease.owner.tenant] += len(lease.pages) if lease.is_over else 0
        tenants = sum(map(bool, by_tenant.values()))
        return by_tenant[self._leases[lease_id].owner.tenant] * tenants > most

    def over(self) -> list[str]:
        """The leases of sequences that have ended."""
        return [lease_id for lease_id, lease in self._leases.items() if lease.is_over]

    def running(self) -> Iterator[tuple[str, LeasedPages]]:
        """The leases of sequences that have not ended."""
        return ((lease_id, lease) for lease_id, lease in self._leases.items() if not lease.is_over)

    def begin(self, lease_id: str, owner: Any, keys: list[Key], total: int) -> None:
        """Add a sequence of `total` tokens whose pages are to be kept; `keys` has one for each page.

        They are not if the id is another one's.
        """
        if lease_id not in self._leases:
            self._leases[lease_id] = LeasedPages(owner, keys, total=total)

    def note(self, lease_id: str, owner: Any, pages: list[int], length: int, windows: list[int]) -> None:
        """Note that `length` tokens of a running sequence are complete, or will be before anything is read.

        None, for one that is preempted: its pages are another one's now. `windows`: see `LeasedPages`.
        """
        lease = self._leases.get(lease_id)
        if lease is not None and lease.owner == owner and not lease.is_over:
            full = min(length, lease.total) // self._page_size
            lease.pages, lease.length, lease.windows = pages[:full], full * self._page_size, windows

    def keep(
        self, lease_id: str, owner: Any, keys: list[Key], pages: list[int], length: int, windows: list[int]
    ) -> bool:
        """A sequence ends with `length` tokens; it still holds the pages, and is about to give them back.

        Returns whether they are kept: not if they are not wanted, the id is another one's, or leases have as many
        window pages as they may.
        """
        lease = self._leases.setdefault(lease_id, LeasedPages(owner))
        if lease.owner != owner or lease.is_over:
            return False
        held = self._count_seen(length, windows)
        if not lease.is_wanted or held is None:
            self.drop(lease_id, owner)
            return False
        count = -(-length // self._page_size)
        lease.holder, lease.length, lease.total = next(self._holders), length, length
        lease.pages, lease.keys = pages[:count], keys
        for page in lease.pages:
            self._pool.share(page, lease.holder)
        if self._pool.windows is not None:
            seen = lease.pages[count - held :]
            lease.windows = [NO_PAGE] * (count - held) + list(map(self._pool.windows.hold, seen))
        return True

    def _count_seen(self, length: int, windows: list[int]) -> int | None:
        """Return how many of the last pages keep their window pages; None: they can't be kept.

        They are those that the last token sees, so that an engine can go on with it or with the token after it.
        """
        pool = self._pool.windows
        if pool is None:
            return 0
        count, first = -(-length // self._page_size), max(0, (length - 1) // self._page_size - pool.span)
        has_room = pool.most_leased is None or self.num_windows + count - first <= pool.most_leased
        return count - first if has_room and NO_PAGE not in windows[first:count] else None

    @property
    def num_windows(self) -> int:
        """Window pages that are held for ended sequences, each as often as leases have it."""
        return sum(lease.num_windows for lease in self._leases.values())

    def release(self, lease_id: str) -> None:
        """Release a lease that is no longer needed; that of a running sequence ends with it."""
        lease = self._leases.get(lease_id)
        if lease is not None and not lease.is_over:
            lease.is_wanted = False
        elif lease is not None:
            self.drop(lease_id, lease.owner)

    def drop(self, lease_id: str, owner: Any) -> None:
        """End a lease at once: its pages are given back, those of a running sequence when it ends."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.owner == owner:
            del self._leases[lease_id]
            if lease.holder is not None:
                for page, window in zip(lease.pages, lease.windows, strict=False):
                    if window != NO_PAGE and self._pool.windows is not None:
                        self._pool.windows.release(window, self._pool.is_found(page))
                self._pool.release(lease.pages, lease.holder)
