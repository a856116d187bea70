"""Explanation of a wait: the steps in which a request was not computed, and what was computed in them instead."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from longctx.serving.recording.log import RecordedLog
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence, State
from longctx.simulation.incident.replayer import Replayer

_MOST_NAMES = 4


class Span(NamedTuple):
    """Steps, from the first to the last, in which a request did or waited for the same: from when, and how long.

    Attributes:
      start: seconds since the request came.
    """

    first: int
    last: int
    start: float
    seconds: float
    cause: str


def names(sequences: Iterable[Sequence]) -> str:
    """Return the names of some sequences, and how many there are besides; a first completion has its request's id."""
    listed = [sequence.name.removesuffix("/0") for sequence in sequences]
    rest = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return ", ".join(listed[:_MOST_NAMES]) + rest


def explain(log: RecordedLog, request_id: str) -> list[Span]:
    """Replay a log, and return what a request's first completion did and waited for, in order, until it ended.

    Raises:
      ValueError: the log has no step since such a request came, or is damaged.
      Differs: the replay decides otherwise than was recorded.
    """
    replayer, steps = Replayer(log), list[tuple[int, float, str]]()
    sequence: Sequence | None = None
    end = 0.0
    for moment in replayer.run():
        if sequence is None and (request := replayer.engine.requests.get(request_id)) is not None:
            sequence = request.sequences[0]
        if sequence is not None:
            steps += [(batch.index, moment.now, _cause(sequence, batch)) for batch in moment.plans]
            end = moment.now if moment.ended is None else moment.ended.finished
            if sequence.state is State.FINISHED:
                break
    if sequence is None:
        raise ValueError(f"the log has no step since a request {request_id!r} came")
    spans = list[Span]()
    for (step, now, cause), (_, until, _) in itertools.pairwise([*steps, (0, end, "")]):
        if spans and spans[-1].cause == cause:
            spans[-1] = spans[-1]._replace(last=step, seconds=until - sequence.arrival - spans[-1].start)
        else:
            spans.append(Span(step, step, now - sequence.arrival, until - now, cause))
    return spans


def _cause(sequence: Sequence, batch: Batch) -> str:
    own = [chunk for chunk in batch.chunks if chunk.sequence is sequence]
    if own:
        return "decodes" if own[0].decodes else "computes its prompt"
    if sequence.state in (State.DECODING, State.FINISHED):  # its last tokens are in flight
        return "decodes"
    prompts = names(chunk.sequence for chunk in batch.chunks if not chunk.decodes)
    others = f"prompts of {prompts} are computed" if prompts else "decodes alone are computed"
    if any(each is sequence for each in batch.blocked):
        return f"lacks a slot or pages; {others}"
    if sequence.state is State.WAITING:
        return f"waits to be admitted; {others}"
    return f"loads pages, or is passed over; {others}"
