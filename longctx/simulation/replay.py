"""Sends a workload to an engine, each request when it is due, and keeps what came of it."""

import heapq
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import TYPE_CHECKING

from longctx.serving.engine.metrics import EngineStats
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.simulation.record import Record, Served
from longctx.simulation.workloads import WorkloadRequest
from longctx.simulation.workloads.request import check_arrivals

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
    """Serve requests; greedy, and every output as long as asked for.

    Those that follow another one (`WorkloadRequest.after`) come after its end, and not at all if it ends with an error.
    A request that is due while a step runs is submitted after it, but it arrived, for its metrics and deadline, when it
    was due: to a server it would have come then.

    Args:
      engine: no other caller may submit to it.
      requests: in order of arrival; those that follow another one stand anywhere after it.
      clock: the engine's own.
      sleep: lets seconds pass on that clock while there is nothing to do.
      seed: of the tokens that are made up.
      progress: is called after every step.
      record: is filled, so that an interrupt leaves what came until then; the engine's monitor may append to its
        `steps`. None: a new one.

    Returns:
      What came of it.

    Raises:
      ValueError: requests are in another order, or one follows a request that does not stand before it.

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import Engine, EngineConfig
      >>> from longctx.simulation import VirtualExecutor, replay
      >>> from longctx.simulation.workloads import Lengths, closed_loop, synthesize
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # or a real engine, and time.monotonic
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> requests = closed_loop(synthesize(6, Lengths(100, 100), Lengths(10, 10)), users=2)
      >>> record = replay(engine, requests, executor.clock, sleep=lambda seconds: None)
      >>> len(record.served), round(record.seconds, 2)  # two users, three requests each, of ten steps
      (6, 0.34)
    """
    check_arrivals(requests)
    record = Record() if record is None else record
    open_requests: dict[str, tuple[float, WorkloadRequest]] = {}
    vocab_size = engine.model.config.vocab_size
    due = [(request.arrival, order, request) for order, request in enumerate(requests) if request.after is None]
    heapq.heapify(due)
    followers: dict[int, list[tuple[int, WorkloadRequest]]] = {}
    for order, request in enumerate(requests):
        if request.after is not None:
            followers.setdefault(request.after, []).append((order, request))
    start = clock()
    while due or engine.has_work:
        now = clock() - start
        while due and due[0][0] <= now:
            arrival, _, request = heapq.heappop(due)
            sampling = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
            prepared = Request(request.tokens(vocab_size, seed).tolist(), sampling)
            open_requests[engine.submit(prepared, min(start + arrival, clock()))] = arrival, request
        if not engine.has_work:
            sleep(due[0][0] - now)
            continue
        for event in engine.step():
            if event.output is not None and event.output.finish_reason == "error":
                record.failed += 1
            elif event.output is not None:
                arrival, request = open_requests.pop(event.request_id)
                record.served.append(Served.of(event.output.metrics, arrival, start, request.number))
                for order, follower in followers.get(request.number, ()):
                    heapq.heappush(due, (max(follower.arrival, clock() - start + follower.delay), order, follower))
        record.stats, record.seconds = engine.stats(), clock() - start
        record.timeline.append((record.seconds, record.stats.running, record.stats.waiting))
        if progress is not None:
            progress(record, record.stats)
    record.seconds = clock() - start
    return record
