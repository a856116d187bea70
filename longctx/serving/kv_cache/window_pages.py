"""Window pages: the keys and values that layers with a sliding window keep, of those pages whose tokens are still seen.

A page of a `PagePool` has the keys and values of the layers without a window. Its window page has those of the layers
with one. A sequence holds window pages only as far back as its next token sees, so that their memory follows the window
and not the length. A window page that no sequence holds stays where it is until memory is needed, so that others can
begin after it: the least recently used one goes first.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

NO_PAGE = -1
"""In the place of a window page that is not held."""


_UNLIMITED = 1 << 40  # pages that take no memory


class PageBytes(NamedTuple):
    """Bytes on each device of a page, of the layers without a window, and of a window page, of those with one."""

    page: int
    window: int = 0

    def of_pages(self, num_pages: int, most_windows: int) -> int:
        """Return the bytes of pages, and of their window pages, of which there are `most_windows` at most."""
        return num_pages * self.page + min(num_pages, most_windows) * self.window

    def pages_within(self, room: float, most_windows: int) -> int:
        """Return how many pages take a number of bytes with their window pages."""
        both = int(max(0, room) // sum(self))
        if both < most_windows or not self.window:
            return both
        rest = room - most_windows * self.window
        return int(rest // self.page) if self.page else _UNLIMITED


class WindowPages:
    """Window pages 0 to num_pages - 1, at most one for each page of a pool, and on the same rank.

    Each is free, held (one or more references), or idle: unheld, and still its page's.

    Args:
      per_rank: window pages of each rank.
      pool_per_rank, num_ranks: of the pool.
      span: pages before its own that a token may see, see `window_span`.
      most_leased: window pages that leases may hold; None: any number.

    Attributes:
      num_evicted: idle window pages whose contents were dropped for others.
    """

    def __init__(
        self, per_rank: int, pool_per_rank: int, num_ranks: int, span: int, most_leased: int | None = None
    ) -> None:
        self.per_rank, self.num_ranks, self.span, self.most_leased = per_rank, num_ranks, span, most_leased
        self.num_pages = per_rank * num_ranks
        self.num_evicted = 0
        self._pool_per_rank = pool_per_rank
        self._free = [list(range((rank + 1) * per_rank - 1, rank * per_rank - 1, -1)) for rank in range(num_ranks)]
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_ranks)]
        self._references = [0] * self.num_pages
        self._page_of = [NO_PAGE] * self.num_pages
        self._window_of = [NO_PAGE] * (pool_per_rank * num_ranks)

    def __deepcopy__(self, memo: dict[int, object]) -> "WindowPages":
        """For looking ahead."""
        memo[id(self)] = twin = copy.copy(self)
        for name in ("_references", "_page_of", "_window_of"):
            setattr(twin, name, getattr(self, name).copy())
        twin._free = [free.copy() for free in self._free]
        twin._idle = [idle.copy() for idle in self._idle]
        return twin

    @property
    def num_held(self) -> int:
        """Window pages that are held."""
        return self.num_pages - sum(map(len, self._free)) - self.num_idle

    @property
    def num_idle(self) -> int:
        """Window pages that are not held, and that sequences can begin after."""
        return sum(map(len, self._idle))

    def find(self, page: int) -> int:
        """Return the window page of a page; `NO_PAGE` if it has none."""
        return self._window_of[page]

    def count_usable(self, pages: Iterable[int]) -> int:
        """Return after how many of a sequence's first pages it can go on: the next token sees those before it."""
        usable = run = 0
        for count, page in enumerate(pages, 1):
            run = run + 1 if self._window_of[page] != NO_PAGE else 0
            if run >= min(count, self.span):
                usable = count
        return usable

    def hold(self, page: int) -> int:
        """Hold the window page of a page once more; it gets one if it has none."""
        window, rank = self._window_of[page], page // self._pool_per_rank
        if window == NO_PAGE:
            window = self._window_of[page] = self._take(rank)
            self._page_of[window] = page
        elif not self._references[window]:
            del self._idle[rank][window]
        self._references[window] += 1
        return window

    def release(self, window: int, is_found: bool) -> None:
        """Give back a window page; it stays its page's if that can be found by a key."""
        assert self._references[window] > 0, f"window page {window} is not held"
        self._references[window] -= 1
        if not self._references[window]:
            self._idle[window // self.per_rank][window] = None
            if not is_found:
                self.drop(self._page_of[window])

    def drop(self, page: int) -> None:
        """Free the window page of a page that can be found no more, unless it is held."""
        window = self._window_of[page]
        if window != NO_PAGE and not self._references[window]:
            rank = window // self.per_rank
            del self._idle[rank][window]
            self._free[rank].append(window)
            self._window_of[page] = self._page_of[window] = NO_PAGE

    def _take(self, rank: int) -> int:
        if self._free[rank]:
            return self._free[rank].pop()
        assert self._idle[rank], f"no window page is left on rank {rank}"
        window, _ = self._idle[rank].popitem(last=False)
        self._window_of[self._page_of[window]] = NO_PAGE
        self.num_evicted += 1
        return window


def window_span(window: int, page_size: int) -> int:
    """Return how many pages before its own a token may see, of which a window has `window` tokens with its own."""
    return -(-(window - 1) // page_size)


class WindowNeeds(NamedTuple):
    """Sizes that decide how many window pages a rank needs, so that those that run never wait for one.

    Attributes:
      span: see `window_span`.
      page_size: tokens of a page.
      max_running: sequences that run at a time.
      run_ahead: steps that are planned ahead of results.
      step_tokens: rows of a step, on all ranks together.
      longest: pages of the longest sequence.
      num_ranks: over which the pages of a sequence are dealt in turns; 1 where they grow from rank to rank.
      resting_steps: steps for which window pages rest that no later row sees.
      stored_steps: steps whose pages are held until they have been read.
      leases: ended sequences whose pages another engine may still fetch.
    """

    span: int
    page_size: int
    max_running: int
    run_ahead: int
    step_tokens: int
    longest: int
    num_ranks: int = 1
    resting_steps: int = 0
    stored_steps: int = 0
    leases: int = 0

    @property
    def per_sequence(self) -> int:
        """Window pages of a sequence between steps, at most, on all ranks together.

        They begin `span` pages before that of the oldest token that may still be computed next.
        """
        return min(self.longest, self.span + 1 + -(-(self.run_ahead + 1) // self.page_size))

    @property
    def per_rank(self) -> int:
        """Window pages of a rank, at least."""
        # A step's chunks begin at most one page each besides those that they fill. Of pages that are dealt in turns a
        # rank has at most one more than its share.
        step = -(-(self.step_tokens // self.page_size) // self.num_ranks)
        most = -(-min(self.longest, self.per_sequence + 1) // self.num_ranks) + (self.num_ranks > 1)
        resting = self.resting_steps * (step + self.max_running)
        stored = self.stored_steps * (step + self.max_running * (1 + most))  # those of loads that have ended too
        return self.max_running * most + step + resting + stored + self.num_leased

    @property
    def num_leased(self) -> int:
        """Window pages of a rank that leases may hold together."""
        return self.leases * self.per_sequence
