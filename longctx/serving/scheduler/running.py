"""Sequences that hold a slot and pages, what they hold, and the pages that they wait for from beyond the devices."""

import bisect
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from longctx.serving.kv_cache.connector import TIERS, Loaded, PageLoad, PageStore
from longctx.serving.kv_cache.page_pool import Key, PageListener, PagePool
from longctx.serving.kv_cache.placement import Grown, Placement
from longctx.serving.kv_cache.window_pages import NO_PAGE, WindowPages
from longctx.serving.scheduler.batch import Batch, TableRun
from longctx.serving.scheduler.forecast import Forecast
from longctx.serving.scheduler.sequence import Sequence, State, completion_of


class PageStores:
    """Full pages of the pool that something beyond the devices may keep.

    A page whose last row is in one step is complete in all stages `stages` steps later: only then it can be read. Its
    window page is held until then.

    Args:
      windows: of the pool.

    Attributes:
      step: the step that is planned, or planned next.
    """

    def __init__(self, stages: int, windows: WindowPages | None = None) -> None:
        self.step = 0
        self._stages, self._windows = stages, windows
        self._held: dict[int, int] = {}  # window pages, by their pages
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
            if self._windows is not None:
                if self._windows.find(store.page) == NO_PAGE:
                    continue  # without it the page is of no use elsewhere
                self._held[store.page] = window = self._windows.hold(store.page)
                store = store._replace(window=window)
            self._of_page[store.page] = store
            self._incomplete[store.page] = self.step + self._stages
            self._waiting.append((self.step + self._stages, store))

    def note_evicted(self, page: int, key: Key) -> None:
        """A page is about to be overwritten: it is stored now, unless it is not complete."""
        store = self._of_page.pop(page, None)
        if self._windows is not None and not self._release(page, is_found=False):
            return  # its window page may be another one's since it was read
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
                self._release(store.page, is_found=True)
        return stores

    def _release(self, page: int, is_found: bool) -> bool:
        """Give back the window page of a page that is read before the next step; whether it was held."""
        window = self._held.pop(page, None)
        if window is not None and self._windows is not None:
            self._windows.release(window, is_found)
        return window is not None


class Slots:
    """Slots of a compiled step, one for each running sequence.

    What is done ahead of a step reaches all stages at once, so a slot rests until its batches have left the pipeline.
    """

    def __init__(self, count: int) -> None:
        self.free = list(range(count - 1, -1, -1))
        self.draining: deque[tuple[int, int]] = deque()  # (the first step in which it is free, slot)

    def give_back(self, slot: int, step: int) -> None:
        """A slot is free from a step on."""
        self.draining.append((step, slot))

    def reclaim(self, step: int) -> None:
        """Free the slots that have rested until this step."""
        while self.draining and self.draining[0][0] <= step:
            self.free.append(self.draining.popleft()[1])


class Running:
    """Running sequences.

    Args:
      stores: is told of full pages, if something beyond the devices keeps pages.
      stages: of the pipeline.

    Attributes:
      prefilling: prompt tokens are yet to be planned or loaded; in order of arrival.
      decoding: every step computes one token; higher priorities first, then in order of arrival.
      slots: see `Slots`.
      prompt_rows: tokens of prompts that have been planned so far.
    """

    def __init__(
        self, pool: PagePool, page_size: int, max_running: int, stores: PageStores | None = None, stages: int = 1
    ) -> None:
        self.pool, self.page_size, self.stores = pool, page_size, stores
        self._stages, self._step = stages, 0
        self.max_running, self.slots = max_running, Slots(max_running)
        self.prompt_rows = 0
        self._advanced: list[Sequence] = []  # whose prompts the last step read on
        self._resting: deque[tuple[int, int, int]] = deque()  # window pages and their pages, until a step
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

    def extend(self, sequence: Sequence, tokens: int, computed: int) -> TableRun:
        """Allocate the pages of its tokens up to `tokens`, promised ones first; returns the new pages.

        Args:
          computed: the token that is computed next, which sees the window pages before it.
        """
        first, placement = len(sequence.pages), sequence.placement
        assert placement is not None
        assert sequence.slot is not None
        numbers = range(first, self.pages_of(tokens))
        if self.pool.num_ranks == 1:  # at once, for there are many
            reserved = min(len(numbers), sequence.reserved[0])
            sequence.reserved[0] -= reserved
            sequence.pages += self.pool.allocate_many(0, len(numbers), reserved, sequence.order)
            sequence.rank_pages[0] += len(numbers)
            sequence.ranks, numbers = (0,), range(0)
        for number in numbers:
            rank = placement.rank(number)
            reserved = sequence.reserved[rank] > 0
            sequence.reserved[rank] -= reserved
            sequence.pages.append(self.pool.allocate(rank, reserved, sequence.order))
            sequence.rank_pages[rank] += 1
            if rank not in sequence.ranks:
                sequence.ranks = tuple(sorted((*sequence.ranks, rank)))
        return TableRun(sequence.slot, first, sequence.pages[first:], self._extend_windows(sequence, computed))

    def register(self, sequence: Sequence) -> None:
        """Offer full pages, whose tokens are known and planned to be computed, for sharing."""
        full = min(len(sequence.keys), sequence.computed // self.page_size)
        first = sequence.registered
        are_new = self.pool.register_many(sequence.pages[first:full], sequence.keys[first:full])
        if self.pool.listener is not None:
            self._announce(self.pool.listener, sequence, first, are_new)
        if self.stores is not None:
            pages, keys, tenant = sequence.pages, sequence.keys, sequence.tenant
            new = (i for i, is_new in enumerate(are_new, first) if is_new)
            self.stores.note(PageStore(keys[i], pages[i], i, tenant, keys[i - 1] if i else b"") for i in new)
        sequence.registered = max(first, full)

    # Window pages.

    def begin_windows(self, sequence: Sequence) -> list[int]:
        """Hold the window pages that the first token of an admitted sequence sees; `NO_PAGE` for pages before."""
        return self._extend_windows(sequence, sequence.computed)

    def note_advance(self, sequence: Sequence) -> None:
        """Note that a prompt's next tokens are planned: later ones see fewer window pages."""
        if self.pool.windows is not None:
            self._advanced.append(sequence)

    def release_seen(self, step: int) -> None:
        """Give back the window pages that no row sees from a step on, of the prompts in the last one.

        Decodes give back theirs when they get a new page. A row that is planned already runs before what a later one
        writes over them. But what loads write reaches all stages at once: so they rest until it has left the stages.
        """
        self._step = step
        self._end_rest(step)
        for sequence in self._advanced:
            self._release_windows(sequence, sequence.computed)
        self._advanced.clear()

    def can_resume(self, sequence: Sequence, computed: int) -> bool:
        """Whether a sequence whose load came short holds the window pages that token `computed` sees."""
        windows = self.pool.windows
        if windows is None:
            return True
        first = max(0, computed // self.page_size - windows.span)
        return NO_PAGE not in sequence.window_pages[first : self.pages_of(computed)]

    def _extend_windows(self, sequence: Sequence, computed: int) -> list[int]:
        """Hold window pages for the new pages of a sequence that token `computed`, or one after it, sees."""
        windows, held = self.pool.windows, sequence.window_pages
        if windows is None:
            return held
        self._release_windows(sequence, computed)
        first, seen = len(held), computed // self.page_size - windows.span
        for number in range(first, len(sequence.pages)):
            held.append(windows.hold(sequence.pages[number]) if number >= seen else NO_PAGE)
        return held[first:]

    def _release_windows(self, sequence: Sequence, computed: int) -> None:
        """Give back the window pages of a sequence that neither token `computed` nor a later one sees.

        Results in flight may tell that it has ended before them: those that its last page sees are kept till then, as
        another engine may go on with its last token but one.
        """
        windows = self.pool.windows
        assert windows is not None
        token = max(0, min(computed, sequence.length - sequence.in_flight - 1) - 1)
        stop, held = token // self.page_size - windows.span, sequence.window_pages
        for number in range(sequence.window_first, min(stop, len(held))):
            if held[number] != NO_PAGE:
                self._resting.append((self._step + self._stages - 1, held[number], sequence.pages[number]))
                held[number] = NO_PAGE
        sequence.window_first = max(stop, sequence.window_first)
        self._end_rest(self._step)

    def _end_rest(self, step: float) -> None:
        windows = self.pool.windows
        while self._resting and self._resting[0][0] <= step and windows is not None:
            _, window, page = self._resting.popleft()
            windows.release(window, self.pool.is_found(page))

    def _release_all_windows(self, windows: WindowPages, sequence: Sequence) -> None:
        held = sequence.window_pages
        for number in range(sequence.window_first, len(held)):
            if held[number] != NO_PAGE:
                windows.release(held[number], self.pool.is_found(sequence.pages[number]))
                held[number] = NO_PAGE  # a lease may have the list
        sequence.window_pages, sequence.window_first = [], 0
        if not self:
            self._end_rest(math.inf)  # results of rows in the stages are dropped

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
        if self.pool.windows is not None:
            self._release_all_windows(self.pool.windows, sequence)
        self.pool.release(sequence.pages, sequence.order)
        sequence.slot, sequence.reserved, sequence.pages = None, [], []
        sequence.ranks, sequence.rank_pages = (), []
        sequence.claim = sequence.promised = 0
        sequence.registered = sequence.computed = sequence.ready = 0


def _priority_order(sequence: Sequence) -> tuple[int, int]:
    return -sequence.priority, sequence.order


def arrival_order(sequence: Sequence) -> int:
    return sequence.order


_WEIGHT = 0.25  # of the last load in the mean seconds of a page


class PageLoads:
    """Begins and ends the loads of prompts that wait for pages from beyond the devices, instead of computing them.

    What is available there is a hint, of when a request came: a load that comes short costs time, and the rest of it is
    computed. A load ends in wall time, and never blocks a step: its sequence has slot and pages meanwhile, and no rows.

    Args:
      restart: lets a sequence wait again, with nothing.

    Attributes:
      dropped: sequences whose loads are no longer wanted, since the last batch.
      missed: pages that loads did not bring, from tiers and from other engines (`"transfers"`).
      seconds_per_page: of the last loads from the engine's own tiers, in the mean; None: there was none.

    Source: Mooncake, section 3 (KVCache reuse), and 5.2 (when loading pays).
    """

    def __init__(self, running: Running, forecast: Forecast, restart: Callable[[Sequence], None]) -> None:
        self._running, self._forecast, self._restart = running, forecast, restart
        self.seconds_per_page: float | None = None
        self.dropped: list[str] = []
        self._loading: dict[str, Sequence] = {}  # by the names of their loads
        self._name_of: dict[Sequence, str] = {}
        self._count_loads = 0
        self.missed = {TIERS: 0, "transfers": 0}

    def __len__(self) -> int:
        return len(self._loading)

    def __contains__(self, name: object) -> bool:
        """Whether a sequence waits for the load of this name."""
        return name in self._loading

    def begin(self, batch: Batch) -> None:
        """Begin the loads that pay, before prompts are planned."""
        batch.dropped, self.dropped = self.dropped, []
        for sequence in self._running.prefilling:
            count = self._count(sequence) if sequence.available > sequence.computed else 0
            if not count:
                continue
            first = sequence.computed // self._running.page_size
            tokens = min((first + count) * self._running.page_size, sequence.available)
            assert sequence.slot is not None
            if tokens > len(sequence.pages) * self._running.page_size:
                batch.tables.append(self._running.extend(sequence, tokens, tokens))
            sequence.to(State.LOADING)
            sequence.loading_until = tokens
            # No two loads have one name, whatever becomes of their sequence: who is late can't end another one's.
            name = f"{sequence.name}:{self._count_loads}"
            self._count_loads += 1
            self._loading[name], self._name_of[sequence] = sequence, name
            keys = sequence.keys[first : tokens // self._running.page_size]
            if len(keys) < count:  # of the last page only some tokens are there, whatever comes after them
                assert sequence.tail_key is not None
                keys = [*keys, sequence.tail_key]
            pages, windows = (held[first : first + count] for held in (sequence.pages, sequence.window_pages))
            batch.loads.append(PageLoad(name, keys, pages, sequence.source, windows or None))

    def end(self, loaded: Loaded) -> Sequence | None:
        """End a load and return the sequence that goes on; None if no sequence waits for it any more."""
        sequence = self._loading.pop(loaded.name, None)
        if sequence is None:
            return None
        del self._name_of[sequence]
        size, begun = self._running.page_size, sequence.computed
        sequence.to(State.PREFILLING)
        tokens = min(begun + loaded.num_pages * size, sequence.loading_until)
        if tokens < sequence.loading_until:
            sequence.available = 0  # the rest is computed
            missed = self._running.pages_of(sequence.loading_until) - self._running.pages_of(tokens)
            self.missed[TIERS if sequence.source == TIERS else "transfers"] += missed
            # Of pages of another engine the last ones alone have what layers with a window see.
            is_whole = sequence.source == TIERS or self._running.pool.windows is None
            if not (is_whole and self._running.can_resume(sequence, tokens)):
                self._restart(sequence)
                return sequence
        sequence.computed = tokens
        if loaded.num_pages and sequence.source == TIERS:
            seconds = loaded.seconds / loaded.num_pages
            mean = self.seconds_per_page
            self.seconds_per_page = seconds if mean is None else mean + _WEIGHT * (seconds - mean)
        self._running.register(sequence)
        sequence.prefix_hit_tokens = 0
        self._forecast.update(sequence)
        return sequence

    def forget(self, sequence: Sequence) -> None:
        """A sequence gives its pages back: nothing is written to them any more."""
        name = self._name_of.pop(sequence, None)
        if name is not None:
            del self._loading[name]
            self.dropped.append(name)

    def source_of(self, name: str) -> str | None:
        """Return the source of a load's pages; None: no sequence waits for it."""
        sequence = self._loading.get(name)
        return None if sequence is None else sequence.source

    def name_of(self, sequence: Sequence) -> str:
        """The name of the load that a sequence waits for."""
        return self._name_of[sequence]

    def _count(self, sequence: Sequence) -> int:
        """Return how many pages a prompt loads next; 0: it computes them, or has none to load."""
        size = self._running.page_size
        if sequence.state is not State.PREFILLING or sequence.available <= sequence.computed:
            return 0
        if sequence.computed % size or sequence.in_flight:
            sequence.available = 0  # it has begun to compute
            return 0
        stop = min(sequence.available, int(min(sequence.reach, sequence.length)))
        if stop < sequence.available:
            stop -= stop % size
        count = self._running.pages_of(stop) - sequence.computed // size
        if count <= 0:
            return 0
        # Of pages of another engine, which may still compute them, only their own source can tell when they will come.
        is_own = sequence.source == TIERS
        seconds = 0.0 if self.seconds_per_page is None or not is_own else count * self.seconds_per_page
        if seconds > self._forecast.time.prefill_seconds(sequence.computed, stop, sequence.tpot_target):
            sequence.available = 0
            return 0
        return count
