"""The engine of a process that follows another: it decides the same, on the same news, at the same time."""

from collections import deque

from longctx.serving.distributed.lockstep import Arrival, Lockstep, RequestUpdate, StepOrder
from longctx.serving.engine.core import Core
from longctx.serving.engine.input_processor import InputProcessor, SequenceMaker
from longctx.serving.engine.jobs import Job
from longctx.serving.engine.run_step import run_step
from longctx.serving.executor.interface import Executor
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue


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
    ) -> None:
        self._core, self._executor, self._lockstep = core, executor, lockstep
        self._input_processor, self._sequence_maker = input_processor, sequence_maker
        self._queue = SubmitQueue(executor, lambda: lockstep.now, core.scheduler.plan.stage)
        self._jobs: dict[str, Job] = {}

    def run(self) -> None:
        """Until the first process ends."""
        ended: EndedStep | None = None
        for order in self._lockstep.orders():
            if not isinstance(order, StepOrder):
                self._lockstep.warm_up(self._executor)
                continue
            if ended is not None:
                self._end(ended, order.now, order.seconds)
            for news in order.updates:
                self._hear(news)
            with self._lockstep.limit("a step"):
                ended = run_step(self._core, self._queue, order.now, self._lockstep)
        if ended is not None:
            self._end(ended, self._lockstep.now, None)

    def _end(self, step: EndedStep, now: float, seconds: float | None) -> None:
        for event in self._core.end(step.batch, step.results, now, seconds):
            job = self._jobs[event.request_id]
            job.deliver(event)
            if not job.open:
                del self._jobs[event.request_id]

    def _hear(self, news: RequestUpdate) -> None:
        if isinstance(news, Arrival):
            prepared = self._input_processor.prepare(news.request)
            sequences = self._sequence_maker.make(prepared, news.request_id, news.now)
            # Nobody reads its events.
            self._jobs[news.request_id] = Job(news.request_id, prepared, news.now, deque(maxlen=0), sequences)
            self._core.add(sequences)
        else:
            for sequence in self._jobs.pop(news.request_id).sequences:
                self._core.cancel(sequence)
