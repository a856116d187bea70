"""`Follower`: the engine of a process that follows another; it decides the same from the same updates."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from longctx.serving.distributed.lockstep import Lockstep
from longctx.serving.distributed.orders import Arrival, Cancel, Located, Order, RequestUpdate
from longctx.serving.engine.active_request import ActiveRequests
from longctx.serving.engine.core import Core, run_step
from longctx.serving.engine.input_processor import InputProcessor
from longctx.serving.engine.page_transfers import PageTransfers
from longctx.serving.executor.interface import Executor
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue
from longctx.serving.kv_cache.connector import LocatedSources


class Follower:
    """Driver of a core by the orders of the first process.

    A step ends here when the next one is ordered, since only the first process knows how long it took. Requests are not
    checked: the first process has.
    """

    def __init__(
        self,
        core: Core,
        executor: Executor,
        lockstep: Lockstep,
        input_processor: InputProcessor,
        requests: ActiveRequests,
        pages: PageTransfers,
        turn: Callable[[], AbstractContextManager[None]],
        sources: LocatedSources | None = None,
    ) -> None:
        self._core, self._executor, self._lockstep = core, executor, lockstep
        self._input_processor, self._requests, self._pages = input_processor, requests, pages
        self._turn, self._sources = turn, sources
        self._leases: dict[str, set[str]] = {}  # of requests that come with some, by their ids
        self._ended: EndedStep | None = None
        self._queue = SubmitQueue(executor, lambda: lockstep.now, core.scheduler.plan.stage)

    def run(self) -> None:
        """Follow until the first process ends."""
        for order in self._lockstep.orders():
            with self._turn():
                if order.kind == "warm_up":
                    self._lockstep.warm_up(self._executor)
                else:
                    self._act(order)
        self._end_step(self._lockstep.now, None)

    def _act(self, order: Order) -> None:
        self._end_step(order.now, order.seconds)
        for update in order.updates:
            self._apply(update)
        if order.kind == "step":
            self._lockstep.report_loads(self._executor.poll_loads())
            with self._lockstep.limit("a step"):
                self._ended = run_step(self._core, self._queue, order.now, [self._lockstep])
        if self._sources is not None:
            for request_id in self._leases.keys() - self._requests.keys():
                for lease_id in self._leases.pop(request_id):
                    self._executor.sources.pop(lease_id, None)
                    self._sources.drop(lease_id)

    def _end_step(self, now: float, seconds: float | None) -> None:
        if self._ended is not None:
            step, self._ended = self._ended, None
            self._requests.deliver(self._core.end(step.batch, step.results, now, seconds))

    def _apply(self, update: RequestUpdate) -> None:
        match update:
            case Arrival(request, request_id, now, tokens, available, handoff, resumed):
                if self._sources is not None and handoff is not None:
                    leases = {each.lease for each in handoff.completions if each.lease is not None}
                    self._executor.sources.update({lease_id: self._sources.open(lease_id) for lease_id in leases})
                    self._leases[request_id] = leases
                prompt: Any = tokens
                prepared = self._input_processor.prepare(dataclasses.replace(request, prompt=prompt))
                self._requests.repeat(prepared, request_id, now, available, handoff, resumed)
            case Cancel(request_id):
                self._requests.leave(self._requests[request_id])
            case Located(lease_id, place):
                if self._sources is not None:
                    self._sources.locate(lease_id, place)
            case _:
                self._pages.apply(update)
