"""Leases: pages that an engine holds for another one, and what the sending side of a transfer asks of its engine.

Source: Mooncake, section 3 (the messenger streams pages to the decoding side while prefill still runs).
"""

import secrets
from typing import NamedTuple, Protocol

from longctx.serving.kv_cache.connector import PageRead
from longctx.serving.kv_cache.leases import LeaseGone as LeaseGone
from longctx.serving.kv_cache.page_layout import PageLayout
from longctx.serving.kv_cache.page_pool import Key


class Lease(NamedTuple):
    """Pages of one sequence that outlive its request, until another engine has them or nobody asks for them.

    Attributes:
      lease_id: of `make_lease_id`.
      keys: one per page, in order; the last may be that of a partial page.
      pages: their numbers in the pool of the engine that holds them. They mean nothing elsewhere.
      tail: tokens in the last page if it is partial, else 0.
      length: tokens in all.
      layout: of the pages.
      expires: on the clock of the engine that holds them, unless somebody asks for them before.
    """

    lease_id: str
    keys: list[Key]
    pages: list[int]
    tail: int
    length: int
    layout: PageLayout
    expires: float

    def check(self) -> None:
        """ValueError, unless the numbers of keys, pages and tokens fit together."""
        num_pages = -(-self.length // self.layout.page_size)
        if not len(self.keys) == len(self.pages) == num_pages or self.tail != self.length % self.layout.page_size:
            raise ValueError(
                f"a lease of {self.length} tokens must have {num_pages} keys and pages and a tail of "
                f"{self.length % self.layout.page_size}, got {len(self.keys)}, {len(self.pages)} and {self.tail}"
            )


def make_lease_id() -> str:
    """Make a new id, which nobody can guess."""
    return secrets.token_hex(16)


class Exporter(Protocol):
    """The sending engine. Senders call it from threads of their own; no call may wait for a step.

    `num_ready` and `read` keep a lease alive: it expires only when nobody has asked for some time.
    """

    def open(self, lease_id: str) -> Lease:
        """The lease with this id. Raises `LeaseGone`."""
        ...

    def num_ready(self, lease_id: str) -> int:
        """How many leading pages are complete; fewer than all while prefill runs. Raises `LeaseGone`."""
        ...

    def read(self, lease_id: str, first: int, stop: int, layers: tuple[int, int]) -> PageRead:
        """Begin to read pages `first` to `stop` of a lease, of these layers at least; they are complete.

        What is read is right even if the lease ends before the result has come. Raises `LeaseGone`.
        """
        ...

    def release(self, lease_id: str) -> None:
        """Nobody needs a lease any more. One that is gone already is no error."""
        ...
