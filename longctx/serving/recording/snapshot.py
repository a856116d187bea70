"""Snapshots of engines without requests: where a file of a log begins that is not the first."""

from typing import TYPE_CHECKING

from longctx.serving.distributed.digest import pack, unpack
from longctx.serving.kv_cache.page_pool import RankState
from longctx.serving.predictor.work import Work
from longctx.serving.recording.records import LeftBatch, LeftChunk, Snapshot, split_keys
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.serving.scheduler.sequence import Sequence, State

if TYPE_CHECKING:
    from longctx.serving.engine.core import Core


def is_idle(core: "Core") -> bool:
    """Whether a core has no request, and no page to store. Batches may be in flight whose sequences have ended."""
    scheduler = core.scheduler
    return not (scheduler.running or scheduler.waiting or scheduler.stores or scheduler.loads.dropped or core.leases)


def take_snapshot(core: "Core", now: float) -> Snapshot:
    """All that the decisions of a core without requests will follow from."""
    scheduler = core.scheduler
    slots, chunker = scheduler.running.slots, scheduler.chunker
    return Snapshot(
        now=now,
        steps=scheduler.num_steps,
        slots=(slots.free.copy(), list(slots.draining)),
        pages=[(pack("i", free), pack("i", idle), b"".join(keys)) for free, idle, keys in core.pool.state()],
        factor=scheduler.forecast.factor,
        windows=chunker.predictor.state(),
        chunker=chunker.state(),
        tenants=chunker.tenants.state(),
        in_flight=[
            LeftBatch(batch.index, batch.predicted, batch.work, tuple(map(_left, batch.chunks)))
            for batch in core.in_flight
        ],
        load_seconds=scheduler.loads.seconds_per_page,
    )


def _left(chunk: Chunk) -> LeftChunk:
    _, slot, start, num_tokens, samples, decodes, ranks, sharded = chunk
    return slot, start, num_tokens, samples, decodes, ranks, sharded


def restore_snapshot(core: "Core", snapshot: Snapshot) -> list[Batch]:
    """Let a new core know what another did; the batches that an executor has to be given, in order.

    The new one may have other numbers of pages and slots; what fits is restored then.

    Raises:
      ValueError: the snapshot is of an engine with other ranks.
    """
    scheduler = core.scheduler
    slots, chunker = scheduler.running.slots, scheduler.chunker
    scheduler.num_steps = snapshot.steps
    free, resting = snapshot.slots
    if len(free) + len(resting) == scheduler.running.max_running:
        slots.free = free.copy()
        slots.draining.extend(resting)
    pages = [RankState(unpack("i", free), unpack("i", idle), split_keys(keys)) for free, idle, keys in snapshot.pages]
    core.pool.restore(pages)
    scheduler.forecast.factor = snapshot.factor
    scheduler.loads.seconds_per_page = snapshot.load_seconds
    chunker.predictor.restore(snapshot.windows)
    chunker.restore(*snapshot.chunker)
    chunker.tenants.restore(*snapshot.tenants)
    batches = []
    for left in snapshot.in_flight:
        chunks = [Chunk(_ended(), *chunk) for chunk in left.chunks]
        batches.append(Batch(left.index, chunks, work=Work(*left.work), predicted=left.predicted))
        core.in_flight.append(batches[-1])
    return batches


def _ended() -> Sequence:
    """Return a sequence that has ended, whose samples are dropped."""
    return Sequence("ended before", -1, prompt_length=1, max_tokens=1, state=State.FINISHED)
