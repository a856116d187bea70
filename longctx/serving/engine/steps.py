"""Running the steps of a core: planning them, submitting them to a queue, and waiting for the oldest."""

from collections.abc import Iterable

from longctx.serving.distributed.orders import DecisionLog
from longctx.serving.engine.core import Core
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue


def run_step(core: Core, queue: SubmitQueue, now: float, logs: Iterable[DecisionLog] = ()) -> EndedStep | None:
    """Begin what can be and wait for the oldest in-flight batch; None if there is none. `Core.end` takes its results.

    Raises:
      RuntimeError: sequences wait that nothing will ever admit.
    """
    if not begin_steps(core, queue, now, logs):
        return None
    return end_step(queue, logs)


def begin_steps(core: Core, queue: SubmitQueue, now: float, logs: Iterable[DecisionLog] = ()) -> bool:
    """Begin what can be; whether a batch is in flight then.

    Raises:
      RuntimeError: sequences wait that nothing will ever admit.
    """
    while (batch := core.begin(now)) is not None:
        for log in logs:
            log.note_plan(batch)
        queue.submit(batch)
    if not queue and core.is_stuck:
        raise RuntimeError("requests are waiting that are never admitted: this is a bug in the scheduler")
    return bool(queue)


def end_step(queue: SubmitQueue, logs: Iterable[DecisionLog] = ()) -> EndedStep:
    """Wait for the oldest in-flight batch."""
    step = queue.wait()
    for log in logs:
        log.note_draw(step.batch, step.results.tokens)
    return step
