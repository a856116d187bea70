"""Sequences that hold a slot and pages, and what they hold."""

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Iterator

from longctx.serving.kv_cache.connector import PageStore
from longctx.serving.kv_cache.page_pool import Key, PageListener, PagePool
from longctx.serving.kv_cache.placement import Grown, Placement
from longctx.serving.scheduler.sequence import Sequence, State, completion_of


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
        """Return an empty copy: a scheduler that is run ahead stores nothing."""
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


class Slots:
    """Slots of a compiled step, one for each running sequence.

    What is done ahead of a step reaches all stages at once, so a slot rests until its batches have left the pipeline.
    """

    def __init__(self, count: int) -> None:
        self.free = list(range(count - 1, -1, -1))
        self.resting: deque[tuple[int, int]] = deque()  # (the first step in which it is free, slot)

    def give_back(self, slot: int, step: int) -> None:
        """A slot is free from a step on."""
        self.resting.append((step, slot))

    def wake(self, step: int) -> None:
        """Free the slots that have rested until this step."""
        while self.resting and self.resting[0][0] <= step:
            self.free.append(self.resting.popleft()[1])


class Running:
    """Running sequences.

    Args:
      stores: is told of full pages, if something beyond the devices keeps pages.

    Attributes:
      prefilling: prompt tokens are yet to be planned or loaded; in order of arrival.
      decoding: every step computes one token; higher priorities first, then in order of arrival.
      slots: see `Slots`.
      prompt_rows: tokens of prompts that have been planned so far.
    """

    def __init__(self, pool: PagePool, page_size: int, max_running: int, stores: PageStores | None = None) -> None:
        self.pool, self.page_size, self.stores = pool, page_size, stores
        self.max_running, self.slots = max_running, Slots(max_running)
        self.prompt_rows = 0
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.prefilling
        yield from self.decoding

    def __bool__(self) -> bool:
        return bool(self.prefilling or self.decoding)

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def begin_prefill(self, sequence: Sequence, found: list[int], placement: Placement, stop: int, total: int) -> None:
        """Give a waiting sequence a slot, pages found in the cache, and promises of those before page `stop`.

        `total` is how many it may need; it grows to have those after `stop`.
        """
        for page in found:
            self.pool.share(page, sequence.order)
        sequence.slot = self.slots.free.pop()
        sequence.pages, sequence.placement = found, placement
        sequence.rank_pages = [0] * self.pool.num_ranks
        for page in found:
            sequence.rank_pages[self.pool.rank_of(page)] += 1
        sequence.ranks = tuple(rank for rank, count in enumerate(sequence.rank_pages) if count)
        sequence.reserved = placement.counts(len(found), stop)
        self.pool.reserve(sequence.reserved)
        sequence.claim, sequence.reach = total - stop, stop * self.page_size
        sequence.to(State.PREFILLING)
        bisect.insort(self.prefilling, sequence, key=arrival_order)

    def promise_run(self, sequence: Sequence, rank: int, count: int) -> None:
        """Promise a sequence that grows its next pages, all on one rank."""
        placement = sequence.placement
        assert isinstance(placement, Grown)
        placement.grow(len(sequence.pages) + sum(sequence.reserved), rank)
        if sequence.promised:
            assert sequence.promised >= count
            sequence.promised -= count
            self.pool.promise(-count)
        else:
            sequence.claim -= count
        sequence.reserved[rank] += count
        sequence.reach += count * self.page_size
        self.pool.reserve([count if other == rank else 0 for other in range(self.pool.num_ranks)])

    def promise_rest(self, sequence: Sequence) -> None:
        """Promise a sequence all that it may still need, on whichever ranks: it never waits for memory again."""
        self.pool.promise(sequence.claim)
        sequence.promised += sequence.claim
        sequence.claim = 0

    def begin_decode(self, sequence: Sequence) -> None:
        """A prompt is planned to its end: its sequence decodes from the next step on."""
        assert not sequence.claim
        self.prefilling.remove(sequence)
        sequence.to(State.DECODING)
        bisect.insort(self.decoding, sequence, key=_priority_order)

    def extend(self, sequence: Sequence, tokens: int) -> list[int]:
        """Allocate the pages of its tokens up to `tokens`, promised ones first; returns the new pages."""
        first = len(sequence.pages)
        if tokens <= first * self.page_size:
            return []
        placement = sequence.placement
        assert placement is not None
        for number in range(first, self.pages_of(tokens)):
            rank = placement.rank(number)
            reserved = sequence.reserved[rank] > 0
            sequence.reserved[rank] -= reserved
            sequence.pages.append(self.pool.allocate(rank, reserved, sequence.order))
            sequence.rank_pages[rank] += 1
            if rank not in sequence.ranks:
                sequence.ranks = tuple(sorted((*sequence.ranks, rank)))
        return sequence.pages[first:]

    def register(self, sequence: Sequence) -> None:
        """Offer full pages, whose tokens are known and planned to be computed, for sharing."""
        full = min(len(sequence.keys), sequence.computed // self.page_size)
        first = sequence.registered
        are_new = [self.pool.register(sequence.pages[i], sequence.keys[i]) for i in range(first, full)]
        if self.pool.listener is not None:
            self._announce(self.pool.listener, sequence, first, are_new)
        if self.stores is not None:
            pages, keys, tenant = sequence.pages, sequence.keys, sequence.tenant
            new = (i for i, is_new in enumerate(are_new, first) if is_new)
            self.stores.note(PageStore(keys[i], pages[i], i, tenant, keys[i - 1] if i else b"") for i in new)
        sequence.registered = max(first, full)

    def _announce(self, listener: PageListener, sequence: Sequence, first: int, are_new: list[bool]) -> None:
        """Tell of those full pages of a sequence, from page `first` on, that can be found since now."""
        completion, keys = completion_of(sequence), sequence.keys
        for is_new, run in itertools.groupby(range(first, first + len(are_new)), lambda i: are_new[i - first]):
            if is_new:
                pages = list(run)
                start, stop = pages[0], pages[-1] + 1
                tokens = completion.tokens[start * self.page_size : stop * self.page_size].copy()
                parent = keys[start - 1] if start else None
                listener.stored(parent, keys[start:stop], tokens, completion.request.cache_salt)

    def release(self, sequence: Sequence, free_from: int) -> None:
        """Take its slot, which is free from a step on, pages and promises."""
        (self.decoding if sequence.state is State.DECODING else self.prefilling).remove(sequence)
        assert sequence.slot is not None
        self.slots.give_back(sequence.slot, free_from)
        self.pool.unreserve(sequence.reserved)
        self.pool.promise(-sequence.promised)
        self.pool.release(sequence.pages, sequence.order)
        sequence.slot, sequence.reserved, sequence.pages = None, [], []
        sequence.ranks, sequence.rank_pages = (), []
        sequence.claim = sequence.promised = 0
        sequence.registered = sequence.computed = sequence.ready = 0


def _priority_order(sequence: Sequence) -> tuple[int, int]:
    return -sequence.priority, sequence.order


def arrival_order(sequence: Sequence) -> int:
    return sequence.order
