"""An engine in virtual time: the core that serves, driven by a clock that jumps. No JAX, no device."""

import math
from collections.abc import Callable
from collections.abc import Sequence as List

from longctx.models.config import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving.config import EngineConfig
from longctx.serving.engine.build import build_core
from longctx.serving.engine.metrics import StepMetrics
from longctx.serving.engine.run_step import run_step
from longctx.serving.executor.submit_queue import SubmitQueue
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.runtime import Predictor, check_predictor
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence
from longctx.simulation.record import Record, Served
from longctx.simulation.virtual_executor import VirtualExecutor
from longctx.simulation.workloads import WorkloadRequest


class Simulation:
    """Serves workloads in virtual time, one after another.

    Args:
      model: its sizes are what requests are checked against.
      config: of the engine; `num_pages` must be given.
      predictor: what the scheduler goes by, and unless `seconds` is given, how long batches take.
      plan: of the devices. None: one device.
      seconds: that a batch takes in one stage.
      topology: by which exchanges are chosen where the predictor does not know them.

    Raises:
      ValueError: the configuration has no `num_pages`, or it contradicts the model, the plan or the predictor.
    """

    def __init__(
        self,
        model: LlamaConfig,
        config: EngineConfig,
        predictor: Predictor,
        plan: ParallelPlan | None = None,
        seconds: Callable[[Batch], float] | None = None,
        topology: Topology | None = None,
    ) -> None:
        if config.num_pages is None:
            raise ValueError("num_pages must be given: there is no device whose memory would say it")
        plan = plan or ParallelPlan()
        plan.check(model, plan.num_devices)
        max_length = config.longest_sequence(model.max_positions)
        check_predictor(predictor, config.token_budget)
        self.core, self._input_processor, self._sequence_maker = build_core(
            model, config, plan, predictor, config.num_pages, max_length, topology=topology
        )
        self._vocab_size = model.vocab_size
        self.executor = VirtualExecutor(
            seconds or (lambda batch: predictor.seconds(batch.work)), model.vocab_size, plan.stage
        )
        self._queue = SubmitQueue(self.executor, self.executor.clock, plan.stage)
        self._num_requests, self._max_length = 0, max_length
        self._open: dict[str, list[Sequence]] = {}

    def run(
        self,
        requests: List[WorkloadRequest],
        seed: int = 0,
        progress: Callable[[Record], object] | None = None,
    ) -> Record:
        """Serve requests, which are in order of arrival; greedy, and every output as long as asked for.

        Args:
          seed: of the tokens that are made up.
          progress: is called after every step.

        Raises:
          TypeError, ValueError: a request can't be served, or comes before the one before it; none is begun then.
        """
        self._check(requests)
        try:
            return self._run(requests, seed, progress)
        finally:
            self._cancel_all()

    def _run(self, requests: List[WorkloadRequest], seed: int, progress: Callable[[Record], object] | None) -> Record:
        record, executor = Record(), self.executor
        start, submitted, dues = executor.now, 0, dict[str, float]()
        while submitted < len(requests) or dues:
            while submitted < len(requests) and start + requests[submitted].arrival <= executor.now:
                request = requests[submitted]
                dues[self._add(request, start + request.arrival, seed)] = request.arrival
                submitted += 1
            for loaded in executor.poll_loads():
                self.core.end_load(loaded)
            step = run_step(self.core, self._queue, executor.now)
            if step is None:
                if self.core.scheduler.loads:
                    continue
                executor.now = max(executor.now, start + requests[submitted].arrival)
                continue
            record.steps.append(StepMetrics.of(step))
            for event in self.core.end(step.batch, step.results, step.finished, step.seconds):
                if event.output is not None:
                    del self._open[event.request_id]
                    record.served.append(Served.of(event.output.metrics, dues.pop(event.request_id), start))
            record.stats = self.core.stats()
            record.timeline.append((executor.now - start, record.stats.running, record.stats.waiting))
            if progress is not None:
                progress(record)
        record.seconds = executor.now - start
        return record

    def _add(self, request: WorkloadRequest, arrival: float, seed: int) -> str:
        """Let a request wait from the time on at which it is due."""
        request_id = f"request-{self._num_requests}"
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        tokens: list[int] = request.tokens(self._vocab_size, seed)  # type: ignore[assignment]
        prepared = self._input_processor.prepare(Request(tokens, sampling))
        self._open[request_id] = self._sequence_maker.make(prepared, request_id, arrival)
        self.core.add(self._open[request_id])
        return request_id

    def _check(self, requests: List[WorkloadRequest]) -> None:
        """Check what needs no tokens, before the clock moves."""
        before = 0.0
        for number, request in enumerate(requests):
            if not before <= request.arrival < math.inf:
                raise ValueError(f"requests[{number}] must arrive at {before} or later, got {request.arrival}")
            if request.length > self._max_length:
                raise ValueError(
                    f"requests[{number}] has {request.length} tokens, more than the {self._max_length} of the longest"
                )
            self.core.scheduler.check(request.prompt_tokens, request.output_tokens)
            before = request.arrival

    def _cancel_all(self) -> None:
        """Cancel what an error has left, and wait for its batches."""
        for sequences in self._open.values():
            for sequence in sequences:
                self.core.cancel(sequence)
        self._open.clear()
        while (step := run_step(self.core, self._queue, self.executor.now)) is not None:
            self.core.end(step.batch, step.results, step.finished, None)
