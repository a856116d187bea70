"""The engine of a program: requests in, tokens out. Whoever waits for tokens runs the steps."""

import contextlib
import dataclasses
import math
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
from longctx.serving.distributed.process_group import ProcessGroup
from longctx.serving.engine.begin_recording import begin_recording
from longctx.serving.engine.follower import Follower
from longctx.serving.engine.jobs import Job, naming_prompt
from longctx.serving.engine.metrics import EngineStats
from longctx.serving.engine.monitor import StepMonitor
from longctx.serving.engine.resolve import resolve
from longctx.serving.engine.step_driver import StepDriver
from longctx.serving.engine.step_lock import Interrupts
from longctx.serving.engine.stream import TokenStream
from longctx.serving.executor.executor import DeviceExecutor
from longctx.serving.executor.interface import Executor, Progress, ignore_progress
from longctx.serving.kv_cache.connector import PATIENCE, LeasedSource, LocatedSources, PageKeeper
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
from longctx.serving.validation import check_real


class Engine(StepDriver):
    r"""Serves a model, on one device or many. Any thread may call any method.

    Whoever waits for tokens runs steps, one thread at a time. What others ask for meanwhile takes effect when the step
    has ended: `submit`, `cancel`, `stats` and the closing of a stream never wait for a device or a compilation, and may
    be called by a signal handler.

    An exception within a step leaves the device in an unknown state: every request ends with a last event
    (`finish_reason="error"`), and from then on every call raises RuntimeError. Ctrl-C waits for the end of a step: it
    ends the call that it interrupts, whose requests are cancelled. Ctrl-C twice does not wait, and ends the engine, and
    so may an exception that another signal's handler raises.

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
      model: as given.
      config: as given.
      core: what decides, see `Core`.
      input_processor: prepares its requests, see `InputProcessor`.

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
        self._lockstep = Lockstep(process_group or ProcessGroup.alone())
        resolved = resolve(model, params, config, mesh, plan, tokenizer, predictor, process_group, topology)
        self.page_identity = resolved.identify_pages(params)
        store = store or resolved.open_store(self.page_identity)
        if executor is None:
            executor, resolved = resolved.make_executor(params, store, process_group)
        if not self._lockstep.leads:
            clock = lambda: self._lockstep.now  # noqa: E731
        self._resolved = resolved
        self.config, self.plan, self.mesh = resolved.config, resolved.plan, resolved.mesh
        self.model, self.tokenizer, self.topology = model, tokenizer, resolved.topology
        self.max_length, self.num_pages = resolved.max_length, resolved.num_pages
        self.core, self.input_processor, self._sequence_maker = resolved.make_core()
        self.scheduler, self.predictor = self.core.scheduler, self.core.scheduler.chunker.predictor
        if recorder is not None:
            begin_recording(recorder, resolved, params, self.core, self._lockstep.leads)
        super().__init__(executor, clock, recorder, monitor, store)

    # One call for all.

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
        return [outputs[job.request_id, n] for job in stream.jobs for n in range(job.prepared.request.sampling.n)]

    def stream(
        self, prompts: Prompt | Iterable[Prompt], sampling: SamplingParams | List[SamplingParams] | None = None
    ) -> TokenStream:
        """Continue prompts, with every token as it comes. Closing or dropping the stream cancels what has not ended.

        Args:
          prompts, sampling: as for `generate`.

        Returns:
          An iterator of events, each with the tokens of one step.
        """
        return self._begin(read_requests(prompts, sampling))

    def compile(self, progress: Progress = ignore_progress) -> None:
        """Compile the programs of all steps, several at a time; in a process group this is `warm_up`.

        What else few requests need, such as `prompt_logprobs`, compiles when one needs it.

        Args:
          progress: is told how many programs are compiled, and of how many.

        Raises:
          RuntimeError: requests have not ended.
        """
        self._prepare("compile", self._compile if self._lockstep.is_alone else self._warm_up, progress)

    def warm_up(self, progress: Progress = ignore_progress) -> None:
        """Compile every program that serving needs, and run it once; nothing is compiled after it.

        Args:
          progress: as in `compile`.

        Raises:
          RuntimeError: requests have not ended: warming up writes to their slots.
        """
        self._prepare("warm_up", self._warm_up, progress)

    def follow(self, sources: LocatedSources | None = None) -> None:
        """Do what the first process's engine does, until its process group is closed there.

        Args:
          sources: where this process fetches its part of pages that other engines have; None: nowhere.

        Raises:
          RuntimeError: this is the first process, or there is no other.
        """
        if self._lockstep.leads:
            raise RuntimeError("follow is for engines of a process group, in all processes but the first")
        try:
            with self._failing():
                arguments = self.core, self._executor, self._lockstep, self.input_processor, self._sequence_maker
                Follower(*arguments, self._following, self.pages.store, sources).run()
        finally:
            self.pages.close()

    @contextlib.contextmanager
    def lend_executor(self) -> Iterator[Executor]:
        """The executor, to measure it: `longctx.serving.profiler`. The cache forgets what it holds.

        Raises:
          RuntimeError: requests have not ended, or other processes take part.
        """
        with self._step_lock.turn("lend_executor"):
            with self._step_lock.held():
                self._check_alive()
                if not self._lockstep.is_alone:
                    raise RuntimeError("an engine is measured in one process alone")
                self._drain("an engine is measured while it serves nobody: {} have not ended")
                self.core.pool.clear()
                for journal in self._journals:
                    journal.note_clear()
                with self._failing():
                    yield self._executor
            self._monitor.catch_up()

    @property
    def memory(self) -> MemoryUse | None:
        """Where the memory of an accelerator goes, also as text; of the largest programs, until all are compiled.

        None: the engine runs on CPUs, or the memory is not known.
        """
        fit = self._executor.fit if isinstance(self._executor, DeviceExecutor) else None
        return None if fit is None else fit.use

    # Piece by piece.

    def prepare(self, request: Request) -> PreparedRequest:
        """Check a request, tokenise and hash its prompt: what `submit` does first, outside of the engine's lock.

        Returns:
          What `submit` takes.

        Raises:
          TypeError, ValueError: what it asks for can't be done; the message names the argument.
        """
        return self.input_processor.prepare(request)

    def check(self, prepared: PreparedRequest) -> None:
        """Check that a request could be served by an engine that does nothing else.

        Raises:
          ValueError: it was prepared for another engine, or its pages or targets are more than can be had.
        """
        request, tokens, _, prepared_for = prepared
        if request.lease is not None and request.lease in self.core.leases:
            raise ValueError(f"lease must be new, and {request.lease!r} is another request's")
        if prepared_for != self.input_processor.fingerprint:
            raise ValueError("request must be prepared for this engine, and was for another: see Engine.prepare")
        self.scheduler.check(len(tokens), request.sampling.max_tokens)
        if self._resolved.is_profiled:
            cached = self.scheduler.count_cached(prepared.shared_keys)
            alone = dataclasses.replace(self.scheduler.forecast.time, predictor=self.predictor.predictor)
            alone.check_targets(request, cached, len(tokens), self.plan.stage)

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
        arrival = self._clock() if arrival is None else check_real("arrival", arrival, -math.inf, self._clock())
        if isinstance(request, PreparedRequest):
            prepared = request
        else:
            prepared = self.prepare(request)
            wait(self.pages.ask_ahead([prepared]), PATIENCE)
        jobs: list[Job] = []
        if handoff is not None:
            if not self.takes_handoffs:
                raise ValueError("handoff must be None for an engine that is recorded")
            sampling, vocab_size = prepared.request.sampling, self.model.config.vocab_size
            handoff.check(len(prepared.tokens), sampling, vocab_size)
        self._start([prepared], arrival, self._events, jobs, handoff, sources)
        return jobs[0].request_id

    def cancel(self, request_id: str) -> bool:
        """End a request wherever it is.

        Its last events say `"cancelled"`, unless the step that runs now brings it to its end.

        Returns:
          False if it is unknown or has ended.
        """
        self._check_alive()
        self._apply_updates()
        job = self._jobs.get(request_id)
        if job is not None:
            self.cancel_jobs([job])
        return job is not None

    def hand_off(self, request_id: str, lease: str) -> bool:
        """End a request wherever it is, for another engine that goes on with it.

        Its last events say `"moved"`, and `Handoff.of` their outputs is what the other engine is given.

        Args:
          request_id: of the request.
          lease: under which its pages are kept, see `Request.lease`.

        Returns:
          False if it is unknown or has ended.
        """
        self._check_alive()
        self._apply_updates()
        job = self._jobs.get(request_id)
        if job is not None:
            with Interrupts():
                self._update(lambda job: self._leave(job, lease), [job])
        return job is not None

    def cancel_jobs(self, jobs: list[Job]) -> None:
        """End what has not ended of them."""
        with Interrupts():
            self._update(self._leave, jobs)

    def abandon(self, jobs: list[Job]) -> None:
        """`cancel_jobs`, later: this is safe in a finaliser, which may run in the midst of anything."""
        self._updates.add(self._leave, jobs)

    def step(self) -> list[Event]:
        """Begin what can be, wait for the oldest in-flight batch; returns the events of submitted requests.

        After a failure it returns the last events of requests that the failure ended, once.

        Raises:
          RuntimeError: the engine has failed, or a monitor or a signal handler called it within a step.
        """
        if self._error is None or not self._events:
            self._take_turn("step", None)
        events: list[Event] = []
        try:
            with Interrupts(), contextlib.suppress(IndexError):
                while True:
                    events.append(self._events.popleft())
            return events
        except BaseException:
            self._events.extendleft(reversed(events))  # for the next call
            raise

    def advance(self, events: deque[Event]) -> None:
        """A step, unless there are events by now."""
        self._take_turn("next", events)

    def progress(self, request_id: str) -> tuple[int, int]:
        """How many tokens of a request's prompt are computed, found in the cache or planned, and how many it has.

        Raises:
          KeyError: no such request, or it has ended.
        """
        return self._jobs[request_id].progress

    def num_waiting(self, request_id: str) -> float:
        """How many completions of a request wait for a slot; infinite if it has not come yet."""
        job = self._jobs.get(request_id)
        return math.inf if job is None else job.num_waiting

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended, or some event has not been returned by `step`.

        Raises:
          RuntimeError: the engine has failed, and the last events of its requests have been returned.
        """
        if self._error is not None and not self._events:
            self._check_alive()
        self._apply_updates()
        return bool(self._jobs or self._events or self.core.has_stores or self.pages.verifier.has_work)

    @property
    def process_group(self) -> ProcessGroup:
        """The processes that run it together."""
        return self._lockstep.group

    @property
    def takes_handoffs(self) -> bool:
        """Whether it goes on with what other engines have computed: not if it is recorded."""
        return len(self._journals) <= 1

    def copy_scheduler(self) -> Scheduler | None:
        """A copy of the scheduler, to look ahead with; None while a step runs."""
        with Interrupts(), self._step_lock.held_if_free() as is_held:
            return copy_scheduler(self.scheduler) if is_held else None

    def add_monitor(self, monitor: StepMonitor) -> None:
        """Call one more monitor, as the argument `monitor`, from the next step on."""
        self._monitor.add(monitor)

    def stats(self) -> EngineStats:
        """The counts since the engine was made, and what it holds now: nothing, once it has failed."""
        self._apply_updates()
        stats = self.core.stats()
        if self._error is not None:
            stats = dataclasses.replace(stats, running=0, waiting=0, pages_held=0, pages_cached=0)
        return stats

    # Requests.

    def _begin(self, requests: List[Request]) -> TokenStream:
        arrival = self._clock()
        prepared = []
        for i, request in enumerate(requests):
            with naming_prompt(i, len(requests)):
                prepared.append(self.prepare(request))
        wait(self.pages.ask_ahead(prepared), PATIENCE)
        stream = TokenStream(self)
        self._start(prepared, arrival, stream.events, stream.jobs)
        return stream

    def _start(
        self,
        requests: List[PreparedRequest],
        arrival: float,
        events: deque[Event],
        jobs: list[Job],
        handoff: Handoff | None = None,
        sources: Mapping[str, LeasedSource] | None = None,
    ) -> None:
        """Check that all of them can be served, and let them enter, as `jobs`; all or none."""
        try:
            with Interrupts():
                self._check_alive()
                self._apply_updates()
                for i, prepared in enumerate(requests):
                    with naming_prompt(i, len(requests)):
                        self.check(prepared)
                self._jobs.claim(requests, arrival, events, jobs, handoff, sources)
                self._update(self._enter, jobs)
        except BaseException:
            self.cancel_jobs(jobs)
            raise
