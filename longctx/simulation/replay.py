"""Sends a workload to an engine, each request when it is due, and keeps what came of it."""

import time
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import TYPE_CHECKING

from longctx.serving.engine.metrics import EngineStats
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.simulation.record import Record, Served
from longctx.simulation.workloads import WorkloadRequest

if TYPE_CHECKING:
    from longctx.serving.engine.engine import Engine


def replay(
    engine: "Engine",
    requests: List[WorkloadRequest],
    clock: Callable[[], float],
    sleep: Callable[[float], None] = time.sleep,
    seed: int = 0,
    progress: Callable[[Record, EngineStats], object] | None = None,
    record: Record | None = None,
) -> Record:
    """Serve requests, which are in order of arrival; greedy, and every output as long as asked for.

    A request that is due while a step runs is submitted after it, but it arrived, for its metrics and deadline, when it
    was due: to a server it would have come then.

    Args:
      clock: the engine's own.
      sleep: lets seconds pass on that clock while there is nothing to do.
      seed: of the tokens that are made up.
      progress: is called after every step.
      record: is filled, so that an interrupt leaves what came until then; the engine's monitor may append to its
        `steps`. None: a new one.
    """
    record = Record() if record is None else record
    open_requests: dict[str, WorkloadRequest] = {}
    vocab_size = engine.model.config.vocab_size
    start, submitted = clock(), 0
    while submitted < len(requests) or engine.has_work:
        now = clock() - start
        while submitted < len(requests) and requests[submitted].arrival <= now:
            request = requests[submitted]
            sampling = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
            prepared = Request(request.tokens(vocab_size, seed).tolist(), sampling)
            open_requests[engine.submit(prepared, min(start + request.arrival, clock()))] = request
            submitted += 1
        if not engine.has_work:
            sleep(requests[submitted].arrival - now)
            continue
        for event in engine.step():
            if event.output is not None and event.output.finish_reason == "error":
                record.failed += 1
            elif event.output is not None:
                request = open_requests.pop(event.request_id)
                record.served.append(Served.of(event.output.metrics, request.arrival, start, request.number))
        record.stats, record.seconds = engine.stats(), clock() - start
        record.timeline.append((record.seconds, record.stats.running, record.stats.waiting))
        if progress is not None:
            progress(record, record.stats)
    record.seconds = clock() - start
    return record
