"""Batches and schedulers as text for people."""

from collections.abc import Iterable

from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.sequence import Sequence, State

_MOST_LISTED = 20


def name_of(sequence: Sequence) -> str:
    """The request's id, with the number of the completion if it isn't the first."""
    return sequence.name.removesuffix("/0")


def names(sequences: Iterable[Sequence], most: int = 4) -> str:
    """The names of some sequences, and how many there are besides."""
    listed = [name_of(sequence) for sequence in sequences]
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest


def describe_rows(batch: Batch | None) -> str:
    """Describe what a batch computes, by request."""
    if batch is None or not batch.chunks:
        return "nothing"
    parts = []
    decodes = [chunk.sequence for chunk in batch.chunks if chunk.decodes]
    if decodes:
        parts.append(f"{len(decodes)} decode{'s' * (len(decodes) > 1)} ({names(decodes)})")
    for chunk in batch.chunks:
        if not chunk.decodes:
            ranks = "" if chunk.ranks == (0,) else f" on ranks {', '.join(map(str, chunk.ranks))}"
            parts.append(f"{name_of(chunk.sequence)}: {chunk.num_tokens:,} tokens from {chunk.start:,}{ranks}")
    if batch.admitted:
        parts.append(f"admitted: {names(batch.admitted, _MOST_LISTED)}")
    return "; ".join(parts)


def describe_scheduler(scheduler: Scheduler, batch: Batch | None, now: float, start: float) -> str:
    """The state of a scheduler that has just planned a batch, at `now`; times are shown from `start` on."""
    pool, policy = scheduler.pool, scheduler.chunker.policy
    held = ", ".join(
        f"rank {rank}: {pool.held_on(rank):,} held, {pool.available(rank):,} available"
        for rank in range(pool.num_ranks)
    )
    step = "nothing planned" if batch is None else f"step {batch.index}"
    lines = [f"{step} at {now - start:.6f} s", f"pages    {held} of {pool.per_rank:,} on each rank"]
    slots = scheduler.running.slots
    lines.append(f"slots    {len(slots.free)} free, {len(slots.draining)} resting of {scheduler.running.max_running}")
    for title, sequences in (("running", list(scheduler.running)), ("waiting", scheduler.waiting)):
        lines.append(f"{title}  {len(sequences)}")
        lines += [
            f"  {_describe(sequence, policy.urgency(sequence, now), now)}" for sequence in sequences[:_MOST_LISTED]
        ]
        if len(sequences) > _MOST_LISTED:
            lines.append(f"  and {len(sequences) - _MOST_LISTED} more")
    lines.append(f"batch    {describe_rows(batch)}")
    if batch is not None:
        lines.append(f"predicted {1e3 * batch.predicted:.3f} ms")
    return "\n".join(lines)


def _describe(sequence: Sequence, urgency: float, now: float) -> str:
    done = f"{sequence.computed:,} of {sequence.length:,} tokens computed, {len(sequence.pages):,} pages"
    parts = [f"{name_of(sequence)}: {sequence.state.value}, {done}"]
    if sequence.state is not State.DECODING and sequence.length == sequence.prompt_length:
        parts.append(f"first token due in {sequence.deadline - now:.3f} s")
        parts.append(f"urgency {urgency:.4f}")
    if sequence.priority:
        parts.append(f"priority {sequence.priority}")
    if sequence.tenant:
        parts.append(f"tenant {sequence.tenant!r}")
    if sequence.preemptions:
        parts.append(f"preempted {sequence.preemptions} times")
    return ", ".join(parts)
