"""`longctx profile`: measure an engine's steps and fit a runtime predictor to them."""

import argparse
from typing import Any

import jax
import numpy as np

from longctx.cli.engine import EngineLoader, show_compiling
from longctx.cli.files import check_output
from longctx.cli.settings import engine_config
from longctx.serving.predictor import Predictor, RuntimePredictor
from longctx.serving.predictor.file import save_profile
from longctx.serving.predictor.fit import Measurement, relative_errors
from longctx.serving.predictor.mesh import MeshPredictor
from longctx.serving.profiler import links, longest_context, measure, profile, random_shapes


def run(options: argparse.Namespace) -> int:
    """Measure, write the profile, and print its table and errors."""
    check_output("FILE", options.out)
    config = engine_config(options)
    loader = EngineLoader(options)
    console = loader.console
    loader.check_memory(config)
    engine = loader.load(config)
    room = longest_context(engine)
    context = min(16_384, room) if options.max_context is None else options.max_context
    if context > room:
        raise ValueError(f"--max-context must be at most {room}, the longest sequence of the engine, got {context}")

    if loader.plan.context == 1:
        show_compiling(engine.warm_up, console, engine)  # on several ranks there are more programs than are measured
    with console.progress("measuring", "batch") as progress:
        predictor, measured = profile(engine, context, options.repeats, progress)
    notes: dict[str, Any] = {
        "jax": jax.__version__,
        "max_context": context,
        "fitted": _error_summary(predictor, measured),
    }
    notes["links"] = links(engine)
    save_profile(options.out, predictor, loader.subject, notes)  # so that it is kept if the evaluation fails
    if options.check:
        shapes = random_shapes(engine, context, options.check)
        notes["held_out"] = _error_summary(predictor, measure(engine, shapes, options.repeats))
    save_profile(options.out, predictor, loader.subject, notes)
    print(table(predictor))
    for name, errors in notes.items():
        if name in ("fitted", "held_out"):
            shown = f"mean {errors['mean']:.1%}, {errors['by_time']:.1%} weighted by time, at most"
            print(f"error, {name.replace('_', ' '):<9} {shown} {errors['largest']:.1%}, of {errors['batches']} batches")
    return 0


def _error_summary(predictor: Predictor, measured: list[Measurement]) -> dict[str, float]:
    errors, seconds = np.abs(relative_errors(predictor, measured)), [time for _, time in measured]
    by_time = float(np.average(errors, weights=seconds))
    return {"mean": float(errors.mean()), "by_time": by_time, "largest": float(errors.max()), "batches": len(errors)}


def table(predictor: RuntimePredictor | MeshPredictor) -> str:
    """A table of the coefficients, with a line for each program."""
    if isinstance(predictor, MeshPredictor):
        return _mesh_table(predictor)
    lines = [f"{'rows':>6}  {'fixed, ms':>9}  {'a sample, us':>12}  a tile of N tokens, for each key, ns"]
    for program in predictor.programs:
        tiles = "  ".join(f"{size}: {1e9 * x:,.0f}" for size, x in zip(program.tiles, program.per_key, strict=True))
        lines.append(f"{program.rows:>6}  {1e3 * program.fixed:>9.2f}  {1e6 * program.per_sample:>12.1f}  {tiles}")
    return "\n".join(lines)


def _mesh_table(predictor: MeshPredictor) -> str:
    """The same of several context ranks, with a line for each kind of steps."""
    rows = ", ".join(map(str, predictor.buckets))
    lines = [f"{'rows are':<10}  fixed, ms  sharded, replicated and local rows ({rows}), ms  a key of a tile, ns"]
    for program in predictor.programs:
        buckets = "  ".join("/".join(f"{1e3 * cost:.2f}" for cost in costs) for costs in program.per_bucket)
        tiles = "  ".join(f"{size}: {1e9 * x:,.0f}" for size, x in zip(program.tiles, program.per_key, strict=True))
        lines.append(f"{program.kind:<10}  {1e3 * program.fixed:>9.2f}  {buckets}  {tiles}")
    return "\n".join(lines)
