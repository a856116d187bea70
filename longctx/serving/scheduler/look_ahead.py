"""Prediction of a new request's first token, and of what it waits for, by running a copy of the scheduler ahead."""

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Literal, NamedTuple

from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.sequence import Sequence, State

# Steps that are run ahead at most. A step takes some 0.1 ms to plan, more where a thousand wait.
MAX_STEPS = 400

Bound = Literal["slots", "pages", "queue", "prefill"]
"""What a request spends most of its time to the first token on: waiting for a slot, for pages, for those before it to
be computed or admitted, or its own prompt."""

_WAITS_FOR: dict[Bound, str] = {
    "slots": "a free slot: as many sequences run as may",
    "pages": "free pages",
    "queue": "requests before it",
    "prefill": "its own prompt to be computed",
}


class TtftEstimate(NamedTuple):
    """A prediction.

    Attributes:
      first_token: seconds until the first token; None: it does not come within those that were looked ahead.
      looked: seconds that were looked ahead: to the first token, the horizon, or as far as `MAX_STEPS` go.
      bound: what the request waits for most of the time.
    """

    first_token: float | None
    looked: float
    bound: Bound

    def is_after(self, deadline: float) -> bool:
        """Return whether the first token is known to come after `deadline` seconds."""
        return self.looked > deadline

    def __str__(self) -> str:
        when = f"in {self.looked:.3g} s" if self.first_token is not None else f"not before {self.looked:.3g} s"
        return f"{when}, by prediction, as it waits for {_WAITS_FOR[self.bound]}"


def copy_scheduler(scheduler: Scheduler) -> Scheduler:
    """A copy of a scheduler to be run ahead: it plans the same steps.

    Args:
      scheduler: of an engine. No step may be in planning. What does not change is shared with the copy.

    Returns:
      The copy.

    Examples:
      >>> from longctx.models import load_checkpoint, load_tokenizer
      >>> from longctx.models.builtin import TINY
      >>> from longctx.serving import Engine, EngineConfig, Request
      >>> from longctx.serving.scheduler.look_ahead import copy_scheduler
      >>> config = EngineConfig(num_pages=64, token_budget=64, max_running=2, max_length=1024)
      >>> engine = Engine(*load_checkpoint(TINY), config, tokenizer=load_tokenizer(TINY))
      >>> _ = engine.submit(engine.prepare(Request("x" * 100)))
      >>> batch = copy_scheduler(engine.scheduler).schedule(now=engine.now())
      >>> [chunk.num_tokens for chunk in batch.chunks]
      [64]
    """
    chunker = scheduler.chunker
    shared = (chunker.predictor, chunker.policy, chunker.plan, chunker.chunking, chunker.rule)
    return copy.deepcopy(scheduler, {id(part): part for part in shared})


def look_ahead(
    scheduler: Scheduler,
    newcomers: List[Sequence],
    copied: float,
    now: float,
    horizon: float,
    length_at_end: Callable[[Sequence], int],
    is_enough: Callable[[], bool] = lambda: False,
) -> TtftEstimate:
    """Run a copy of a scheduler until the last one of some new sequences would get its first token, by prediction.

    Args:
      scheduler: is used up.
      newcomers: not in the copy; they have been checked (`Scheduler.check`).
      copied, now: when the copy was made, and the newcomers come: what has been done in between is run first.
      horizon: seconds from `now` to look ahead at most.
      length_at_end: tokens that a sequence will have when it ends, at most prompt and max_tokens.
      is_enough: says when to stop looking.
    """
    sequence, clock, has_entered = newcomers[-1], copied, False
    for other in tuple(scheduler.running):  # steps and loads in flight end at once
        if other.state is State.LOADING:
            _end_load(scheduler, other)
        other.in_flight = 0
        if other.is_drained:
            scheduler.finish(other)
    waited = defaultdict[Bound, float](float)
    stages = scheduler.plan.stage
    in_stages: deque[Batch] = deque(maxlen=stages)  # a tick takes as long as the slowest of them
    first: float | None = None
    for _ in range(MAX_STEPS):
        if clock >= now and not has_entered:
            has_entered = True
            for newcomer in newcomers:
                scheduler.add(newcomer)
        if first is not None or clock - now > horizon or is_enough():
            break
        batch = scheduler.schedule(clock)
        if batch is None:
            if not has_entered:
                clock = now
                continue
            batch = scheduler.idle()  # while tokens are in later stages
        for load in batch.loads:
            scheduler.loads.end(Loaded(load.name, len(load.pages), 0.0))
        in_stages.append(batch)
        seconds = max(each.predicted for each in in_stages)
        clock += seconds
        waited[_bound(scheduler, sequence, batch)] += seconds
        for other in in_stages[0].sampled if len(in_stages) == stages else ():
            if other is sequence:
                first = clock - now
            elif other.state is not State.FINISHED:
                _complete_page(scheduler, other)
                scheduler.receive(other)
                if other.is_running and other.length - other.in_flight >= length_at_end(other):
                    scheduler.finish(other)
    return TtftEstimate(
        first, max(0.0, clock - now), max(waited, key=lambda bound: waited[bound]) if waited else "queue"
    )


def _complete_page(scheduler: Scheduler, sequence: Sequence) -> None:
    """Give a page that the next token completes a key, as the engine does; it is found again after a preemption."""
    known, keys = sequence.length - sequence.in_flight + 1, sequence.keys
    if sequence.may_share and known == (len(keys) + 1) * scheduler.running.page_size:
        sequence.keys = [*keys, b"%d %d" % (sequence.order, known)]


def _end_load(scheduler: Scheduler, sequence: Sequence) -> None:
    pages = scheduler.running.pages_of(sequence.loading_until - sequence.computed)
    scheduler.loads.end(Loaded(scheduler.loads.name_of(sequence), pages, 0.0))


def _bound(scheduler: Scheduler, sequence: Sequence, batch: Batch) -> Bound:
    """Return what a sequence waits for in a step."""
    if sequence.is_running:
        return "prefill" if any(chunk.sequence is sequence for chunk in batch.chunks) else "queue"
    if not scheduler.running.slots.free:
        return "slots"
    needed = scheduler.running.pages_of(sequence.prompt_length + sequence.max_tokens - 1)
    return "pages" if needed > scheduler.pool.num_available else "queue"
