"""`Engine`: requests in, tokens out. The thread that waits for tokens runs the steps."""

import contextlib
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from concurrent.futures import wait

from jax.sharding import Mesh

from longctx.models import Llama, Tokenizer
from longctx.models.params import Params
from longctx.parallel.topology import Topology
from longctx.serving.config import EngineConfig
from longctx.serving.distributed.lockstep import Lockstep
from longctx.serving.distributed.orders import Journal, RequestUpdate
from longctx.serving.distributed.process_group import ProcessGroup
from longctx.serving.engine.active_request import ActiveRequest, ActiveRequests, TokenStream, prepare_all
from longctx.serving.engine.core import run_step
from longctx.serving.engine.follower import Follower
from longctx.serving.engine.metrics import EngineStats, StepMetrics, StepMonitor, notify
from longctx.serving.engine.page_transfers import PageTransfers
from longctx.serving.engine.setup import resolve
from longctx.serving.engine.step_lock import Interrupts, StepLock
from longctx.serving.executor.interface import Executor, Progress, ignore_progress
from longctx.serving.executor.submit_queue import SubmitQueue
from longctx.serving.kv_cache.connector import LOOKUP_TIMEOUT, LeasedSource, LocatedSources, PageKeeper
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.recording.recorder import Recorder
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Event, Output
from longctx.serving.request.request import PreparedRequest, Prompt, Request, read_requests
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.runner.device_memory import MemoryUse
from longctx.serving.scheduler.look_ahead import copy_scheduler
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.sequence import Sequence


class Engine:
    r"""Engine that serves a model, on one device or many. Any thread may call any method.

    A thread that waits for tokens runs steps, one thread at a time. Calls of others take effect when the step has
    ended: `submit`, `cancel`, `stats` and the closing of a stream never wait for a device or a compilation, and may be
    made by a signal handler.

    An exception within a step leaves the device in an unknown state: every request ends with a last event
    (`finish_reason="error"`), and every later call raises RuntimeError. Ctrl-C waits for the end of a step, and cancels
    the requests of the call that it interrupts. Ctrl-C twice does not wait, and ends the engine.

    On accelerators an engine without `num_pages` has as many as fit into memory beside the programs of the largest
    steps, which it compiles when it is made.

    Args:
      model, params: as from `load_checkpoint`.
      config: sizes and rules, see `EngineConfig`.
      mesh: of the axes stage, context and tensor, as from `make_mesh`. None: the first devices that the plan needs, or
        where the parameters are.
      tokenizer: needed for prompts that are text, for text in outputs, and for stop strings.
      executor: runs the batches instead of the device, for tests; `params` may then be None.
      clock: seconds; what metrics and policies go by.
      predictor: of its batches, see `longctx.serving.profiler`; None: a roofline. Batches that run correct either.
      monitor: is called with the `StepMetrics` of every step that has ended. It may submit and cancel, and can't run
        steps itself. If it raises, that is logged, and it is not called any more.
      plan: how the engine is spread over devices, see `ParallelPlan`. None: as the mesh says, pages growing.
      process_group: the processes that run the engine together, each with the same arguments, as from
        `longctx.serving.distributed.initialize`. The first one's engine takes requests; the others `follow`.
      recorder: writes a log for `longctx replay`, of one engine, in the first process; see `open_recorder`.
      topology: what devices can do and which link each axis has; None: found from the mesh.
      store: keeps pages beyond the devices. None: as `config.tiers` says. It may be shared by engines of one model.

    Attributes:
      model, config: as given.
      core: what decides, see `Core`.
      executor: runs its batches.
      input_processor: prepares its requests, see `InputProcessor`.
      now: returns seconds of its clock.
      requests: that have not ended, by id.
      pages: that leave it and arrive, see `PageTransfers`.
      process_group: the processes that run it together.
      takes_handoffs: whether it goes on with what other engines have computed: not if it is recorded.

    Raises:
      ValueError: sizes that contradict the model or the memory, a plan that doesn't fit the model, the mesh or the
        devices, a predictor that knows no step of `token_budget` rows, processes with different arguments.

    Source:
      Mnemosyne, 4.3 and 4.4 (stages, KVP), Medha, 3 and 4 (chunks, scheduling), and Context Parallelism for
      Scalable Million-Token Inference, 3 (pass-KV and pass-Q), in one engine, by its plan and configuration.

    Examples:
      >>> from longctx.models import load_checkpoint, load_tokenizer
      >>> from longctx.models.builtin import TINY
      >>> from longctx.serving import Engine, EngineConfig, SamplingParams
      >>> model, params = load_checkpoint(TINY)
      >>> config = EngineConfig(num_pages=64, token_budget=64, max_running=4)
      >>> engine = Engine(model, params, config, tokenizer=load_tokenizer(TINY))
      >>> question = "Q: What is the pass key of lemon?\nA: "
      >>> prompts = [f"The pass key of lemon is {key}.\n{question}" for key in (48213, 90517)]
      >>> [output.text for output in engine.generate(prompts, SamplingParams(max_tokens=5))]
      ['48213', '90517']
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
        monitor: StepMonitor | None = None,
        plan: ParallelPlan | None = None,
        process_group: ProcessGroup | None = None,
        recorder: Recorder | None = None,
        topology: Topology | None = None,
        store: PageKeeper | None = None,
    ) -> None:
        self.process_group, self.takes_handoffs = process_group or ProcessGroup.alone(), recorder is None
        self._lockstep = Lockstep(self.process_group)
        setup = resolve(model, params, config, mesh, plan, tokenizer, predictor, self.process_group, topology)
        self.page_identity = setup.identify_pages(params)
        store = store or setup.open_store(self.page_identity)
        if executor is None:
            executor, setup = setup.make_executor(params, store, self.process_group)
        if not self._lockstep.leads:
            clock = lambda: self._lockstep.now  # noqa: E731
        self.config, self.plan, self.mesh = setup.config, setup.plan, setup.mesh
        self.model, self.tokenizer, self.topology = model, tokenizer, setup.topology
        self.max_length, self.num_pages = setup.max_length, setup.num_pages
        self.core, self.input_processor, self._sequence_maker = setup.make_core()
        self.scheduler, self.predictor = self.core.scheduler, self.core.scheduler.chunker.predictor
        if recorder is not None:
            setup.begin_recording(recorder, params, self.core, self._lockstep.leads)
        self._journals: list[Journal] = [] if recorder is None else [recorder]
        self._journals += [] if self._lockstep.is_alone else [self._lockstep]
        self.executor, self.now = executor, clock
        self._queue = SubmitQueue(executor, clock, self.plan.stage)
        self._monitors = [] if monitor is None else [monitor]
        self._is_warm = False
        self._is_idle = False  # whether the last step had nothing to begin
        self._events: deque[Event] = deque()  # that `step` returns
        self._lock = StepLock(self._settle, self._fail)
        now = lambda: self.now()  # noqa: E731
        self.pages = PageTransfers(self.core, executor, store, self._note, self._lock.update, now, self._lockstep)
        self.requests = ActiveRequests(
            self.core, self.input_processor, self._sequence_maker, executor, self.pages.look_up, self._note, now
        )

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | List[SamplingParams] | None = None,
        progress: Callable[[Event], object] | None = None,
    ) -> list[Output]:
        """Continue all prompts, batched together.

        Args:
          prompts: texts, lists of token ids, or `Request`s, which bring their own sampling.
          sampling: for all prompts, or one each; None is greedy, 16 tokens.
          progress: is called with every event.

        Returns:
          The outputs in the prompts' order; n of them for a request with n > 1.

        Raises:
          TypeError, ValueError: a prompt can't be served. None of them is begun then.
          RuntimeError: the engine has failed.
        """
        outputs = self.stream(prompts, sampling).outputs(progress)
        if any(output.finish_reason == "error" for output in outputs):
            self._check_alive()
        return outputs

    def stream(
        self, prompts: Prompt | Iterable[Prompt], sampling: SamplingParams | List[SamplingParams] | None = None
    ) -> TokenStream:
        """Continue prompts, with every token as it comes. Closing or dropping the stream cancels what has not ended.

        Args:
          prompts, sampling: as for `generate`.

        Returns:
          An iterator of events, each with the tokens of one step.
        """
        arrival, prepared = self.now(), prepare_all(self.input_processor, read_requests(prompts, sampling))
        wait(self.pages.ask_ahead(prepared), LOOKUP_TIMEOUT)
        stream = TokenStream(self._take_turn, self._lock, self.requests.leave)
        add = stream.events.append
        stream.requests += [ActiveRequest(each, arrival, lambda _, event: add(event)) for each in prepared]
        self._start(stream.requests)
        return stream

    def compile(self, progress: Progress = ignore_progress) -> None:
        """Compile the programs of all steps, several at a time; in a process group this is `warm_up`.

        What else few requests need, such as `prompt_logprobs`, compiles when one needs it.

        Args:
          progress: is told how many programs are compiled, and of how many.

        Raises:
          RuntimeError: requests have not ended.
        """
        with self._without_requests("compile", "compile must be called before requests, and"):
            if self._lockstep.is_alone:
                self.executor.compile(progress)
            else:
                self._warm_up(progress)

    def warm_up(self, progress: Progress = ignore_progress) -> None:
        """Compile every program that serving needs, and run it once; nothing is compiled after it.

        Args:
          progress: as in `compile`.

        Raises:
          RuntimeError: requests have not ended: warming up writes to their slots.
        """
        with self._without_requests("warm_up", "warm_up must be called before requests, and"):
            self._warm_up(progress)

    def follow(self, sources: LocatedSources | None = None) -> None:
        """Repeat what the first process's engine does, until its process group is closed there.

        Args:
          sources: where this process fetches its part of pages that other engines have; None: nowhere.

        Raises:
          RuntimeError: this is the first process, or there is no other.
        """
        if self._lockstep.leads:
            raise RuntimeError("follow is for engines of a process group, in all processes but the first")
        try:
            with self._lock.failing():
                arguments = self.core, self.executor, self._lockstep, self.input_processor, self.requests, self.pages
                Follower(*arguments, self._lock.following, sources).run()
        finally:
            self.pages.close()

    @contextlib.contextmanager
    def lend_executor(self) -> Iterator[Executor]:
        """Return the executor, to measure it: `longctx.serving.profiler`. The cache forgets what it holds.

        Raises:
          RuntimeError: requests have not ended, other processes take part, or it is recorded.
        """
        with self._without_requests("lend_executor", "an engine is measured while it serves no request:"):
            if self._journals:
                raise RuntimeError("an engine is measured in one process alone, and not while it is recorded")
            self.core.pool.clear()
            with self._lock.failing():
                yield self.executor

    @property
    def memory(self) -> MemoryUse | None:
        """Use of an accelerator's memory, also as text; of the largest programs, until all are compiled.

        None: the engine runs on CPUs, or the memory is not known.
        """
        fit = getattr(self.executor, "fit", None)
        return None if fit is None else fit.use

    def prepare(self, request: Request) -> PreparedRequest:
        """Check a request, tokenise and hash its prompt: what `submit` does first, outside of the engine's lock.

        Returns:
          What `submit` takes.

        Raises:
          TypeError, ValueError: what it asks for can't be done; the message names the argument.
        """
        return self.input_processor.prepare(request)

    def claim(self, requests: List[ActiveRequest]) -> None:
        """Check that requests could be served if there were no others, and give them their ids; all or none.

        Raises:
          TypeError, ValueError: one can't be served, or its id is taken.
          RuntimeError: the engine has failed.
        """
        self._check_alive()
        if not self.takes_handoffs and any(request.handoff is not None for request in requests):
            raise ValueError("handoff must be None for an engine that is recorded")
        self._lock.apply()
        self.requests.claim(requests)

    def begin(self, requests: List[ActiveRequest]) -> None:
        """Let claimed requests enter with the next step."""
        for request in requests:
            request.has_begun = True
            for tokens, seconds in request.prepared.request.retain:
                self.pages.pin(request.prepared.keys[: tokens // self.config.page_size], seconds)
        self._lock.update(functools.partial(self.requests.enter, *requests))

    def submit(
        self,
        request: Request | PreparedRequest,
        arrival: float | None = None,
        handoff: Handoff | None = None,
        sources: Mapping[str, LeasedSource] | None = None,
    ) -> str:
        """Begin a request. `step` returns its events.

        Args:
          request: to begin.
          arrival: when it came, by the engine's clock; None: now.
          handoff: what another engine has computed of it; the first events have its tokens so far.
          sources: where the pages of the handoff's leases come from, by lease. What does not come is computed. They are
            released when the request has ended.

        Returns:
          Its id.

        Raises:
          TypeError, ValueError: it can't be served.
        """
        arrival = self.now() if arrival is None else arrival
        if isinstance(request, PreparedRequest):
            prepared = request
        else:
            prepared = self.prepare(request)
            wait(self.pages.ask_ahead([prepared]), LOOKUP_TIMEOUT)
        add = self._events.append
        active = ActiveRequest(prepared, arrival, lambda _, event: add(event), handoff, sources or {})
        self._start([active])
        return active.request_id

    def cancel(self, request_id: str) -> bool:
        """End a request wherever it is.

        Its last events say `"cancelled"`, unless the step that runs now brings it to its end.

        Returns:
          False if it is unknown or has ended.
        """
        self._check_alive()
        self._lock.apply()
        request = self.requests.get(request_id)
        if request is not None:
            self._lock.update(functools.partial(self.requests.leave, request))
        return request is not None

    def step(self) -> list[Event]:
        """Begin what can be, wait for the oldest in-flight batch; returns the events of submitted requests.

        After a failure it returns the last events of requests that the failure ended, once.

        Raises:
          RuntimeError: the engine has failed, or a monitor or a signal handler called it within a step.
        """
        if self._lock.error is None or not self._events:
            self._take_turn("step", None)
        events: list[Event] = []
        try:
            with Interrupts(), contextlib.suppress(IndexError):  # of other threads that take events
                while True:
                    events.append(self._events.popleft())
            return events
        except BaseException:  # the next call returns them
            self._events.extendleft(reversed(events))
            raise

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended, or some event has not been returned by `step`.

        Raises:
          RuntimeError: the engine has failed, and the last events of its requests have been returned.
        """
        if self._lock.error is not None and not self._events:
            self._check_alive()
        self._lock.apply()
        return bool(self.requests.have_begun or self._events or self.core.has_stores)

    def copy_scheduler(self) -> Scheduler | None:
        """A copy of the scheduler, to look ahead with; None while a step runs."""
        with Interrupts(), self._lock.turn_if_free() as is_free:
            return copy_scheduler(self.scheduler) if is_free else None

    def add_monitor(self, monitor: StepMonitor) -> None:
        """Call one more monitor, as the argument `monitor`, from the next step on."""
        self._monitors.append(monitor)

    def stats(self) -> EngineStats:
        """The counts since the engine was made, and what it holds now: nothing, once it has failed."""
        self._lock.apply()
        stats = self.core.stats()
        if self._lock.error is not None:
            names = "running", "waiting", "pages_held", "pages_cached", "window_pages_held", "window_pages_cached"
            stats = dataclasses.replace(stats, **dict.fromkeys(names, 0))
        return stats

    def _start(self, requests: List[ActiveRequest]) -> None:
        """Claim and begin requests; all or none."""
        try:
            with Interrupts():
                self.claim(requests)
                self.begin(requests)
        except BaseException:
            self._lock.update(functools.partial(self.requests.leave, *requests))
            raise

    def _note(self, update: RequestUpdate, sequences: List[Sequence] = ()) -> None:
        for journal in self._journals:
            journal.note(update, sequences)

    def _take_turn(self, call: str, events: deque[Event] | None) -> None:
        """Run a step; nothing if there are events by the time that it is this thread's turn."""
        with self._lock.turn(call):
            if not (events or self._is_warm or self._lockstep.is_alone):
                self._check_alive()
                self._warm_up()  # takes minutes, in which an interrupt ends all processes
            with Interrupts():
                if not events:
                    self._step()

    def _step(self) -> None:
        self._check_alive()
        self._lock.apply_locked()
        now, metrics = self.now(), None
        with self._lock.failing(), self._lockstep.limit("a step"):
            self.pages.poll(now, self._is_idle)
            for journal in self._journals:
                journal.note_step(now)
            step = run_step(self.core, self._queue, now, self._journals)
            events: list[Event] = []
            self._is_idle = step is None
            if step is not None:
                metrics = StepMetrics.of(step) if self._monitors else None
                events = self.core.end(step.batch, step.results, step.finished, step.seconds)
                self.requests.deliver(events)
            for journal in self._journals:
                journal.note_end(step, events)
            self._settle()
        if metrics is not None:
            notify(self._monitors, metrics)

    def _settle(self) -> None:
        """Let other processes have what this one has, where no step is to follow but pages may be asked for."""
        if self._is_warm and self.core.leases and not self.requests.have_begun and self._lock.error is None:
            self._lockstep.settle(self.now())

    @contextlib.contextmanager
    def _without_requests(self, call: str, error: str) -> Iterator[None]:
        """A context in which there is no request, and no step runs; RuntimeError if there are some."""
        with self._lock.turn(call):
            with Interrupts():
                self._check_alive()
                self._lock.apply_locked()
                if self.requests:
                    raise RuntimeError(f"{error} {len(self.requests)} have not ended")
                while self._queue:
                    self._step()
            yield

    def _fail(self, cause: str) -> None:
        """End all requests, and the engines of other processes."""
        try:
            self.requests.fail(f"a step failed: {cause}")
        finally:
            for journal in self._journals:
                journal.note_failure(cause)

    def _warm_up(self, progress: Progress = ignore_progress) -> None:
        """Compile all programs, and run them once."""
        if self._lockstep.is_alone:
            self.executor.compile(progress)  # an interrupt here breaks nothing
            with Interrupts(), self._lock.failing():
                self.executor.warm_up()
        else:
            with self._lock.failing():
                self._lockstep.send_warm_up()
                self._lockstep.warm_up(self.executor, progress)
        self._is_warm = True

    def _check_alive(self) -> None:
        self._lock.check_alive()
        if not self._lockstep.leads:
            raise RuntimeError(
                f"process {self._lockstep.group.process_id} follows process 0, which takes requests: follow()"
            )
