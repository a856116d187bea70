"""Sends a workload to an engine, each request when it is due, and keeps what came of it."""

import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from longctx.serving import Engine, EngineStats, Metrics, Request, SamplingParams, StepMetrics
from longctx.simulation.workloads import WorkloadRequest


@dataclass(frozen=True)
class Served:
    """A request that has ended; seconds from the beginning of the workload. `ttft` counts from when it was due."""

    due: float
    metrics: Metrics
    ttft: float
    tpot: float | None

    @property
    def kept_ttft(self) -> bool | None:
        """Whether the first token came in time, from when the request was due."""
        return None if self.metrics.ttft_deadline is None else self.ttft <= self.metrics.ttft_deadline


@dataclass
class Record:
    """What a workload came to: its requests in the order in which they ended, and the engine after each step."""

    seconds: float = 0.0
    served: list[Served] = field(default_factory=list)
    timeline: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, running, waiting
    stats: EngineStats | None = None
    steps: list[StepMetrics] = field(default_factory=list)  # where the engine's monitor appends to it


def replay(
    engine: Engine,
    requests: List[WorkloadRequest],
    clock: Callable[[], float],
    sleep: Callable[[float], None] = time.sleep,
    seed: int = 0,
    progress: Callable[[Record, EngineStats], object] | None = None,
    steps: list[StepMetrics] | None = None,
) -> Record:
    """Serve requests, which are in order of arrival; greedy, and every output as long as asked for.

    A request that is due while a step runs is submitted after it, but its TTFT counts from when it was due.

    Args:
      clock: the engine's own.
      sleep: lets seconds pass on that clock while there is nothing to do.
      seed: of the tokens that are made up.
      progress: is called after every step.
      steps: what the engine's monitor appends to, for the record.
    """
    record, due = Record(steps=[] if steps is None else steps), {}
    vocab_size = engine.model.config.vocab_size
    start, submitted = clock(), 0
    while submitted < len(requests) or engine.has_work:
        now = clock() - start
        while submitted < len(requests) and requests[submitted].arrival <= now:
            request = requests[submitted]
            sampling = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
            due[engine.submit(Request(request.tokens(vocab_size, seed).tolist(), sampling))] = request.arrival
            submitted += 1
        if not engine.has_work:
            sleep(requests[submitted].arrival - now)
            continue
        for event in engine.step():
            if event.output is not None:
                metrics = event.output.metrics
                arrival = due.pop(event.request_id)
                assert metrics.first_token is not None
                record.served.append(Served(arrival, metrics, metrics.first_token - start - arrival, metrics.tpot))
        record.stats = engine.stats()
        record.timeline.append((clock() - start, record.stats.running, record.stats.waiting))
        if progress is not None:
            progress(record, record.stats)
    record.seconds = clock() - start
    return record
