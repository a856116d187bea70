"""An engine in virtual time: the core that serves, driven by events. No JAX, no device."""

from collections import deque
from collections.abc import Callable, Iterable

from longctx.models.config import LlamaConfig
from longctx.models.footprint import cache_bytes
from longctx.parallel.topology import Topology
from longctx.serving.config import EngineConfig
from longctx.serving.distributed.orders import DecisionLog
from longctx.serving.engine.build import build_core
from longctx.serving.engine.core import Core, begin_steps, end_step, run_step
from longctx.serving.engine.metrics import EngineStats, StepMetrics
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.runtime import Predictor, check_predictor
from longctx.serving.predictor.work import Work
from longctx.serving.request.output import Metrics
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence, completion_of
from longctx.simulation.event_loop import EventLoop, Link
from longctx.simulation.instance.host_times import HostTimes
from longctx.simulation.instance.prompt_steps import PromptSteps, find_prompt_steps
from longctx.simulation.instance.repeated_steps import RepeatedSteps, RepetitionFinder
from longctx.simulation.instance.tokenless import make_sequence
from longctx.simulation.instance.virtual_executor import DeviceSpeed, TokenlessExecutor
from longctx.simulation.instance.virtual_tier import HOST_BANDWIDTH, VirtualTier
from longctx.simulation.record import Totals
from longctx.simulation.run import OnEnd
from longctx.simulation.workloads import WorkloadRequest

_LEAST_STEPS = 16


class Instance:
    """One engine: a `Core` with its plan, pages and stages.

    Its cache stays from run to run.

    Args:
      model: its sizes are what requests are checked against.
      config: of the engine; `num_pages` must be given.
      predictor: what the scheduler goes by, and unless `seconds` is given, how long batches take.
      plan: of the devices. None: one device.
      seconds: that a batch takes in one stage.
      topology: by which exchanges are chosen where the predictor does not know them.
      name: that no other instance of a simulation has.
      logs: hear of all decisions, such as a `DecisionDigest` that is wrapped.
      skips_decodes: whether identical steps that only decode are one event. The record is the same. With `seconds`,
        logs, host times or `speed`, all steps are events.
      host: what its thread takes beside the devices. None: no time.
      speed: at which the devices do what takes `seconds`, where it was measured. None: always as fast.
      host_bandwidth: bytes per second between a device and its host, which loads from `config.tiers` share.

    Raises:
      ValueError: the configuration has no `num_pages`, or it contradicts the model, the plan or the predictor.

    Source:
      Vidur simulates engines so; here the scheduler is the one that serves.

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> from longctx.serving import EngineConfig
      >>> from longctx.simulation import Instance, Simulation
      >>> from longctx.simulation.hardware import predictor
      >>> from longctx.simulation.workloads import make_mix
      >>> model, config = LlamaConfig.preset("llama-3-8b"), EngineConfig(num_pages=2000)
      >>> seconds = predictor(model, "h100-nvlink", max_rows=config.token_budget)
      >>> instance = Instance(model, config, seconds)
      >>> record = Simulation([instance]).run(make_mix("sharegpt4", 20))
      >>> len(record.served), record.totals.samples == sum(each.metrics.output_tokens for each in record.served)
      (20, True)
    """

    def __init__(
        self,
        model: LlamaConfig,
        config: EngineConfig,
        predictor: Predictor,
        plan: ParallelPlan | None = None,
        *,
        seconds: Callable[[Batch], float] | None = None,
        topology: Topology | None = None,
        name: str = "0",
        logs: Iterable[DecisionLog] = (),
        skips_decodes: bool = True,
        host: HostTimes | None = None,
        speed: DeviceSpeed | None = None,
        host_bandwidth: float = HOST_BANDWIDTH,
    ) -> None:
        if config.num_pages is None:
            raise ValueError("num_pages must be given: there is no device whose memory would say it")
        plan = plan or ParallelPlan()
        plan.check(model, plan.num_devices)
        self._max_length = config.longest_sequence(model.max_positions)
        check_predictor(predictor, config.token_budget)
        self._core, self._input_processor, self._sequence_maker = build_core(
            model, config, plan, predictor, config.num_pages, self._max_length, topology=topology
        )
        self.name, self.num_devices, self.plan, self.config = name, plan.num_devices, plan, config
        self._vocab_size = model.vocab_size
        self._host = host or HostTimes()
        predicted = lambda batch: predictor.seconds(batch.work)  # noqa: E731
        self.executor = TokenlessExecutor(seconds or predicted, model.vocab_size, plan, self._host, speed)
        self._queue = SubmitQueue(self.executor, self.executor.clock, plan.stage)
        self._logs = tuple(logs)
        finder = RepetitionFinder(self._core, self._queue, self.executor, predictor)
        is_each = bool(seconds or self._host.is_of_steps or speed or self._logs)  # asked for each step
        self._finder = finder if skips_decodes and not is_each else None
        self._repeated: RepeatedSteps | PromptSteps | None = None
        self._least = _LEAST_STEPS  # that are planned at once, if nothing else happens before they end
        self._checked = 0  # tokens of the longest request that could be served
        self._num_requests, self._host_bandwidth = 0, host_bandwidth
        tiers = config.tiers
        kept = 0 if tiers is None else tiers.host_bytes + tiers.disk_bytes
        page_bytes = config.page_size * cache_bytes(model, 1, kv_dtype=config.kv_dtype)
        self._tier = VirtualTier(kept, page_bytes) if kept else None
        self.keep_steps = True

    def attach(self, loop: EventLoop, on_end: OnEnd, seed: int = 0) -> None:
        """Begin a run, see `Server.attach`."""
        self._loop, self._on_end, self._seed = loop, on_end, seed
        self.executor.now = max(self.executor.now, loop.now)
        self._steps: list[StepMetrics] = []
        self._timeline: list[tuple[float, int, int]] = []
        self._totals = Totals()
        self._open: dict[str, tuple[WorkloadRequest, Sequence]] = {}
        self._is_due = self._is_busy = False  # whether a step is about to begin; whether one is under way
        self._link = Link(loop, self._host_bandwidth * self.num_devices)
        self._free = loop.now  # when its thread is
        self._entering: list[Sequence] = []  # of requests since it last planned
        self._in_front: deque[Sequence] = deque()  # of requests in the front end, in their order
        self._front_free = loop.now  # when the front end has dealt with all of them
        self._busy_since = loop.now

    @property
    def core(self) -> Core:
        """The core that decides, as it is now."""
        self._settle()
        return self._core

    @property
    def steps(self) -> list[StepMetrics]:
        """Steps of the run, if they are kept."""
        self._settle()
        return self._steps

    @property
    def timeline(self) -> list[tuple[float, int, int]]:
        """(seconds, running, waiting) after each step, if they are kept."""
        self._settle()
        return self._timeline

    @property
    def totals(self) -> Totals:
        """Sums over what it has computed in the run."""
        self._settle()
        return self._totals

    @property
    def stats(self) -> EngineStats:
        """Counts since it was made; None before its first step."""
        return self.core.stats()

    @property
    def prefill_seconds(self) -> float:
        """Predicted seconds of all prompts that it has not computed."""
        scheduler = self._core.scheduler
        known = sum([sequence.prefill_remaining for sequence in scheduler.waiting])
        if isinstance(self._repeated, PromptSteps):
            known += sum(self._repeated.prefill_seconds(self._loop.now))
        else:
            known += sum([sequence.prefill_remaining for sequence in scheduler.running.prefilling])
        predictor, rows = scheduler.chunker.predictor, scheduler.chunker.chunking.tokens
        return known + sum(
            [predictor.prefill_seconds(0, each.prompt_length, rows) for each in (*self._entering, *self._in_front)]
        )

    def check(self, request: WorkloadRequest) -> None:
        """Check a request.

        Raises:
          ValueError: it is longer than the longest sequence, or than the cache.
        """
        if request.length <= self._checked:
            return  # as a longer one was
        if request.length > self._max_length:
            raise ValueError(f"has {request.length} tokens, more than the {self._max_length} of the longest")
        self._core.scheduler.planner.check(request.prompt_tokens, request.output_tokens)
        self._checked = request.length

    def add(self, request: WorkloadRequest, arrival: float) -> None:
        """A request comes at `loop.now`; it was due at `arrival`."""
        self._settle()
        request_id = f"request-{self._num_requests}"
        self._num_requests += 1
        if request.prompt is None:
            order, has_keys = self._sequence_maker.next_order(), self.config.prefix_cache
            size, seed = self.config.page_size, self._seed
            sequence = make_sequence(request, request_id, order, arrival, size, seed, has_keys)
        else:
            self.executor.has_tokens = True
            sampling = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
            tokens = request.tokens(self._vocab_size, self._seed)
            prepared = self._input_processor.prepare(Request(tokens, sampling))  # type: ignore[arg-type]
            (sequence,) = self._sequence_maker.make(prepared, request_id, arrival)
        self._join(request, sequence)

    def _join(self, request: WorkloadRequest, sequence: Sequence) -> None:
        """Let a sequence enter the core before the next batch is planned, once it has passed the front end."""
        self._open[completion_of(sequence).request_id] = request, sequence
        if self._host.front_end:
            self._front_free = max(self._front_free, self._loop.now) + self._host.front_end
            self._in_front.append(sequence)
            self._loop.at(self._front_free, self._pass_front)
        else:
            self._entering.append(sequence)
            self._wake()

    def _pass_front(self) -> None:
        """The front end has dealt with the first of its requests."""
        self._settle()
        self._entering.append(self._in_front.popleft())
        self._wake()

    def stop(self) -> list[tuple[WorkloadRequest, Metrics]]:
        """Cancel what has not ended, and wait for its batches.

        Returns:
          The requests that have not ended, and their metrics so far.
        """
        core, left = self.core, []
        self._entering += self._in_front
        self._in_front.clear()
        self._enter()
        self._open, is_open = {}, self._open
        for request, sequence in is_open.values():
            assert sequence.completion is not None
            left.append((request, sequence.completion.metrics))
            core.cancel(sequence)
        while (step := run_step(core, self._queue, self.executor.now)) is not None:
            core.end(step.batch, step.results, step.finished, None)
        # The next run begins when the devices are free.
        self._loop.now = max(self._loop.now, self.executor.now, self.executor.free)
        return left

    def _enter(self) -> None:
        """Let requests that have come wait in the core: like an engine's, it hears of them between steps."""
        for sequence in self._entering:
            if self._tier is not None:
                self._core.look_up([sequence], self._tier)
            self._core.add([sequence])
        self._entering.clear()

    def _wake(self) -> None:
        """See to it that a step begins, after all else that happens now."""
        if not (self._is_due or self._is_busy):
            self._is_due = True
            self._loop.at(max(self._loop.now, self._free), self._begin)

    def _begin(self) -> None:
        """Begin what can be, and plan what comes next: the end of the oldest batch, or of a run of batches."""
        self._is_due = False
        self._begin_steps(self._loop.now)
        if self._is_busy:
            self._plan_end()

    def _plan_end(self) -> None:
        steps: RepeatedSteps | PromptSteps | None = None
        if self._finder is not None:
            steps = self._finder.find()
            if steps is None and not (self.executor.has_tokens or self.executor.notes_prompts):
                steps = find_prompt_steps(self._core, self._queue, self.executor, self._loop.next_time, self._least)
        self._repeated = steps
        if self.executor.thread is not None:
            return  # it says when a batch is ready
        if steps is None:
            self._loop.at(max(self.executor.now, self._queue.oldest.ready), self._end)
        else:
            self._loop.at(steps.finished, lambda: self._end_repeated(steps))

    def _end_repeated(self, steps: RepeatedSteps | PromptSteps) -> None:
        """End repeated steps, unless they were settled before."""
        if self._repeated is not steps:
            return
        if self._loop.is_last_now and (periods := steps.periods_until(self._loop.now, included=True)):
            self._repeated = None
            self._move_past(steps, periods)
            self._plan_end()
        else:
            self._settle()

    def _move_past(self, steps: RepeatedSteps | PromptSteps, periods: int) -> None:
        ends = steps.apply(periods, self._totals, self._steps if self.keep_steps else None)
        if ends:
            self._busy_since = ends[-1]
            if self.keep_steps:
                self._timeline += [self._point(end) for end in ends]

    def _settle(self) -> None:
        """End repeated steps now, as far as they have come, so that the core is as it is at `loop.now`."""
        if self._repeated is None:
            return
        steps, self._repeated, now = self._repeated, None, self._loop.now
        self._move_past(steps, steps.periods_until(now))
        while (ready := self._queue.oldest.ready) < now:
            self._end_step()
            self._begin_steps(ready)
        self._loop.at(max(now, self._queue.oldest.ready), self._end)

    def _end(self) -> None:
        """The oldest batch ends: its tokens come."""
        self._end_step()
        self._is_busy = False
        self._free = self._loop.now + self._host.hidden
        if self._free == self._loop.now and self._loop.is_last_now:
            self._begin()  # as the event would
        else:
            self._wake()

    def _begin_steps(self, now: float) -> None:
        if not self._queue:
            self._busy_since = now
        self.executor.now = now + len(self._entering) * self._host.request
        self._enter()
        self._is_busy = begin_steps(self._core, self._queue, now, self._logs)
        for batch in self.executor.take_moves():
            self._begin_moves(batch)

    def _begin_moves(self, batch: Batch) -> None:
        """Store and load the pages that a batch says."""
        assert self._tier is not None
        self._tier.put(store.key for store in batch.stores)
        for load in batch.loads:
            self._tier.load(load, self._loop, self._link, self._end_load)

    def _end_load(self, loaded: Loaded) -> None:
        """Pages have come from the host's memory: their sequence goes on."""
        self.core.end_load(loaded)
        self._wake()

    def _end_step(self) -> None:
        stage_seconds = self._queue.oldest.seconds
        step = end_step(self._queue, self._logs)
        self._note(step, stage_seconds)
        events = self._core.end(step.batch, step.results, step.finished, step.seconds)
        self._note_results(step.batch)
        for event in events:
            if event.output is not None:
                self._end_request(event.request_id, event.output.metrics)
        if self.keep_steps:
            self._timeline.append(self._point(step.finished))

    def _note_results(self, batch: Batch) -> None:
        """The core has taken the results of a batch, before those that end with it are told of."""

    def _end_request(self, request_id: str, metrics: Metrics) -> None:
        request, _ = self._open.pop(request_id)
        self._on_end(request, metrics)

    def _point(self, at: float) -> tuple[float, int, int]:
        scheduler = self._core.scheduler
        return at, len(scheduler.running), len(scheduler.waiting)

    def _note(self, step: EndedStep, stage_seconds: float) -> None:
        """Count what a step has computed, whose results the core has not taken yet."""
        batch = step.batch
        work = batch.work
        if self.plan.context > 1:
            work = Work.of([chunk[2:5] for chunk in batch.chunks], work.window)
        self._totals.add(work, stage_seconds, step.finished - self._busy_since)
        self._busy_since = step.finished
        if self.keep_steps:
            self._steps.append(StepMetrics.of(step))
