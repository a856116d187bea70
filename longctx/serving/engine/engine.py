"""The engine of a program: requests in, tokens out. Whoever waits for tokens runs the steps."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List

from jax.sharding import Mesh

from longctx.models import Llama, Tokenizer
from longctx.models.params import Params
from longctx.serving.config import EngineConfig
from longctx.serving.distributed.lockstep import Lockstep
from longctx.serving.distributed.process_group import ProcessGroup
from longctx.serving.engine.follower import Follower
from longctx.serving.engine.metrics import EngineStats, StepMetrics
from longctx.serving.engine.resolve import resolve
from longctx.serving.engine.run_step import run_step
from longctx.serving.engine.stream import Job, TokenStream
from longctx.serving.executor.interface import Executor
from longctx.serving.executor.submit_queue import SubmitQueue
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.request.output import Event, Output
from longctx.serving.request.request import PreparedRequest, Prompt, Request, read_requests
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.slo import check_possible


class Engine:
    """Serves a model, on one device or many. Any thread may call any method.

    Args:
      model, params: as from `load_checkpoint`.
      config: sizes and rules, see `EngineConfig`.
      mesh: of the axes stage, context and tensor, as from `make_mesh`. None: the first devices that the plan needs, or
        where the parameters are.
      tokenizer: needed for prompts that are text, for text in outputs, and for stop strings.
      executor: runs the batches instead of the device, for tests; `params` may then be None.
      clock: seconds; what metrics and policies go by.
      predictor: of this engine's batches, see `longctx.serving.profiler`. None: a roofline of the device. Either is
        corrected by a factor as batches run.
      monitor: is called with the `StepMetrics` of every step that has ended, after its results are taken and outside of
        the engine's lock: it may call the engine.
      plan: how the engine is spread over devices, see `ParallelPlan`. None: as the mesh says, pages growing.
      process_group: the processes that run the engine together, each with the same arguments, as from
        `longctx.serving.distributed.initialize`. The first one's engine takes requests; the others `follow`.

    Raises:
      ValueError: sizes that contradict the model or the memory, a plan that doesn't fit the model, the mesh or the
        devices, a predictor that knows no step of `token_budget` rows, processes with different arguments.

    An exception within a step, an interrupt from the keyboard too, leaves the device in an unknown state: every request
    ends with a last event (`finish_reason="error"`), and from then on every call raises RuntimeError.
    """

    def __init__(
        self,
        model: Llama,
        params: Params | None,
        config: EngineConfig | None = None,
        mesh: Mesh | None = None,
        tokenizer: Tokenizer | None = None,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        predictor: Predictor | None = None,
        monitor: Callable[[StepMetrics], object] | None = None,
        plan: ParallelPlan | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._lockstep = Lockstep(process_group or ProcessGroup.alone())
        resolved = resolve(model, params, config, mesh, plan, tokenizer, predictor, process_group)
        executor = executor or resolved.make_executor(params)
        if not self._lockstep.leads:
            clock = lambda: self._lockstep.now  # noqa: E731
        self._resolved, self._executor, self._clock = resolved, executor, clock
        self.config, self.plan, self.mesh = resolved.config, resolved.plan, resolved.mesh
        self.model, self.tokenizer = model, tokenizer
        self.max_length, self.num_pages = resolved.max_length, resolved.num_pages
        self.core, self.input_processor, self._sequence_maker = resolved.make_core()
        self.scheduler, self.predictor = self.core.scheduler, self.core.scheduler.chunker.predictor
        self._queue = SubmitQueue(executor, clock, self.plan.stage)
        self._seconds: float | None = None  # that the last step took, for the other processes
        self._jobs: dict[str, Job] = {}
        self._abandoned: deque[list[Job]] = deque()  # by streams that are gone; to be cancelled
        self._events: deque[Event] = deque()  # of requests that no stream waits for
        self._ended_steps: deque[StepMetrics] = deque()  # that the monitor has yet to be called with
        self._monitor, self._monitoring = monitor, threading.Lock()
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._num_ids = 0
        self._is_warm = self._is_lent = False

    # One call for all.

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | List[SamplingParams] | None = None,
        progress: Callable[[Event], object] | None = None,
    ) -> list[Output]:
        """Continue all prompts, batched together; the outputs in their order (n of them for a request with n > 1).

        Args:
          prompts: texts, lists of token ids, or `Request`s, which bring their own sampling.
          sampling: for all prompts, or one each; None is greedy, 16 tokens.
          progress: is called with every event.

        Raises:
          TypeError, ValueError: a prompt can't be served. None of them is begun then.
          RuntimeError: the engine has failed.
        """
        stream = self._begin(read_requests(prompts, sampling))
        outputs: dict[tuple[str, int], Output] = {}
        try:
            for event in stream:
                if progress is not None:
                    progress(event)
                if event.output is not None:
                    outputs[event.request_id, event.index] = event.output
        finally:
            stream.close()
        if any(output.finish_reason == "error" for output in outputs.values()):
            self._check_alive()
        return [outputs[job.request_id, n] for job in stream.jobs for n in range(len(job.sequences))]

    def stream(
        self, prompts: Prompt | Iterable[Prompt], sampling: SamplingParams | List[SamplingParams] | None = None
    ) -> TokenStream:
        """The same, but every token as it comes. Closing or dropping the stream cancels what has not ended."""
        return self._begin(read_requests(prompts, sampling))

    def warm_up(self) -> None:
        """Compile every program that serving needs; nothing is compiled after it.

        Raises:
          RuntimeError: requests have not ended: warming up writes to their slots.
        """
        with self._lock:
            self._check_alive()
            self._cancel_abandoned()
            if self._jobs:
                raise RuntimeError(f"warm_up must be called before requests, and {len(self._jobs)} have not ended")
            while self._queue:
                self._step()
            self._warm_up()
        self._call_monitor()

    def follow(self) -> None:
        """Do what the first process's engine does, until its process group is closed there.

        Raises:
          RuntimeError: this is the first process, or there is no other.
        """
        if self._lockstep.leads:
            raise RuntimeError("follow is for engines of a process group, in all processes but the first")
        with self._failing():
            Follower(self.core, self._executor, self._lockstep, self.input_processor, self._sequence_maker).run()

    @contextlib.contextmanager
    def lend_executor(self) -> Iterator[Executor]:
        """The executor, to measure it: `longctx.serving.profiler`. The cache forgets what it holds.

        Raises:
          RuntimeError: requests have not ended, or other processes take part.
        """
        with self._lock:
            self._check_alive()
            if not self._lockstep.is_alone:
                raise RuntimeError("an engine is measured in one process alone")
            self._cancel_abandoned()
            while self._queue:
                self._step()
            if self._jobs:
                raise RuntimeError(f"an engine is measured while it serves nobody: {len(self._jobs)} have not ended")
            self.core.pool.clear()
            self._error, self._is_lent = RuntimeError("its executor is lent"), True  # until it comes back
            try:
                yield self._executor
            except BaseException as error:
                self._error, self._is_lent = error, False
                raise
            self._error, self._is_lent = None, False
        self._call_monitor()

    # Piece by piece.

    def prepare(self, request: Request) -> PreparedRequest:
        """Check a request, tokenise and hash its prompt: what `submit` does first, outside of the engine's lock.

        Raises:
          TypeError, ValueError: what it asks for can't be done; the message names the argument.
        """
        return self.input_processor.prepare(request)

    def submit(self, request: Request | PreparedRequest) -> str:
        """Begin a request; its id. `step` returns its events.

        Raises:
          TypeError, ValueError: it can't be served.
        """
        arrival = self._clock()  # before the wait for the lock
        prepared = request if isinstance(request, PreparedRequest) else self.prepare(request)
        with self._lock:
            (job,) = self._enter([prepared], arrival, self._events)
        return job.request_id

    def cancel(self, request_id: str) -> bool:
        """End a request wherever it is; its last events say `"cancelled"`. False if it is unknown or has ended."""
        with self._lock:
            self._check_alive()
            job = self._jobs.get(request_id)
            if job is not None:
                self.cancel_job(job)
            return job is not None

    def cancel_job(self, job: Job) -> None:
        """End what has not ended of it."""
        with self._lock:
            if self._error is None and job.open:
                for sequence in job.sequences:
                    self._deliver(self.core.cancel(sequence))
                self._lockstep.note_cancel(job.request_id)

    def abandon(self, jobs: list[Job]) -> None:
        """`cancel_job` some, later: this is safe in a finaliser, which may run in the midst of anything."""
        self._abandoned.append(jobs)

    def step(self) -> list[Event]:
        """Begin what can be, wait for the oldest in-flight batch; returns the events of submitted requests.

        After a failure it returns the last events of requests that the failure ended, once.
        """
        if self._error is None or not self._events:
            with self._lock:
                self._step()
            self._call_monitor()
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    def advance(self, events: deque[Event]) -> None:
        """A step, unless there are events by now."""
        with self._lock:
            if not events:
                self._step()
        self._call_monitor()

    def progress(self, request_id: str) -> tuple[int, int]:
        """How many tokens of a request's prompt are computed, found in the cache or planned, and how many it has.

        Raises:
          KeyError: no such request, or it has ended.
        """
        with self._lock:
            sequence = self._jobs[request_id].sequences[0]
            return min(sequence.computed, sequence.prompt_length), sequence.prompt_length

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended, or some event has not been returned by `step`.

        Raises:
          RuntimeError: the engine has failed, and the last events of its requests have been returned.
        """
        with self._lock:
            if self._error is not None and not self._events:
                self._check_alive()
            self._cancel_abandoned()
            return bool(self._jobs or self._events)

    def stats(self) -> EngineStats:
        with self._lock:
            return self.core.stats()

    # Requests.

    def _begin(self, requests: List[Request]) -> TokenStream:
        """Begin all or none."""
        arrival = self._clock()  # before the wait for the lock
        prepared = []
        for i, request in enumerate(requests):
            with _naming(f"prompts[{i}]"):
                prepared.append(self.prepare(request))
        events: deque[Event] = deque()
        with self._lock:
            return TokenStream(self, self._enter(prepared, arrival, events), events)

    def _enter(self, requests: List[PreparedRequest], arrival: float, events: deque[Event]) -> list[Job]:
        """Let requests wait, all or none of them."""
        jobs = []
        for prepared, request_id in zip(requests, self._check_new(requests), strict=True):
            self._lockstep.note_arrival(prepared.request, prepared.tokens, request_id, arrival)
            job = Job(request_id, self._sequence_maker.make(prepared, request_id, arrival), events)
            self._jobs[request_id] = job
            self.core.add(job.sequences)
            jobs.append(job)
        return jobs

    def _check_new(self, requests: List[PreparedRequest]) -> list[str]:
        """Check that all of them can be served; their ids, those that are missing chosen apart from all others."""
        self._check_alive()
        ids = set(self._jobs)
        for i, (request, tokens, keys, prepared_for) in enumerate(requests):
            with _naming(f"prompts[{i}]" if len(requests) > 1 else None):
                if prepared_for != self.input_processor.fingerprint:
                    raise ValueError(
                        "request must be prepared for this engine, and was for another: see Engine.prepare"
                    )
                params = request.sampling
                self.scheduler.check(len(tokens), params.max_tokens, params.n)
                if self._resolved.is_profiled:
                    cached = self.scheduler.count_cached(keys) if params.prompt_logprobs is None else 0
                    rows = self.scheduler.chunker.chunking.tokens
                    check_possible(request, cached, len(tokens), rows, self.predictor.predictor)
                if request.request_id in ids:
                    raise ValueError(f"request_id must be unique, and {request.request_id!r} has not ended yet")
                if request.request_id is not None:
                    ids.add(request.request_id)
        return [self._choose_id(ids) if x.request.request_id is None else x.request.request_id for x in requests]

    def _choose_id(self, taken: set[str]) -> str:
        while (request_id := f"request-{self._num_ids}") in taken:
            self._num_ids += 1
        self._num_ids += 1
        return request_id

    def _cancel_abandoned(self) -> None:
        while self._abandoned:
            for job in self._abandoned.popleft():
                self.cancel_job(job)

    # Steps.

    def _step(self) -> None:
        self._check_alive()
        self._cancel_abandoned()
        if not (self._is_warm or self._lockstep.is_alone):
            self._warm_up()
        now = self._clock()
        with self._failing(), self._lockstep.limit("a step"):
            self._lockstep.send_step(now, self._seconds)
            self._seconds = None
            step = run_step(self.core, self._queue, now, self._lockstep)
            if step is not None:
                if self._monitor is not None:
                    self._ended_steps.append(StepMetrics.of(step))
                self._seconds = step.seconds
                self._deliver(self.core.end(step.batch, step.results, step.finished, step.seconds))

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            job = self._jobs[event.request_id]
            job.deliver(event)
            if not job.open:
                del self._jobs[event.request_id]

    def _warm_up(self) -> None:
        with self._failing():
            self._lockstep.send_warm_up()
            self._lockstep.warm_up(self._executor)
            self._is_warm = True

    def _call_monitor(self) -> None:
        """Tell of steps that have ended, in order. Whoever comes while another thread does leaves it to that one."""
        while self._ended_steps and self._monitoring.acquire(blocking=False):
            try:
                while self._ended_steps:
                    step = self._ended_steps.popleft()
                    if self._monitor is not None:
                        self._monitor(step)
            finally:
                self._monitoring.release()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """An error inside is the end of the engine, in all processes, and of all requests."""
        try:
            yield
        except BaseException as error:
            self._error = error
            try:
                for job in list(self._jobs.values()):
                    for index in sorted(job.open):
                        self._deliver([self.core.fail(job.sequences[index])])
            finally:
                self._lockstep.group.fail(f"{type(error).__name__}: {error}")
            raise

    def _check_alive(self) -> None:
        if self._error is not None:
            if self._is_lent:
                raise RuntimeError("the engine's executor is lent, to be measured: wait until that has ended")
            raise RuntimeError("the engine has failed, and its requests with it") from self._error
        if not self._lockstep.leads:
            raise RuntimeError(
                f"process {self._lockstep.group.process_id} follows process 0, which takes requests: follow()"
            )


@contextlib.contextmanager
def _naming(argument: str | None) -> Iterator[None]:
    """Put the argument's name before the message of an error."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if argument is None:
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{argument}: {error}") from error
