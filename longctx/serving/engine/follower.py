"""The engine of a process that follows another: it decides the same, on the same news, at the same time."""

import time

from longctx.serving.distributed.load_ends import LoadEnds
from longctx.serving.distributed.lockstep import Lockstep
from longctx.serving.distributed.orders import Arrival, Forget, Pin, StepOrder
from longctx.serving.engine.core import Core
from longctx.serving.engine.input_processor import InputProcessor, SequenceMaker
from longctx.serving.engine.ordered_core import OrderedCore
from longctx.serving.executor.interface import Executor
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue
from longctx.serving.kv_cache.connector import PageKeeper
from longctx.serving.scheduler.sequence import Sequence


class Follower:
    """Drives a core by the orders of the first process.

    A step ends here when the next one is ordered, since only the first process knows how long it took.
    """

    def __init__(
        self,
        core: Core,
        executor: Executor,
        lockstep: Lockstep,
        input_processor: InputProcessor,
        sequence_maker: SequenceMaker,
        store: PageKeeper | None = None,
    ) -> None:
        self._executor, self._lockstep, self._store = executor, lockstep, store
        self._load_ends = LoadEnds(lockstep.group)
        self._input_processor, self._sequence_maker = input_processor, sequence_maker
        queue = SubmitQueue(executor, lambda: lockstep.now, core.scheduler.plan.stage)
        self._core = OrderedCore(core, queue, self._make, [lockstep])

    def run(self) -> None:
        """Until the first process ends."""
        ended: EndedStep | None = None
        for order in self._lockstep.orders():
            if not isinstance(order, StepOrder):
                self._lockstep.warm_up(self._executor)
                continue
            if ended is not None:
                self._core.end(ended, order.now, order.seconds)
            for news in order.updates:
                if not isinstance(news, Pin):
                    self._core.hear(news)
                if isinstance(news, Forget | Pin) and self._store is not None:
                    self._tell_store(self._store, news)
            self._load_ends.report(self._executor.poll_loads())
            with self._lockstep.limit("a step"):
                ended = self._core.step(order.now)
        if ended is not None:
            self._core.end(ended, self._lockstep.now, None)

    def _tell_store(self, store: PageKeeper, news: Forget | Pin) -> None:
        if isinstance(news, Pin):
            store.pin(news.keys, time.monotonic() + news.seconds)
        else:
            for key in news.keys:
                store.forget(key)

    def _make(self, arrival: Arrival) -> list[Sequence]:
        prepared = self._input_processor.prepare(arrival.request)
        return self._sequence_maker.make(prepared, arrival.request_id, arrival.now)
