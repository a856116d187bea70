"""Pages that leave an engine and arrive, between its steps: ends of loads, leases, and reads by other engines."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from longctx.serving.distributed.lockstep import Lockstep
from longctx.serving.distributed.orders import Evict, LoadEnd, Located, Pin, Release, RequestUpdate
from longctx.serving.engine.core import Core
from longctx.serving.executor.interface import Executor, MoverStats
from longctx.serving.kv_cache.connector import TIERS, Loaded, PageBlock, PageKeeper, PageRead
from longctx.serving.kv_cache.leases import LeasedPages, LeaseGone
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.request.request import PreparedRequest
from longctx.serving.scheduler.sequence import Sequence

LEASE_SECONDS = 60.0
"""Seconds for which a lease is kept after the last call that asked for it."""
PRESSED_SECONDS = 5.0
"""The same, while a sequence waits for memory."""
MOST_LEASED = 0.5
"""The share of all pages that leases may have while a sequence waits for memory: the oldest ones go that were not asked
for within `LEAST_SECONDS`, of tenants that have more than an equal part of it."""
LEAST_SECONDS = 1.0

_TELL_SECONDS = 0.5  # after which a process tells the first one again that a lease is asked for
_LOAD_WAIT = 0.02  # seconds that a step waits for pages where nothing else can be done
_READ_TIMEOUT = 60.0  # seconds: no step takes as long


class PageTransfers:
    """Pages of an engine beyond its devices.

    Its calls for leases may come from any thread, and wait for no step; all others come between steps.

    Args:
      store: keeps pages beyond the devices; None: nothing does.
      note: records an update.
      between_steps: makes a call now, or as soon as no step runs.
      clock: seconds, by which leases expire.
      lockstep: of the processes of the engine.

    Attributes:
      on_load: are called with each load that has ended, between steps.
      on_fetch: likewise, with the source of each load from another engine, first when it has ended in this process, and
        then, with True, when it has in all.
    """

    def __init__(
        self,
        core: Core,
        executor: Executor,
        store: PageKeeper | None,
        note: Callable[[RequestUpdate], object],
        between_steps: Callable[[Callable[[], object]], object],
        clock: Callable[[], float],
        lockstep: Lockstep,
    ) -> None:
        self.store, self._lockstep = store, lockstep
        self._core, self._executor, self._note = core, executor, note
        self._between_steps, self._clock = between_steps, clock
        self.on_load: list[Callable[[Loaded], object]] = []
        self.on_fetch: list[Callable[[str, bool], object]] = []
        self.on_evict: list[Callable[[], object]] = []  # called between steps, after `evict`
        self._asked: dict[str, float] = {}  # when a lease was asked for last
        self._told: dict[str, float] = {}  # when process 0 was told last that one is asked for here

    @property
    def moved(self) -> MoverStats | None:
        """Counts of pages moved from and to this process's devices; None where none can be moved."""
        mover = getattr(self._executor, "mover", None)  # executors without devices have none
        return None if mover is None else mover.stats

    @property
    def recomputed(self) -> dict[str, int]:
        """Pages that loads did not bring: of `"tiers"`, and of `"transfers"` from other engines."""
        return self._core.scheduler.loads.missed

    # Between steps.

    def look_up(self, sequences: list[Sequence]) -> None:
        """Note how much of the prompt of a request, which is about to be added, can be loaded."""
        if self.store is not None:
            self._core.look_up(sequences, self.store)

    def ask_ahead(self, prompts: Iterable[PreparedRequest]) -> "list[Future[None]]":
        """Ask slow stores what they have of prompts that are about to enter; answers to wait for, `LOOKUP_TIMEOUT`."""
        asked, scheduler = [], self._core.scheduler
        for prepared in prompts if self.store is not None else ():
            assert self.store is not None
            keys = prepared.shared_keys
            found = scheduler.count_cached(keys) // scheduler.running.page_size
            answered = self.store.ask_ahead(keys[found:])
            if answered is not None:
                asked.append(answered)
        return asked

    def poll(self, now: float, may_wait: bool) -> None:
        """Let sequences go on whose loads have ended, and unused leases expire."""
        ended = self._executor.poll_loads(_LOAD_WAIT if may_wait else 0.0)
        self._note_fetched(ended, False)
        complete = self._lockstep.complete_loads(ended, self._core.scheduler.loads)
        self._note_fetched(complete, True)
        for loaded in complete:
            self._do(LoadEnd(loaded))
            for call in self.on_load:
                call(loaded)
        if self._core.leases or self._asked:
            self._expire(now)

    def _note_fetched(self, ended: Iterable[Loaded], is_everywhere: bool) -> None:
        for loaded in ended:
            source = self._core.scheduler.loads.source_of(loaded.name)
            if source not in (None, TIERS):
                for call in self.on_fetch:
                    call(source, is_everywhere)

    def apply(self, update: RequestUpdate) -> None:
        """Let pages go on or leave as an update says."""
        match update:
            case LoadEnd(loaded):
                self._core.end_load(loaded)
            case Release(lease_id):
                self._core.leases.release(lease_id)
            case Pin(keys, seconds) if self.store is not None:
                self.store.pin(keys, time.monotonic() + seconds)
            case Evict("device", keys):
                self._core.pool.evict(frozenset(keys).__contains__)
            case Evict("host", keys) if isinstance(self.store, TieredStore):
                self.store.evict(frozenset(keys).__contains__)

    def _do(self, update: RequestUpdate) -> None:
        self._note(update)
        self.apply(update)

    def _expire(self, now: float) -> None:
        leases, pool = self._core.leases, self._core.pool
        self._asked |= dict.fromkeys(self._lockstep.take_asked(), now)
        for lease_id in tuple(self._asked):  # other threads add to them meanwhile
            if lease_id not in leases:
                self._asked.pop(lease_id, None)
        limit = PRESSED_SECONDS if self._core.lacks_room else LEASE_SECONDS
        for lease_id in leases.over():  # the oldest first
            idle = now - self._asked.setdefault(lease_id, now)
            is_too_much = self._core.lacks_room and leases.exceed(MOST_LEASED * pool.num_pages, lease_id)
            if idle > (LEAST_SECONDS if is_too_much else limit):
                self._release(lease_id)

    def _release(self, lease_id: str) -> None:
        lease = self._core.leases.get(lease_id)
        if lease is not None and lease.is_wanted:
            self._do(Release(lease_id))

    def close(self) -> None:
        """Let what keeps pages beyond the devices write what waits, and end it: no step follows."""
        if self.store is not None:
            self.store.close()

    # From any thread.

    def lease(self, lease_id: str) -> LeasedPages:
        """Return the pages of a lease, as far as they are there, or raise LeaseGone. Asking keeps it alive."""
        lease = self._core.leases.get(lease_id)
        if lease is None:
            raise LeaseGone(f"lease {lease_id} is unknown, or has ended")
        if self._lockstep.leads:
            self._asked[lease_id] = self._clock()
        elif time.monotonic() > self._told.get(lease_id, 0.0) + _TELL_SECONDS:
            self._told = {other: told for other, told in tuple(self._told.items()) if other in self._core.leases}
            self._told[lease_id] = time.monotonic()
            self._lockstep.report_asked(lease_id)
        return lease

    def read(self, lease_id: str, first: int, stop: int, layers: tuple[int, int]) -> PageRead:
        """Begin to read pages `first` to `stop` of a lease, which are complete, of these layers at least."""
        self.lease(lease_id)
        read = _LaterRead()
        self._between_steps(lambda: self._begin_read(read, lease_id, first, stop, layers))
        return read

    def expire(self) -> None:
        """End the leases that were not asked for in time; steps do so too."""
        if self._core.leases:
            self._between_steps(lambda: self._expire(self._clock()))

    def release(self, lease_id: str) -> None:
        """Give up a lease; one that has ended is no error. In processes but the first this does nothing."""
        if self._lockstep.leads:
            self._between_steps(lambda: self._release(lease_id))

    def locate(self, lease_id: str, place: dict[str, Any] | None) -> None:
        """Tell the other processes, with the next step, where they fetch the pages of a lease, see `Located`."""
        self._lockstep.note(Located(lease_id, place))

    def pin(self, keys: list[Key], seconds: float) -> None:
        """Let tiers keep pages for some seconds, those too that they get meanwhile; 0: let them go in their turn."""
        self._between_steps(lambda: self._do(Pin(keys, seconds)))

    def evict(self, tier: str, is_wanted: Callable[[Key], bool]) -> "Future[int]":
        """Let unused pages with wanted keys leave the devices or the host's memory.

        Slower tiers keep those that they have. The future ends, between steps, with how many they were.

        Args:
          tier: `"device"` or `"host"`.
        """
        done: Future[int] = Future()
        found: list[Key] = []

        def is_evicted(key: Key) -> bool:
            if is_here := is_wanted(key):
                found.append(key)
            return is_here

        def evict() -> None:
            if tier == "device":
                evicted = self._core.pool.evict(is_evicted)
            else:
                evicted = self.store.evict(is_evicted) if isinstance(self.store, TieredStore) else 0
            self._lockstep.note(Evict(tier, found))
            for call in self.on_evict:
                call()
            done.set_result(evicted)

        self._between_steps(evict)
        return done

    def _begin_read(self, read: "_LaterRead", lease_id: str, first: int, stop: int, layers: tuple[int, int]) -> None:
        lease = self._core.leases.get(lease_id)
        if lease is None or stop > len(lease.pages):  # it has ended, or its sequence was preempted
            read.begun.set_exception(LeaseGone(f"the pages of lease {lease_id} are not there any more"))
        else:
            windows = lease.windows[first:stop] if self._core.pool.windows is not None else None
            read.begun.set_result(self._executor.read_pages(lease.pages[first:stop], layers, windows))


class _LaterRead:
    """Read that begins between steps."""

    def __init__(self) -> None:
        self.begun: Future[Any] = Future()

    def result(self) -> list[PageBlock]:
        blocks: list[PageBlock] = self.begun.result(_READ_TIMEOUT).result()
        return blocks
