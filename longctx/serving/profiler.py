"""Measures an engine's steps, and fits its runtime predictor to them."""

import dataclasses
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from longctx.kernels.paged_attention.xla import tile_sizes
from longctx.models import Llama
from longctx.models.params import Params
from longctx.serving.config import EngineConfig
from longctx.serving.engine.engine import Engine
from longctx.serving.predictor.fit import Measurement, fit
from longctx.serving.predictor.runtime import RuntimePredictor
from longctx.serving.predictor.work import Work
from longctx.serving.request.completion import Completion
from longctx.serving.request.detokenizer import Detokenizer
from longctx.serving.request.output import Metrics
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.batch import Batch, Chunk, TableRun
from longctx.serving.scheduler.rank_work import work_by_rank
from longctx.serving.scheduler.sequence import Sequence


def subject(model: Llama, params: Params, config: EngineConfig) -> dict[str, Any]:
    """Everything that an engine's times depend on, for `save_profile` and `load_profile`."""
    shape = dataclasses.asdict(model.config)
    names = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    devices = params["embed"].devices()
    if len(devices) > 1:
        raise ValueError(f"a profile describes an engine on one device, and the parameters are on {len(devices)}")
    (device,) = devices
    return {name: shape[name] for name in names} | {
        "dtype": str(params["embed"].dtype),
        "device": device.device_kind if device.platform != "cpu" else f"CPU, {os.cpu_count()} threads",
        "page_size": config.page_size,
        "max_running": config.max_running,
        "buckets": list(config.row_buckets),
    }


class BatchShape(NamedTuple):
    """A batch of `decodes` sequences with `decode_context` tokens each, and a prefill chunk at `chunk_start`."""

    decodes: int
    decode_context: int
    chunk: int
    chunk_start: int

    @property
    def rows(self) -> int:
        return self.decodes + self.chunk


def profile(
    engine: Engine,
    max_context: int | None = None,
    repeats: int = 5,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[RuntimePredictor, list[Measurement]]:
    """Measure batches of all sizes on an idle engine, and fit its predictor.

    Args:
      max_context: the longest context to measure, in tokens. None: 16,384, or less if the engine has no room for it.
      repeats: how often each batch runs; its median time counts.
      progress: called with (runs done, all runs).

    Returns:
      The predictor, and the measured batches.

    Raises:
      RuntimeError: the engine has work.
      ValueError: max_context or repeats is out of range, or the engine has no room for a batch of some bucket.
    """
    room = longest_context(engine)
    if max_context is not None and not 1 <= max_context <= room:
        raise ValueError(f"max_context must be 1 to {room}, the longest sequence of the engine, got {max_context}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    shapes = shapes_to_measure(engine, min(max_context or 16_384, room))
    measured = measure(engine, shapes, repeats, progress)
    return fit(measured, engine.config.row_buckets, tiles(engine)), measured


def longest_context(engine: Engine) -> int:
    """Tokens of the longest sequence that an engine can be measured with."""
    return min(engine.max_length - 1, engine.num_pages * engine.config.page_size)


def tiles(engine: Engine) -> tuple[int, ...]:
    """Tile sizes of attention on a CPU, in tokens; those of GPU kernels are close enough to fit their times."""
    model = engine.model.config
    return tile_sizes(engine.config.token_budget, model.num_heads // model.num_kv_heads)


def shapes_to_measure(engine: Engine, max_context: int) -> list[BatchShape]:
    """For every bucket: chunks of every tile size and decodes, alone and together, after short and long contexts."""
    config = engine.config
    pool = engine.num_pages * config.page_size
    sizes = tiles(engine)
    shapes: set[BatchShape] = set()
    below = 0
    for rows in config.row_buckets:
        found: set[BatchShape] = set()
        beside = max(0, min(config.max_running, rows) - 1)  # decodes of a batch with a chunk
        for size in {*sizes[1:], *(sizes[-1] + size for size in sizes[1:-1]), below + 1, rows, rows - beside}:
            for start in (0, max_context // 4, max_context - size):
                found |= {BatchShape(0, 0, size, start), BatchShape(beside, config.page_size, size, start)}
            fitting = min(beside, (pool - max_context) // (max_context // 4 + config.page_size))
            found |= {BatchShape(fitting, max_context // 4, size, start) for start in (0, max_context // 2)}
        for context in (0, config.page_size, max_context // 8, max_context // 2):
            fitting = max(1, min(config.max_running, pool // (context + config.page_size)))
            found |= {BatchShape(min(fitting, count), context, 0, 0) for count in (below + 1, rows)}
        found = {shape for shape in found if below < shape.rows <= rows and _fits(engine, shape)}
        if not found:
            raise ValueError(
                f"no batch of {below + 1} to {rows} rows fits into {engine.num_pages} pages and sequences of "
                f"{engine.max_length} tokens: num_pages or max_length must be larger, or buckets smaller"
            )
        shapes |= found
        below = rows
    return sorted(shapes)


def random_shapes(engine: Engine, max_context: int, count: int, seed: int = 0) -> list[BatchShape]:
    """Random batches on which to evaluate a predictor; the fit rarely has the same ones."""
    rng: Any = np.random.default_rng(seed)
    config = engine.config
    least, most = np.log(min(16, max_context)), np.log(max(1, max_context // 2, min(16, max_context)))
    shapes: list[BatchShape] = []
    while len(shapes) < count:
        decodes = int(rng.integers(0, config.max_running))
        decode_context = int(np.exp(rng.uniform(least, most)))
        chunk = int(rng.integers(0, config.token_budget - decodes + 1)) * bool(rng.random() < 0.8)
        start = int(rng.integers(0, max(1, max_context - chunk)))
        shape = BatchShape(decodes, decode_context, chunk, start)
        if shape.rows and _fits(engine, shape):
            shapes.append(shape)
    return shapes


def _fits(engine: Engine, shape: BatchShape) -> bool:
    """Whether the engine's scheduler could make such a batch."""
    ends = [shape.decode_context + 1] * shape.decodes + [shape.chunk_start + shape.chunk] * (shape.chunk > 0)
    pages = sum(-(-end // engine.config.page_size) for end in ends)
    within = shape.chunk >= 0 and shape.chunk_start >= 0 and max(ends, default=0) <= longest_context(engine)
    return within and len(ends) <= engine.config.max_running and pages <= engine.num_pages


def measure(
    engine: Engine,
    shapes: List[BatchShape],
    repeats: int = 5,
    progress: Callable[[int, int], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Measurement]:
    """Run batches on an idle engine; returns the work and the median seconds of each.

    A batch is measured as a step is in use, where the next one is submitted while it runs: from the end of one to the
    end of an equal one. So the host's work counts only where it takes longer than the device's.

    All batches take turns in random order, so that a time in which the machine is slower affects all of them alike.

    Raises:
      NotImplementedError: the engine has several devices.
      RuntimeError: it has work.
    """
    rng = np.random.default_rng(0)
    times: list[list[float]] = [[] for _ in shapes]
    works = [Work()] * len(shapes)
    order = [int(i) for _ in range(repeats) for i in rng.permutation(len(shapes))]
    if engine.plan.num_devices > 1:
        raise NotImplementedError("profile measures engines of one device")
    with engine.lend_executor() as executor:
        for done, i in enumerate(order):
            batch = _batch(engine, shapes[i])
            before = executor.submit(batch)  # compiles and writes the page tables, which is not timed
            batch = dataclasses.replace(batch, tables=[], admitted=[])
            timed = executor.submit(batch)
            executor.wait(before)
            start = clock()
            after = executor.submit(batch)
            executor.wait(timed)
            times[i].append(clock() - start)
            executor.wait(after)
            (works[i],) = work_by_rank(batch.chunks, 1)
            if progress is not None:
                progress(done + 1, len(order))
    return list(zip(works, map(median, times), strict=True))


def _batch(engine: Engine, shape: BatchShape) -> Batch:
    """Make a batch of sequences with the first pages of the pool; what these hold does not matter."""
    batch, first_page = Batch(0), 0
    contexts = [(shape.decode_context, 1)] * shape.decodes + [(shape.chunk_start, shape.chunk)] * (shape.chunk > 0)
    for slot, (start, count) in enumerate(contexts):
        pages = -(-(start + count) // engine.config.page_size)
        sequence = _sequence(slot, start + count)
        decodes = slot < shape.decodes
        batch.admitted.append(sequence)
        sequence.pages = list(range(first_page, first_page + pages))
        batch.tables.append(TableRun(slot, 0, sequence.pages))
        # The prefill chunk samples no token, like one inside a prompt.
        batch.chunks.append(Chunk(sequence, slot, start, count, samples=decodes, decodes=decodes))
        first_page += pages
    return batch


def _sequence(slot: int, length: int) -> Sequence:
    params = SamplingParams(max_tokens=1)
    tokens = np.zeros(length + 1, np.int32)
    text, metrics = Detokenizer(None, ()), Metrics(0.0, length)
    request = Request([0], params)
    completion = Completion(request, f"profile-{slot}", 0, length, tokens, 0, frozenset(), text, metrics, None)
    return Sequence(completion.request_id, slot, length, 1, completion=completion, slot=slot)
