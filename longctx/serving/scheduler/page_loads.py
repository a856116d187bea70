"""Prompts that wait for pages from beyond the devices, instead of computing them.

What is available there is a hint, of when a request came: a load that comes short costs time, and the rest of it is
computed. A load ends in wall time, and never blocks a step: its sequence has slot and pages meanwhile, and no rows.

Source: Mooncake, section 3 (KVCache reuse), and 5.2 (when loading pays).
"""

from longctx.serving.kv_cache.connector import TIERS, Loaded, PageLoad
from longctx.serving.scheduler.batch import Batch, TableRun
from longctx.serving.scheduler.forecast import Forecast
from longctx.serving.scheduler.running import Running
from longctx.serving.scheduler.sequence import Sequence, State

_WEIGHT = 0.25  # of the last load in the mean seconds of a page


class PageLoads:
    """Begins and ends the loads of running prompts.

    Attributes:
      dropped: sequences whose loads are no longer wanted, since the last batch.
      missed: pages that loads did not bring, from tiers and from other engines (`"transfers"`).
      seconds_per_page: of the last loads from the engine's own tiers, in the mean; None: there was none.
    """

    def __init__(self, running: Running, forecast: Forecast) -> None:
        self._running, self._forecast = running, forecast
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
            new = len(sequence.pages)
            if pages := self._running.extend(sequence, tokens):
                batch.tables.append(TableRun(sequence.slot, new, pages))
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
            batch.loads.append(PageLoad(name, keys, sequence.pages[first : first + count], sequence.source))

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
        if seconds > self._forecast.prefill_seconds(sequence.computed, stop, sequence.tpot_target):
            sequence.available = 0
            return 0
        return count
