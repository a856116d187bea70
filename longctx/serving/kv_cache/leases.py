"""Pages that outlive their request, or are read while it runs, for another engine that goes on with it.

Source: Mooncake, section 3, figure 4 (pages are streamed to the decoding side while prefill still runs).
"""

import itertools
from dataclasses import dataclass, field

from longctx.serving.kv_cache.page_pool import Key, PagePool


class LeaseGone(Exception):
    """A lease is unknown, released or expired, or its pages are not there; the text says which."""


@dataclass
class LeasedPages:
    """Pages of one completion: `length` tokens in `pages`, of which the last may be partial and has a key of its own.

    While its sequence runs, that holds the pages, and `length` grows; once it has ended, `holder` holds them, unless
    nobody wants them any more by then.
    """

    keys: list[Key] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    length: int = 0
    total: int = 0  # tokens that there are to be
    holder: int | None = None  # in the pool, once its sequence has ended
    is_wanted: bool = True

    @property
    def is_over(self) -> bool:
        """Whether its sequence has ended: nothing more will come."""
        return self.holder is not None


class Leases:
    """The pages that an engine's pool keeps for others, by the ids of leases. Decides nothing by itself."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        self._leases: dict[str, LeasedPages] = {}
        self._holders = itertools.count(-2, -1)  # sequences have numbers from 0 on

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def get(self, lease_id: str) -> LeasedPages | None:
        return self._leases.get(lease_id)

    @property
    def num_pages(self) -> int:
        """Pages that are held for ended sequences, each as often as leases have it."""
        leases = tuple(self._leases.values())  # metrics are read while an engine runs
        return sum(len(lease.pages) for lease in leases if lease.is_over)

    def over(self) -> list[str]:
        """The leases of sequences that have ended."""
        return [lease_id for lease_id, lease in self._leases.items() if lease.is_over]

    def begin(self, lease_id: str, keys: list[Key], total: int) -> None:
        """A sequence of so many tokens comes whose pages are to be kept; `keys` has one for each page."""
        if lease_id not in self._leases:
            self._leases[lease_id] = LeasedPages(keys, total=total)

    def note(self, lease_id: str, pages: list[int], length: int) -> None:
        """So many tokens of a running sequence are complete, or will be before anything is read."""
        lease = self._leases.get(lease_id)
        if lease is not None and not lease.is_over:
            full = min(length, lease.total) // self._page_size
            lease.pages, lease.length = pages[:full], full * self._page_size

    def keep(self, lease_id: str, keys: list[Key], pages: list[int], length: int) -> None:
        """A sequence ends with `length` tokens; it still holds the pages, and is about to give them back."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.is_over:  # another request had this id
            self.drop(lease_id)
            lease = self._leases[lease_id] = LeasedPages()
        if not lease.is_wanted:
            self.drop(lease_id)
            return
        count = -(-length // self._page_size)
        lease.holder, lease.length, lease.total = next(self._holders), length, length
        lease.pages, lease.keys = pages[:count], keys
        for page in lease.pages:
            self._pool.share(page, lease.holder)

    def release(self, lease_id: str) -> None:
        """Nobody needs a lease any more; that of a running sequence ends with it."""
        lease = self._leases.get(lease_id)
        if lease is not None and not lease.is_over:
            lease.is_wanted = False
        else:
            self.drop(lease_id)

    def drop(self, lease_id: str) -> None:
        """End a lease at once: its pages are given back, or those of a running sequence are kept for nobody."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None and lease.holder is not None:
            self._pool.release(lease.pages, lease.holder)
