"""Decodes that repeat those of the steps before: how often they can, and a core that is moved past them."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List

import numpy as np

from longctx.serving.engine.core import Core
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.scheduler.sequence import Sequence, completion_of


def count_repeats(core: Core, through_pages: bool = False) -> int:
    """Count how often the batches in the stages can repeat, see `advance`; 0 if the next step may differ.

    Args:
      through_pages: whether sequences may get pages meanwhile, and complete them: what completes them is known
        without tokens.
    """
    running, stages = core.scheduler.running, core.in_flight.in_stages
    if core.leases or not core.scheduler.only_decodes:
        return 0
    batches = (*stages, *core.in_flight)
    if sum(len(batch.chunks) for batch in stages) != len(running.decoding) or any(
        batch.blocked or not all(chunk.decodes for chunk in batch.chunks) for batch in batches
    ):
        return 0
    plain = min([_plain_tokens(core, each, False) for each in running.decoding])
    if not through_pages or core.pool.listener is not None or core.pool.windows is not None:
        return plain
    most = settled_repeats(core, min([_plain_tokens(core, each, True) for each in running.decoding]))
    return most if most > plain and _completes_new_pages(core, most) else plain


def settled_repeats(core: Core, count: int) -> int:
    """Return the most repetitions, at most `count`, after which no page waits to be offered for sharing.

    A page is offered with the next token, if its last one was not planned when its token came.
    """
    if core.page_hash is None or not count:
        return count
    size = core.page_hash.page_size
    full = {-completion_of(each).num_known % size for each in core.scheduler.running.decoding}
    while count and count % size in full:
        count -= 1
    return count


def _completes_new_pages(core: Core, count: int) -> bool:
    """Whether no page that sequences complete within `count` tokens can be found already."""
    if core.page_hash is None:
        return True
    found, first = list[Key](), 0
    for sequence in core.scheduler.running.decoding:
        keys, first = list(sequence.keys), len(sequence.keys)
        completion_of(sequence).keys_after(keys, core.page_hash, count)
        found += keys[first:]
    return len({*found}) == len(found) and core.pool.finds_none(found)


def advance(
    core: Core,
    count: int,
    ends: Mapping[int, np.ndarray],
    seconds: Callable[[int], float],
    predicted: List[float],
    now: float,
) -> None:
    """Advance as if the batches in the stages had been repeated, each time with the next token of each sequence.

    This is the same as to begin and to end each of these steps in the core.

    Args:
      count: how often, at most `count_repeats`.
      ends: when the steps end, float64 `[count]` of seconds, by the number of the batch that is repeated.
      seconds: that a batch takes in a stage, by its number.
      predicted: seconds of the steps that end meanwhile.
      now: when the last of them ends.
    """
    _take_pages(core, count)
    longest = {number: float(np.diff(each).max(initial=0.0)) for number, each in ends.items()}
    for batch in core.in_flight.in_stages:
        for sequence in batch.sampled:
            completion_of(sequence).advance(ends[batch.index], longest[batch.index])
    core.in_flight.advance(count, seconds)
    core.scheduler.advance(count, core.in_flight.in_stages, predicted)
    page_hash = core.page_hash
    for sequence in core.scheduler.running.decoding if page_hash is not None else ():
        completion = completion_of(sequence)
        assert page_hash is not None
        if len(sequence.keys) < completion.num_known // page_hash.page_size:
            completion.extend_keys(sequence.keys, page_hash)
        if sequence.registered < len(sequence.keys):
            core.scheduler.running.register(sequence)
    core.counts["output_tokens"] += count * len(core.scheduler.running.decoding)
    core.now = now


def _take_pages(core: Core, count: int) -> None:
    """Take the pages that repeated batches need, in the order in which they would be taken one by one."""
    running, stage, taken = core.scheduler.running, core.scheduler.plan.stage, []
    places = {sequence: place for place, sequence in enumerate(running.decoding)}
    for batch in core.in_flight.in_stages:
        for sequence in batch.sampled:
            first = len(sequence.pages) * running.page_size - sequence.computed
            for number in range(first, count, running.page_size):
                taken.append((batch.index + (number + 1) * stage, places[sequence], sequence.computed + number))
    for _, place, start in sorted(taken):
        running.extend(running.decoding[place], start + 1, start)


def _plain_tokens(core: Core, sequence: Sequence, through_pages: bool) -> int:
    """Return how many tokens a sequence can get before it ends, and has to wait for a page, or completes one."""
    size = core.scheduler.running.page_size
    left = sequence.prompt_length + sequence.max_tokens - sequence.length
    pages = len(sequence.pages) + (sequence.reserved[0] if through_pages else 0)
    room = pages * size - sequence.computed
    if core.page_hash is not None and not through_pages:
        room = min(room, size - 1 - completion_of(sequence).num_known % size)
    return min(left, room)
