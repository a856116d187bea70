"""Measures an engine's steps, and fits its runtime predictor to them."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from longctx.kernels.paged_attention.xla import tile_sizes
from longctx.models import Llama
from longctx.models.layer_runs import layers_per_stage, most_full_layers
from longctx.models.params import Params
from longctx.parallel.topology import find_topology
from longctx.serving.config import EngineConfig
from longctx.serving.engine.engine import Engine
from longctx.serving.executor.interface import Executor
from longctx.serving.kv_cache.placement import Grown, Interleaved, Placement
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.fit import Measurement, fit
from longctx.serving.predictor.measured import RuntimePredictor
from longctx.serving.predictor.work import Work
from longctx.serving.request.completion import Completion, Detokenizer
from longctx.serving.request.output import Metrics
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.batch import Batch, Chunk, TableRun, work_by_rank
from longctx.serving.scheduler.exchange_rule import Exchange
from longctx.serving.scheduler.sequence import Sequence

_OF_A_BUCKET = 8  # batches of a kind and a bucket, on several ranks
LOCAL, REPLICATED, SHARDED = "local", "replicated", "sharded"


class BatchShape(NamedTuple):
    """A batch of `decodes` sequences with `decode_context` tokens each, and a prefill chunk at `chunk_start`.

    Decodes and chunk are counted on each context rank: of local ones every rank has as many, or where not `even`, the
    first rank alone; replicated ones are on all ranks; a sharded chunk has that many rows on each and takes `exchange`.
    """

    decodes: int
    decode_context: int
    chunk: int
    chunk_start: int
    decode_kind: str = LOCAL
    chunk_kind: str = LOCAL
    even: bool = True
    exchange: str = ""

    @property
    def rows(self) -> int:
        """Return the rows of a rank."""
        return self.decodes + self.chunk


def kinds_of(engine: Engine) -> list[tuple[str, str, bool, str]]:
    """Return the batches of a plan: kinds of decodes and chunks, whether all ranks have local ones, the exchange."""
    plan = engine.plan
    if plan.context == 1:
        return [(LOCAL, LOCAL, True, "")]
    exchanges = ["pass_kv", "pass_q"] + ["all_gather"] * (plan.exchange == "auto")
    if plan.exchange in ("pass_kv", "pass_q", "all_gather"):
        exchanges = [plan.exchange]
    if plan.placement == "interleave" and plan.shards_rows:
        # Decodes go by pass-Q, and beside keys that travel they are replicated.
        beside = [(REPLICATED, SHARDED, True, exchange) for exchange in exchanges if exchange != "pass_q"]
        return [(SHARDED, SHARDED, True, "pass_q"), *beside]
    if plan.placement == "interleave":
        return [(REPLICATED, REPLICATED, True, "")]
    kinds = [(LOCAL, LOCAL, True, ""), (LOCAL, LOCAL, False, ""), (LOCAL, REPLICATED, True, "")]
    kinds += [(REPLICATED, LOCAL, True, ""), (REPLICATED, REPLICATED, True, "")]
    if plan.shards_rows:
        kinds += [(kind, SHARDED, True, exchange) for kind in (LOCAL, REPLICATED) for exchange in exchanges]
    return kinds


def buckets_of(engine: Engine) -> tuple[int, ...]:
    """Numbers of rows of each kind that steps are compiled for."""
    return engine.config.row_buckets if engine.plan.context == 1 else engine.config.growing_buckets(8)


def longest_context(engine: Engine) -> int:
    """Tokens of the longest sequence on one rank that an engine can be measured with."""
    return min(engine.max_length - 1, engine.num_pages * engine.config.page_size)


def tiles(engine: Engine) -> tuple[int, ...]:
    """Tile sizes of attention on a CPU, in tokens; those of GPU kernels are close enough to fit their times."""
    model = engine.model.config
    return tile_sizes(engine.config.token_budget, model.num_heads // model.num_kv_heads)


def shapes_to_measure(engine: Engine, max_context: int) -> list[BatchShape]:
    """For every bucket: chunks of every tile size and decodes, alone and together, after short and long contexts.

    On several context ranks so for every kind of rows, some of them drawn at random: there are more of them all, and
    a kind has coefficients that all of its buckets share.

    Raises:
      ValueError: the engine has no room for a batch of some bucket.
    """
    shapes: set[BatchShape] = set()
    rng = np.random.default_rng(0)
    for kinds in kinds_of(engine):
        below = 0
        for rows in buckets_of(engine):
            found = {BatchShape(*shape, *kinds) for shape in _sizes(engine, max_context, below, rows)}
            found = {shape for shape in found if below < shape.rows <= rows and fits(engine, shape)}
            if not found and engine.plan.context == 1:
                raise ValueError(
                    f"no batch of {below + 1} to {rows} rows fits into {engine.num_pages} pages and sequences of "
                    f"{engine.max_length} tokens: num_pages or max_length must be larger, or buckets smaller"
                )
            if engine.plan.context > 1:
                ordered = sorted(found)
                found = {ordered[i] for i in rng.permutation(len(ordered))[:_OF_A_BUCKET]}
            shapes |= found
            below = rows
    return sorted(shapes)


def _sizes(engine: Engine, max_context: int, below: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Decodes, their context, chunks, and what is before them, for a bucket; not all fit."""
    config, sizes = engine.config, tiles(engine)
    pool = engine.num_pages * config.page_size
    beside = max(0, min(config.max_running, rows) - 1)  # decodes of a batch with a chunk
    for size in {*sizes[1:], *(sizes[-1] + size for size in sizes[1:-1]), below + 1, rows, rows - beside}:
        for start in (0, max_context // 4, max_context - size):
            yield 0, 0, size, start
            yield beside, config.page_size, size, start
        fitting = min(beside, (pool - max_context) // (max_context // 4 + config.page_size))
        for start in (0, max_context // 2):
            yield fitting, max_context // 4, size, start
    for context in (0, config.page_size, max_context // 8, max_context // 2):
        fitting = max(1, min(config.max_running, pool // (context + config.page_size)))
        for count in (below + 1, rows):
            yield min(fitting, count), context, 0, 0


def random_shapes(engine: Engine, max_context: int, count: int, seed: int = 0) -> list[BatchShape]:
    """Random batches on which to evaluate a predictor, of all kinds; the fit rarely has the same ones."""
    rng: Any = np.random.default_rng(seed)
    config, kinds = engine.config, kinds_of(engine)
    least, most = np.log(min(16, max_context)), np.log(max(1, max_context // 2, min(16, max_context)))
    shapes: list[BatchShape] = []
    while len(shapes) < count:
        decodes = int(rng.integers(0, config.max_running))
        decode_context = int(np.exp(rng.uniform(least, most)))
        chunk = int(rng.integers(0, config.token_budget - decodes + 1)) * bool(rng.random() < 0.8)
        start = int(rng.integers(0, max(1, max_context - chunk)))
        shape = BatchShape(decodes, decode_context, chunk, start, *kinds[len(shapes) % len(kinds)])
        if shape.rows and fits(engine, shape):
            shapes.append(shape)
    return shapes


class _Part(NamedTuple):
    """A sequence of a batch: tokens before its chunk, tokens of the chunk, on which ranks, and whether it decodes."""

    start: int
    tokens: int
    ranks: tuple[int, ...]
    kind: str
    decodes: bool


def _parts(engine: Engine, shape: BatchShape) -> list[_Part]:
    every = tuple(range(engine.plan.context))
    parts = []
    for kind, number, start, count, decodes in (
        (shape.decode_kind, shape.decodes, shape.decode_context, 1, True),
        (shape.chunk_kind, int(shape.chunk > 0), shape.chunk_start, shape.chunk, False),
    ):
        if kind == LOCAL:
            on = every if shape.even else every[:1]
            parts += [_Part(start, count, (rank,), kind, decodes) for rank in on for _ in range(number)]
        elif kind == REPLICATED:
            parts += [_Part(start, count, every, kind, decodes)] * number
        elif decodes:  # one row each, which go round the ranks
            parts += [_Part(start, 1, every, kind, True)] * (number * len(every))
        else:
            parts += [_Part(start, count * len(every), every, kind, False)] * number
    return parts


def _placement(engine: Engine, part: _Part, number: int) -> Placement:
    """Pages of several ranks are spread evenly: round, or as much on each as if it had grown."""
    plan, pages = engine.plan, -(-(part.start + part.tokens) // engine.config.page_size)
    if len(part.ranks) == 1:
        return Grown(plan.context, [(0, part.ranks[0])])
    if plan.placement == "interleave" or pages < plan.context:
        return Interleaved(plan.context, number % plan.context)
    return Grown(plan.context, [(math.ceil(rank * pages / plan.context), rank) for rank in part.ranks])


def fits(engine: Engine, shape: BatchShape) -> bool:
    """Whether the engine's scheduler could make such a batch."""
    config = engine.config
    if shape.chunk < 0 or shape.chunk_start < 0:
        return False
    sharded = shape.decodes * (shape.decode_kind == SHARDED) + shape.chunk * (shape.chunk_kind == SHARDED)
    if sharded > config.sharded_buckets[-1]:
        return False
    parts = _parts(engine, shape)
    used = [0] * engine.plan.context
    for number, part in enumerate(parts):
        stop = part.start + part.tokens
        if stop > min(engine.max_length - 1, len(part.ranks) * engine.num_pages * config.page_size):
            return False
        counts = _placement(engine, part, number).counts(0, -(-stop // config.page_size))
        used = [x + y for x, y in zip(used, counts, strict=True)]
    return len(parts) <= config.max_running and max(used) <= engine.num_pages and shape.rows <= config.token_budget


def make_batch(engine: Engine, shape: BatchShape) -> Batch:
    """Make a batch of sequences with the first pages of each rank; what these hold does not matter."""
    batch, used, per_rank, windows = Batch(0), [0] * engine.plan.context, engine.num_pages, engine.core.pool.windows
    for slot, part in enumerate(_parts(engine, shape)):
        sequence = _sequence(slot, part.start + part.tokens)
        placement = _placement(engine, part, slot)
        pages = -(-(part.start + part.tokens) // engine.config.page_size)
        for number in range(pages):
            rank = placement.rank(number)
            sequence.pages.append(rank * per_rank + used[rank])
            used[rank] += 1
        sequence.placement, sequence.rank_pages = placement, placement.counts(0, pages)
        sequence.ranks = tuple(rank for rank, count in enumerate(sequence.rank_pages) if count)
        is_sharded = part.kind == SHARDED
        batch.admitted.append(sequence)
        if windows is not None:
            places = (divmod(page, per_rank) for page in sequence.pages)
            sequence.window_pages = [rank * windows.per_rank + page % windows.per_rank for rank, page in places]
        batch.tables.append(TableRun(slot, 0, sequence.pages, sequence.window_pages))
        # The prefill chunk samples no token, like one inside a prompt.
        ranks = part.ranks if is_sharded else engine.plan.computing_ranks(sequence.ranks)
        chunk = Chunk(sequence, slot, part.start, part.tokens, part.decodes, part.decodes, ranks, is_sharded)
        batch.chunks.append(chunk)
    if any(chunk.sharded for chunk in batch.chunks):
        batch.exchange = Exchange(shape.exchange, "measured")
    return batch


def _sequence(slot: int, length: int) -> Sequence:
    params = SamplingParams(max_tokens=1)
    tokens = np.zeros(length + 1, np.int32)
    text, metrics = Detokenizer(None, ()), Metrics(0.0, length)
    request = Request([0], params)
    completion = Completion(request, f"profile-{slot}", 0, length, tokens, 0, frozenset(), text, metrics, None)
    return Sequence(completion.request_id, slot, length, 1, completion=completion, slot=slot)


def subject(model: Llama, params: Params, config: EngineConfig, plan: ParallelPlan | None = None) -> dict[str, Any]:
    """Everything that an engine's times depend on, for `save_profile` and `load_profile`."""
    shape = dataclasses.asdict(model.config)
    names = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    device = min(params["embed"].devices(), key=lambda device: device.id)
    found: dict[str, Any] = {name: shape[name] for name in names} | {
        "dtype": str(params["embed"].dtype),
        "device": device.device_kind if device.platform != "cpu" else f"CPU, {os.cpu_count()} threads",
        "kv_dtype": config.kv_dtype,
        "page_size": config.page_size,
        "max_running": config.max_running,
        "buckets": list(config.row_buckets),
    }
    if plan is not None and plan.num_devices > 1:
        found["plan"] = {name: getattr(plan, name) for name in ("stage", "context", "tensor", "exchange", "placement")}
    return found


def links(engine: Engine) -> dict[str, str]:
    """The names of the links that the axes of an engine's mesh were found to have, for the notes of a profile."""
    topology = find_topology(engine.mesh)
    return {axis: link.name for axis, link in topology.links.items() if getattr(engine.plan, axis) > 1}


def profile(
    engine: Engine,
    max_context: int | None = None,
    repeats: int = 5,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[RuntimePredictor, list[Measurement]]:
    """Measure batches of all sizes, and on several context ranks of all kinds of rows, and fit an engine's predictor.

    Args:
      engine: it must be idle.
      max_context: the longest context to measure on one rank, in tokens. None: 16,384, or less if the engine has no
        room for it.
      repeats: how often each batch runs; its median time counts.
      progress: called with (runs done, all runs).

    Returns:
      The predictor, and the measured batches.

    Raises:
      RuntimeError: the engine has work, or other processes take part.
      ValueError: max_context or repeats is out of range, or the engine has no room for a batch of some bucket.
    """
    room = longest_context(engine)
    if max_context is not None and not 1 <= max_context <= room:
        raise ValueError(f"max_context must be 1 to {room}, the longest sequence of the engine, got {max_context}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    shapes = shapes_to_measure(engine, min(max_context or 16_384, room))
    measured = measure(engine, shapes, repeats, progress)
    model, stages = engine.model.config, engine.plan.stage
    share = 1 - most_full_layers(model, stages) / layers_per_stage(model.num_layers, stages)
    return fit(measured, buckets_of(engine), tiles(engine), model.sliding_window or 0, share), measured


def measure(
    engine: Engine,
    shapes: List[BatchShape],
    repeats: int = 5,
    progress: Callable[[int, int], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    statistic: Callable[[list[float]], float] = median,
) -> list[Measurement]:
    """Run batches on an idle engine; returns the work of the slowest rank and the median seconds of each.

    A batch is measured as a step is in use, where the next one is submitted while it runs: from the end of one to the
    end of an equal one. So the host's work counts only where it takes longer than the device's. With several stages
    there is such a batch in each of them.

    All batches take turns in random order, so that a time in which the machine is slower affects all of them alike.

    Args:
      statistic: of the seconds of a batch's runs; `min` on a machine that others use too.

    Raises:
      RuntimeError: the engine has work, or other processes take part.
    """
    rng = np.random.default_rng(0)
    times: list[list[float]] = [[] for _ in shapes]
    works = [Work()] * len(shapes)
    order = [int(i) for _ in range(repeats) for i in rng.permutation(len(shapes))]
    with engine.lend_executor() as executor:
        for done, i in enumerate(order):
            batch = make_batch(engine, shapes[i])
            seconds, exchange = _time(executor, batch, engine.plan.stage, clock)
            times[i].append(seconds)
            sizes = engine.plan.context, engine.config.page_size
            ranks = work_by_rank(batch.chunks, *sizes, exchange, engine.model.config.sliding_window or 0)
            works[i] = max(ranks, key=lambda work: (work.pairs, work.rows))
            if progress is not None:
                progress(done + 1, len(order))
    return list(zip(works, map(statistic, times), strict=True))


def _time(executor: Executor, batch: Batch, stages: int, clock: Callable[[], float]) -> tuple[float, str]:
    """Seconds of a step with such a batch in all stages, and the exchange of its sharded rows."""
    before = [executor.submit(batch)]  # compiles and writes the page tables, which is not timed
    batch = dataclasses.replace(batch, tables=[], admitted=[])
    before += [executor.submit(batch) for _ in range(stages)]
    executor.wait(before[0])
    start = clock()
    after = executor.submit(batch)
    executor.wait(before[1])
    seconds = clock() - start
    for idle in range(stages - 1):  # the others leave the pipeline
        executor.submit(Batch(idle))
    for pending in (*before[2:], after):
        executor.wait(pending)
    # Programs of few sharded rows may have pass-Q alone, whatever was asked for.
    packed = getattr(after, "packed", None)
    return seconds, packed[0].exchange if packed is not None and packed[0].sharded else ""
