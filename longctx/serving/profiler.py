"""Measures an engine's steps, and fits its runtime predictor to them."""

import dataclasses
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from statistics import median
from typing import Any

import numpy as np

from longctx.models import Llama
from longctx.models.params import Params
from longctx.parallel.topology import find_topology
from longctx.serving.config import EngineConfig
from longctx.serving.engine.engine import Engine
from longctx.serving.executor.interface import Executor
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.fit import Measurement, fit
from longctx.serving.predictor.measured import RuntimePredictor
from longctx.serving.predictor.work import Work
from longctx.serving.profile_shapes import BatchShape as BatchShape
from longctx.serving.profile_shapes import buckets_of, make_batch, tiles
from longctx.serving.profile_shapes import longest_context as longest_context
from longctx.serving.profile_shapes import random_shapes as random_shapes
from longctx.serving.profile_shapes import shapes_to_measure as shapes_to_measure
from longctx.serving.scheduler.batch import Batch, work_by_rank


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
    return fit(measured, buckets_of(engine), tiles(engine)), measured


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
            ranks = work_by_rank(batch.chunks, engine.plan.context, engine.config.page_size, exchange)
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
