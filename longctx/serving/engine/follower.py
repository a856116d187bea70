"""`Follower`: the engine of a process that follows another; it decides the same from the same updates."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from longctx.serving.distributed.lockstep import LoadEnds, Lockstep
from longctx.serving.distributed.orders import Arrival, Located, RequestUpdate, SettleOrder, StepOrder
from longctx.serving.engine.core import Core
from longctx.serving.engine.input_processor import InputProcessor, SequenceMaker
from longctx.serving.engine.page_transfers import PageTransfers
from longctx.serving.engine.steps import OrderedCore
from longctx.serving.executor.interface import Executor
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue
from longctx.serving.kv_cache.connector import LocatedSources
from longctx.serving.scheduler.sequence import Sequence


class Follower:
    """Drives a core by the orders of the first process.

    A step ends here when the next one is ordered, since only the first process knows how long it took.

    Args:
      turn: a context in which an order is carried out, and no other thread's calls.
      pages: of the engine.
      sources: where pages of other engines come from; None: nowhere.
    """

    def __init__(
        self,
        core: Core,
        executor: Executor,
        lockstep: Lockstep,
        input_processor: InputProcessor,
        sequence_maker: SequenceMaker,
        turn: Callable[[], AbstractContextManager[None]],
        pages: PageTransfers,
        sources: LocatedSources | None = None,
    ) -> None:
        self._executor, self._lockstep, self._pages = executor, lockstep, pages
        self._turn, self._sources = turn, sources
        self._leases: dict[str, set[str]] = {}  # of requests that come with some, by their ids
        self._ended: EndedStep | None = None
        self._load_ends = LoadEnds(lockstep.group)
        self._input_processor, self._sequence_maker = input_processor, sequence_maker
        queue = SubmitQueue(executor, lambda: lockstep.now, core.scheduler.plan.stage)
        self._core = OrderedCore(core, queue, self._make, [lockstep])

    def run(self) -> None:
        """Follow until the first process ends."""
        for order in self._lockstep.orders():
            with self._turn():
                if isinstance(order, StepOrder | SettleOrder):
                    self._act(order)
                else:
                    self._lockstep.warm_up(self._executor)
        self._end_step(self._lockstep.now, None)

    def _act(self, order: StepOrder | SettleOrder) -> None:
        self._end_step(order.now, order.seconds)
        for update in order.updates:
            self._apply(update)
        if isinstance(order, StepOrder):
            self._load_ends.report(self._executor.poll_loads())
            with self._lockstep.limit("a step"):
                self._ended = self._core.step(order.now)
        if self._sources is not None:
            for request_id in self._leases.keys() - self._core.open.keys():
                for lease_id in self._leases.pop(request_id):
                    self._executor.sources.pop(lease_id, None)
                    self._sources.drop(lease_id)

    def _end_step(self, now: float, seconds: float | None) -> None:
        if self._ended is not None:
            self._core.end(self._ended, now, seconds)
            self._ended = None

    def _apply(self, update: RequestUpdate) -> None:
        if self._sources is not None and isinstance(update, Located):
            self._sources.locate(*update)
        if self._sources is not None and isinstance(update, Arrival) and update.handoff is not None:
            leases = {each.lease for each in update.handoff.completions if each.lease is not None}
            self._executor.sources.update({lease_id: self._sources.open(lease_id) for lease_id in leases})
            self._leases[update.request_id] = leases
        self._pages.tell_store(update)
        self._core.apply(update)

    def _make(self, arrival: Arrival) -> list[Sequence]:
        prepared = self._input_processor.prepare(arrival.request)
        seed = None if arrival.handoff is None else arrival.handoff.seed
        return self._sequence_maker.make(prepared, arrival.request_id, arrival.now, seed)
