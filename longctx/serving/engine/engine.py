"""The engine: requests in, tokens out. Continuous batching over one compiled step.

Planning and computing overlap: up to `run_ahead` steps are under way while the host plans the next, and the results of
the oldest are taken before one more is begun.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List

from jax.sharding import Mesh

from longctx.models import Llama, Tokenizer
from longctx.models.params import Params
from longctx.serving.config import EngineConfig
from longctx.serving.distributed import ProcessGroup
from longctx.serving.distributed.config_check import agree
from longctx.serving.distributed.lockstep import Arrival, Cancel, Lockstep, StepOrder
from longctx.serving.engine.batch_queue import BatchQueue
from longctx.serving.engine.input_processor import InputProcessor
from longctx.serving.engine.input_processor import Prompt as PromptTokens
from longctx.serving.engine.metrics import EngineStats, StepMetrics
from longctx.serving.engine.resolve import resolve_mesh, resolve_num_pages
from longctx.serving.engine.stream import Job, TokenStream
from longctx.serving.executor.executor import DeviceExecutor, Executor, Results
from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.roofline import hardware_of, roofline
from longctx.serving.predictor.runtime import Predictor, check_predictor, readable_tokens
from longctx.serving.request.completion import Completion
from longctx.serving.request.output import Event, FinishReason, Output
from longctx.serving.request.request import Prompt, Request, SamplingParams, read_requests
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.chunking import Chunker, Chunking
from longctx.serving.scheduler.policy import make_policy
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.sequence import Sequence, State
from longctx.serving.scheduler.slo import check_possible, check_slo


class Engine:
    """Serves a model, on one device or many. Any thread may call any method; whoever waits for tokens runs the steps.

    Args:
      model, params: as from `load_checkpoint`.
      config: sizes and rules, see `EngineConfig`.
      mesh: of the axes stage, context and tensor, as from `make_mesh`. None: the first devices that the plan needs, or
        where the parameters are.
      tokenizer: needed for prompts that are text, for text in outputs, and for stop strings.
      executor: runs the batches instead of the device, for tests and simulations; `params` may then be None.
      clock: seconds; what metrics and policies go by.
      predictor: of this engine's batches, see `longctx.serving.profiler`. None: a roofline of the device. Either is
        corrected by a factor as batches run.
      monitor: is called with the `StepMetrics` of every step that has ended.
      plan: how it is spread, see `ParallelPlan`. None: as the mesh says, pages growing.
      hosts: the processes that run it together, each with the same arguments, as from `initialize`. The first one's
        engine takes requests; the others `follow`.

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
        hosts: ProcessGroup | None = None,
    ) -> None:
        config = config or EngineConfig()
        self.plan, self.mesh = plan, mesh = resolve_mesh(model, params, mesh, plan, hosts)
        positions = model.config.max_positions
        max_length = config.max_length or positions
        if max_length > positions:
            raise ValueError(f"max_length must be at most the model's context of {positions}, got {max_length}")
        self.config, self.model, self.tokenizer, self.max_length = config, model, tokenizer, max_length
        self.num_pages = resolve_num_pages(model, params, config, max_length, mesh)
        self._replica = Lockstep(hosts or ProcessGroup.alone())
        if hosts is not None and not self._replica.is_alone:
            clock = clock if hosts.is_first else self._replica.time
            config, self.num_pages = agree(
                hosts, model, params, config, plan, mesh, predictor, tokenizer, max_length, self.num_pages
            )
            self.config = config
        if executor is None:
            if params is None or mesh is None:
                raise ValueError("params must be given, unless an executor is")
            executor = DeviceExecutor.on_mesh(model, params, config, plan, mesh, self.num_pages, max_length)
        self._executor, self._clock = executor, clock
        self._hash = PageHash(os.urandom(32) if config.hash_key is None else config.hash_key, config.page_size)
        self._door = InputProcessor(
            model.config, config, max_length, tokenizer, self._hash, self.num_pages * plan.context
        )
        self._is_profiled = predictor is not None
        if predictor is None:
            hardware = hardware_of(None if mesh is None else mesh.devices.flat[0])
            predictor = roofline(model.config, hardware, config.token_budget, stage=plan.stage, tensor=plan.tensor)
        self.predictor = Corrected(check_predictor(predictor, config.token_budget))
        if self._is_profiled:
            check_slo(config.slo, predictor)
        chunking = Chunking.parse(config.chunking, config.token_budget, config.max_running)
        self.scheduler = Scheduler(
            Chunker(
                make_policy(config.policy, config.max_share),
                self.predictor,
                chunking,
                plan,
                config.page_size,
                config.growing_buckets(2 if plan.context == 1 else 8),
            ),
            PagePool(self.num_pages, plan.context),
            config.page_size,
            config.max_running,
            config.admission,
            config.slo,
            plan.placer(
                config.page_size,
                config.token_budget,
                readable_tokens(predictor, config.slo.tpot, plan.stage, max_length),
            ),
        )
        self._ended_steps: deque[StepMetrics] = deque()  # of which the monitor has yet to be told
        self._monitor, self._monitoring = monitor, threading.Lock()
        ended = self._ended_steps.append if monitor is not None else None
        self._under_way = BatchQueue(self.scheduler, executor, clock, config.run_ahead, self._note_planned, ended)
        self._jobs: dict[str, Job] = {}
        self._left: deque[list[Job]] = deque()  # by streams that are gone; to be cancelled
        self._events: deque[Event] = deque()  # of requests that no stream waits for
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._num_requests = 0
        self._is_warm = False
        self._counts = {"prompt_tokens": 0, "output_tokens": 0, "cached_tokens": 0}

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
        """
        requests = read_requests(prompts, sampling)
        stream = self._begin(requests)
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
            with self._lock:
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
          RuntimeError: requests have not ended: what warms up writes to their slots.
        """
        with self._lock:
            self._check_alive()
            self._cancel_left()
            if self._jobs:
                raise RuntimeError(f"warm_up must be called before requests, and {len(self._jobs)} have not ended")
            self._drain()
            with self._failing():
                self._lead_warm_up()

    def follow(self) -> None:
        """Do what the first process's engine does, until its `hosts` are closed there.

        Raises:
          RuntimeError: this is the first process, or there is no other.
        """
        if self._replica.leads:
            raise RuntimeError("follow is for engines with hosts, in all processes but the first")
        with self._failing():
            for order in self._replica.orders():
                with self._lock:
                    if isinstance(order, StepOrder):
                        self._under_way.observe(order.seconds)
                        self._hear(order.news)
                        self._run_step(order.now)
                    else:
                        self._warm_up()

    @contextlib.contextmanager
    def lend_executor(self) -> Iterator[Executor]:
        """The executor, to measure it: `longctx.serving.profiler`. The cache forgets what it holds.

        Raises:
          RuntimeError: requests have not ended, or other processes take part.
        """
        with self._lock:
            self._check_alive()
            if not self._replica.is_alone:
                raise RuntimeError("an engine is measured in one process alone")
            self._cancel_left()
            self._drain()
            if self._jobs:
                raise RuntimeError(f"an engine is measured while it serves nobody: {len(self._jobs)} have not ended")
            self.scheduler.pool.clear()
            self._error = RuntimeError("its executor is lent")  # until it comes back
            try:
                yield self._executor
            except BaseException as error:
                self._error = error
                raise
            self._error = None

    # Piece by piece.

    def submit(self, request: Request) -> str:
        """Begin a request; its id. `step` returns its events.

        Raises:
          TypeError, ValueError: it can't be served.
        """
        arrival = self._clock()  # before the wait for the lock
        prompt = self._door.read(request)
        with self._lock:
            (request_id,) = self._check_new([(request, prompt)])
            return self._enter(request, prompt, request_id, arrival, self._events).request_id

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
            if self._error is not None:
                return
            # Listed first: with the first of them end those that wait for it.
            unfinished = [s for s in job.sequences if s.state is not State.FINISHED]
            if unfinished:
                self._replica.note_cancel(job.request_id)
            for sequence in unfinished:
                self._finish(sequence, sequence.completion.cut(), None, "cancelled")

    def leave(self, jobs: list[Job]) -> None:
        """`cancel_job` some, later: this is safe in a finaliser, which may run in the midst of anything."""
        self._left.append(jobs)

    def step(self) -> list[Event]:
        """Plan and begin what can be, and wait for the oldest step under way; events of submitted requests.

        After a failure it returns the last events of those that it ended, once.
        """
        if self._error is None or not self._events:
            with self._lock:
                self._step()
            self._call_monitor()
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    def progress(self, request_id: str) -> tuple[int, int]:
        """How many tokens of a request's prompt are read, found in the cache or planned to be, and how many it has.

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
            self._cancel_left()
            return bool(self._jobs or self._events)

    def stats(self) -> EngineStats:
        with self._lock:
            scheduler, pool = self.scheduler, self.scheduler.pool
            return EngineStats(
                steps=scheduler.num_steps,
                **self._counts,
                preemptions=scheduler.num_preempted,
                pages_evicted=pool.num_evicted,
                pages_held=pool.num_held,
                pages_cached=pool.num_cached,
                running=len(scheduler.prefilling) + len(scheduler.decoding),
                waiting=len(scheduler.waiting),
                idle_stage_steps=self._under_way.num_idle,
            )

    # Requests.

    def _begin(self, requests: List[Request]) -> TokenStream:
        """Begin all or none."""
        arrival = self._clock()  # before the wait for the lock
        read = []
        for i, request in enumerate(requests):
            with _naming(f"prompts[{i}]"):
                read.append((request, self._door.read(request)))
        events: deque[Event] = deque()
        with self._lock:
            ids = self._check_new(read)
            jobs = [
                self._enter(request, prompt, request_id, arrival, events)
                for (request, prompt), request_id in zip(read, ids, strict=True)
            ]
        return TokenStream(self, jobs, events)

    def _check_new(self, read: List[tuple[Request, PromptTokens]]) -> list[str]:
        """Check that all of them can be entered; their ids, those that are missing chosen apart from all others."""
        self._check_alive()
        ids = set(self._jobs)
        for i, (request, prompt) in enumerate(read):
            with _naming(f"prompts[{i}]" if len(read) > 1 else None):
                params = request.sampling
                self.scheduler.check(len(prompt.tokens), params.max_tokens, params.n)
                if self._is_profiled:
                    cached = self.scheduler.count_cached(prompt.keys) if params.prompt_logprobs is None else 0
                    rows = self.scheduler.chunker.chunking.tokens
                    check_possible(request, cached, len(prompt.tokens), rows, self.predictor.predictor)
                if request.request_id in ids:
                    raise ValueError(f"request_id must be unique, and {request.request_id!r} has not ended yet")
                if request.request_id is not None:
                    ids.add(request.request_id)
        return [self._choose_id(ids) if request.request_id is None else request.request_id for request, _ in read]

    def _choose_id(self, taken: set[str]) -> str:
        while (request_id := f"request-{self._num_requests}") in taken:
            self._num_requests += 1
        self._num_requests += 1
        return request_id

    def _enter(
        self, request: Request, prompt: PromptTokens, request_id: str, arrival: float, events: deque[Event]
    ) -> Job:
        self._replica.note_arrival(request, prompt.tokens, request_id, arrival)
        return self._add(Job(request_id, self._door.enter(request, prompt, request_id, arrival), events))

    def _add(self, job: Job) -> Job:
        self.scheduler.add(job.sequences[0])
        self._jobs[job.request_id] = job
        return job

    def _hear(self, news: list[Arrival | Cancel]) -> None:
        """What the first process's engine was asked for."""
        for told in news:
            if isinstance(told, Cancel):
                self.cancel_job(self._jobs[told.request_id])
            else:
                prompt = self._door.read(told.request)
                sequences = self._door.enter(told.request, prompt, told.request_id, told.now)
                self._add(Job(told.request_id, sequences, deque(maxlen=0)))  # nobody looks at its events here

    def _cancel_left(self) -> None:
        while self._left:
            for job in self._left.popleft():
                self.cancel_job(job)

    # Steps.

    def _lead_warm_up(self) -> None:
        self._replica.tell_warm_up()
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile all, wait for all others to, then run: JAX's CPU collectives wait 30 s for who comes late."""
        hosts = self._replica.hosts
        self._executor.compile()
        hosts.barrier("that all is compiled")
        with self._replica.limit("a first run", hosts.join_timeout):
            self._executor.warm_up()
        self._is_warm = True

    def advance(self, events: deque[Event]) -> None:
        """A step, unless there are events by now."""
        with self._lock:
            if not events:
                self._step()
        self._call_monitor()

    def _call_monitor(self) -> None:
        """Tell of steps that have ended, in order, outside of the lock: a monitor may call the engine."""
        while self._ended_steps and self._monitoring.acquire(blocking=False):
            try:
                while self._ended_steps:
                    step = self._ended_steps.popleft()
                    if self._monitor is not None:
                        self._monitor(step)
            finally:
                self._monitoring.release()

    def _step(self) -> None:
        self._check_alive()
        self._cancel_left()
        if not (self._is_warm or self._replica.is_alone):
            with self._failing():
                self._lead_warm_up()
        now = self._clock()
        with self._failing():
            self._replica.tell_step(now, self._under_way.measured)
            self._under_way.measured = None
            if self._run_step(now):
                self._under_way.observe(self._under_way.measured)

    def _run_step(self, now: float) -> bool:
        """Whether results were waited for."""
        with self._replica.limit("a step"):
            return self._plan_and_wait(now)

    def _plan_and_wait(self, now: float) -> bool:
        self._under_way.fill(now)
        if not self._under_way:
            if self.scheduler.waiting and not self.scheduler.is_held_up:
                raise RuntimeError("requests are waiting that are never admitted: this is a bug in the scheduler")
            return False
        batch, results = self._under_way.wait(now)
        self._replica.note_draw(batch, results.tokens)
        self._receive(batch, results)
        return True

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """An error inside is the end of the engine, in all processes."""
        try:
            yield
        except BaseException as error:
            self._error = error
            self._end_all()
            self._replica.hosts.fail(f"{type(error).__name__}: {error}")
            raise

    def _end_all(self) -> None:
        """Give every sequence that has not ended its last event. The scheduler's state counts no more."""
        now = self._clock()
        for job in self._jobs.values():
            for sequence in job.sequences:
                sample: Completion = sequence.completion
                if sample.metrics.finished is None:
                    sample.metrics.finished = now
                    job.events.append(sample.event(sample.cut(), None, "error"))
        self._jobs.clear()

    def _check_alive(self) -> None:
        if self._error is not None:
            raise RuntimeError("the engine has failed, and its requests with it") from self._error
        if not self._replica.leads:
            raise RuntimeError(
                f"process {self._replica.hosts.process_id} follows process 0, which takes requests: follow()"
            )

    def _drain(self) -> None:
        """Wait for all that is under way, and what that leads to."""
        while self._under_way:
            self._step()

    def _note_planned(self, batch: Batch, now: float) -> None:
        self._replica.note_plan(batch)
        for sequence in batch.admitted:
            metrics = sequence.completion.metrics
            if metrics.admitted is None:
                metrics.admitted, metrics.cached_tokens = now, sequence.cached or 0
                metrics.slack = sequence.slack
                self._counts["cached_tokens"] += metrics.cached_tokens
        self._counts["prompt_tokens"] += sum(chunk.num_tokens for chunk in batch.chunks if not chunk.decodes)

    def _receive(self, batch: Batch, results: Results) -> None:
        now = self._clock()
        for sequence, start, logprobs in results.prompt_logprobs:
            known = sequence.completion.prompt_logprobs
            assert start <= len(known) + 1
            if sequence.state is not State.FINISHED:
                known += logprobs[len(known) + 1 - start :]  # computed anew, if it was put back
        for sequence, token, logprob in zip(batch.sampled, results.tokens, results.logprobs, strict=True):
            if sequence.state is State.FINISHED:
                continue  # it ended while this step was under way
            sample: Completion = sequence.completion
            text, reason = sample.push(token, logprob, now)
            self._counts["output_tokens"] += 1
            if self.config.prefix_cache:
                sample.extend_keys(sequence, self._hash)
            self.scheduler.receive(sequence)
            if reason is not None:
                self._finish(sequence, text, token, reason)
            else:
                self._jobs[sample.request_id].events.append(sample.event(text, token))

    def _finish(self, sequence: Sequence, text: str, token: int | None, reason: FinishReason) -> None:
        sample: Completion = sequence.completion
        tail = self._door.leave(sequence)
        if sequence.state is not State.FINISHED:
            self.scheduler.finish(sequence, tail)
        metrics = sample.metrics
        metrics.finished = self._clock()
        metrics.preemptions, metrics.recomputed_tokens = sequence.preemptions, sequence.recomputed
        metrics.ttft_deadline, metrics.tpot_target = sequence.ttft_budget, sequence.tpot_target
        job = self._jobs[sample.request_id]
        job.events.append(sample.event(text, token, reason))
        job.num_open -= 1
        if job.num_open == 0:
            del self._jobs[sample.request_id]


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
