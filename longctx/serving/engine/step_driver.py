"""What runs an engine's steps, and what is done between them, by whichever thread."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from longctx.serving.config import EngineConfig
from longctx.serving.distributed.lockstep import Lockstep
from longctx.serving.engine.core import Core
from longctx.serving.engine.input_processor import InputProcessor, SequenceMaker
from longctx.serving.engine.jobs import Job, Jobs
from longctx.serving.engine.journal import Journal
from longctx.serving.engine.monitor import Monitor, StepMonitor
from longctx.serving.engine.page_traffic import PageTraffic
from longctx.serving.engine.run_step import run_step
from longctx.serving.engine.step_lock import Interrupts, StepLock
from longctx.serving.engine.updates import Updates
from longctx.serving.executor.interface import Executor, Progress, ignore_progress
from longctx.serving.executor.submit_queue import SubmitQueue
from longctx.serving.kv_cache.connector import PageKeeper
from longctx.serving.recording.recorder import Recorder
from longctx.serving.request.output import Event
from longctx.serving.request.request import Request


class StepDriver:
    """Drives a core, one thread at a time; an engine is one, and adds the calls that its users make.

    Args:
      store: keeps pages beyond the devices.

    Attributes:
      core: what decides.
      pages: see `PageTraffic`.
    """

    config: EngineConfig
    core: Core
    input_processor: InputProcessor
    _lockstep: Lockstep
    _sequence_maker: SequenceMaker

    def __init__(
        self,
        executor: Executor,
        clock: Callable[[], float],
        recorder: Recorder | None,
        monitor: StepMonitor | None,
        store: PageKeeper | None,
    ) -> None:
        self._executor, self._clock = executor, clock
        self._queue = SubmitQueue(executor, clock, self.core.scheduler.plan.stage)
        self._journals: list[Journal] = [self._lockstep] if recorder is None else [recorder, self._lockstep]
        self._jobs = Jobs()
        self._updates = Updates()
        self._events: deque[Event] = deque()  # of requests that no stream waits for
        self._monitor = Monitor(monitor)
        self._step_lock = StepLock()
        self._error: BaseException | None = None
        self._is_warm = False
        self._is_idle = False  # whether the last step had nothing to begin
        self.pages = PageTraffic(
            self.core,
            executor,
            store,
            self._journals,
            lambda call: self._update(lambda _: call(), [None]),
            clock,
            self._lockstep,
            self.config.verify_share,
            self._begin_own,
            self._leave,
        )

    def now(self) -> float:
        """Seconds of the engine's clock."""
        return self._clock()

    # Updates between steps.

    def _update(self, update: Callable[[Any], object], arguments: list[Any]) -> None:
        """Make a call with each of some arguments now, or else as soon as no step runs."""
        self._updates.add(update, arguments)
        self._apply_updates()

    def _apply_updates(self) -> None:
        with Interrupts(), self._step_lock.held_if_free() as held:
            if held:
                self._apply_updates_locked()

    def _apply_updates_locked(self) -> None:
        with self._failing():
            while self._updates and self._error is None:
                self._updates.run_next()
            self._settle()

    def _settle(self) -> None:
        """Let other processes have what this one has, where no step is to follow but pages may be asked for."""
        if self._is_warm and self.core.leases and not self._jobs and self._error is None:
            self._lockstep.settle(self._clock())

    @contextlib.contextmanager
    def _following(self) -> Iterator[None]:
        """Keep other threads waiting, whose updates are made at the end."""
        with self._step_lock.turn("follow"), self._step_lock.held():
            yield
            self._apply_updates_locked()
        while self._updates and self._error is None:  # they came since then, and found the lock taken
            self._apply_updates()

    def _enter(self, job: Job) -> None:
        """Let a request wait for its first step."""
        if job.sequences:
            return  # it was cancelled before
        self.pages.verifier.give_way()
        handoff = job.handoff
        seed = None if handoff is None else handoff.seed
        job.sequences = self._sequence_maker.make(job.prepared, job.request_id, job.arrival, seed)
        self.pages.look_up(job.sequences)
        request, tokens = job.prepared.request, job.prepared.tokens
        for journal in self._journals:
            journal.note_arrival(request, tokens, job.request_id, job.arrival, job.sequences)
        if handoff is None:
            self.core.add(job.sequences)
        else:
            now = self._clock()
            self._lockstep.note_resumed(handoff, now)
            self._executor.sources.update(job.sources)
            self._deliver(self.core.resume(job.sequences, handoff, now))

    def _begin_own(self, request: Request) -> Job:
        """Let a request of the engine's own enter, between steps."""
        jobs: list[Job] = []
        self._jobs.claim([self.input_processor.prepare(request)], self._clock(), deque(), jobs)
        self._enter(jobs[0])
        return jobs[0]

    def _leave(self, job: Job, lease: str | None = None) -> None:
        """End what has not ended of a request; with `lease`, for another engine."""
        self._enter(job)
        if job.open:
            for sequence in job.sequences:
                self._deliver(self.core.cancel(sequence) if lease is None else self.core.hand_off(sequence, lease))
            now = self._clock()
            for journal in self._journals:
                journal.note_cancel(job.request_id, now, lease)

    # Steps.

    def _take_turn(self, call: str, events: deque[Event] | None) -> None:
        """Run a step, and tell the monitor; nothing if there are events by the time that it is this thread's turn."""
        with Interrupts() as interrupts, self._step_lock.turn(call):
            with self._step_lock.held(interrupts):
                if not events:
                    self._step()
            self._monitor.catch_up()

    def _step(self) -> None:
        self._check_alive()
        self._apply_updates_locked()
        if not (self._is_warm or self._lockstep.is_alone):
            self._warm_up()
        now = self._clock()
        with self._failing(), self._lockstep.limit("a step"):
            self.pages.poll(now, self._is_idle)
            self.pages.verifier.poll(not self._jobs)
            for journal in self._journals:
                journal.note_step(now)
            step = run_step(self.core, self._queue, now, self._journals)
            events: list[Event] = []
            self._is_idle = step is None
            if step is not None:
                self._monitor.note(step)
                events = self.core.end(step.batch, step.results, step.finished, step.seconds)
                self._deliver(events)
            for journal in self._journals:
                journal.note_end(step, events)
            self._settle()

    def _drain(self, message: str) -> None:
        """Run steps until none is in flight; RuntimeError with the number of requests, if there are some."""
        with Interrupts():
            self._check_alive()
            self._apply_updates_locked()
            self.pages.verifier.give_way()
            if self._jobs:
                raise RuntimeError(message.format(len(self._jobs)))
            while self._queue:
                self._step()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            job = self._jobs[event.request_id]
            job.deliver(event)
            if not job.open:
                del self._jobs[event.request_id]
                for lease, source in job.sources.items():
                    self._executor.sources.pop(lease, None)
                    source.release()

    def _prepare(self, name: str, prepare: Callable[[Progress], None], progress: Progress) -> None:
        with self._step_lock.turn(name):
            with self._step_lock.held():
                self._drain(f"{name} must be called before requests, and {{}} have not ended")
                prepare(progress)
            self._monitor.catch_up()

    def _compile(self, progress: Progress) -> None:
        with Interrupts.allowed():
            self._executor.compile(progress)  # an interrupt here breaks nothing

    def _warm_up(self, progress: Progress = ignore_progress) -> None:
        alone = self._lockstep.is_alone
        if alone:
            self._compile(progress)
        with Interrupts() if alone else Interrupts.allowed(), self._failing():
            if alone:
                self._executor.warm_up()
            else:
                self._lockstep.send_warm_up()
                self._lockstep.warm_up(self._executor, progress)
            self._is_warm = True

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """An error inside is the end of the engine, in all processes, and of all requests."""
        try:
            yield
        except BaseException as error:
            self._error, cause = error, f"{type(error).__name__}: {error}"
            try:
                for job in list(self._jobs.values()):
                    job.sequences = job.sequences or self._sequence_maker.make(
                        job.prepared, job.request_id, job.arrival
                    )
                    for index in sorted(job.open):
                        self._deliver([self.core.abort(job.sequences[index], f"a step failed: {cause}")])
            finally:
                for journal in self._journals:
                    journal.note_failure(cause)
            raise

    def _check_alive(self) -> None:
        if self._error is not None:
            raise RuntimeError("the engine has failed, and its requests with it") from self._error
        if not self._lockstep.leads:
            raise RuntimeError(
                f"process {self._lockstep.group.process_id} follows process 0, which takes requests: follow()"
            )
