"""`longctx profile`: measure an engine's steps and fit a runtime predictor to them."""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from longctx.cli.engine_flags import add_engine_arguments, add_model_arguments, engine_config, flag, make_engine
from longctx.models import load_checkpoint
from longctx.serving.predictor import RuntimePredictor
from longctx.serving.predictor.file import save_profile
from longctx.serving.predictor.fit import relative_errors
from longctx.serving.profiler import longest_context, measure, profile, random_shapes, subject

SUMMARY = "Measure an engine's steps and fit the runtime predictor that scheduling uses."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="FILE", help="profile to write, JSON, for bench --profile")
    add_model_arguments(parser)
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of the longest sequence; default: the model's context"
    )
    parser.add_argument("--max-context", type=int, metavar="N", help="the longest measured context in tokens (16,384)")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="runs of each batch; their median counts (5)"
    )
    parser.add_argument(
        "--check", type=int, default=20, metavar="N", help="random batches to evaluate the predictor on (20)"
    )
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.out.is_dir() or not options.out.parent.is_dir():
        raise ValueError(f"FILE must not be a directory, and must be in one that exists, got {options.out}")
    for name, low in (("repeats", 1), ("check", 0), ("max_context", 1)):
        value = getattr(options, name)
        if value is not None and value < low:
            raise ValueError(f"{flag(name)} must be at least {low}, got {value}")
    model, params = load_checkpoint(options.model, dtype=options.dtype)
    config = engine_config(options, max_length=options.max_length)
    engine = make_engine(options, model, params, config)
    room = longest_context(engine)
    context = min(16_384, room) if options.max_context is None else options.max_context
    if context > room:
        raise ValueError(f"--max-context must be at most {room}, the longest sequence of the engine, got {context}")

    print("compiling ...", file=sys.stderr)
    engine.warm_up()
    with tqdm(desc="measuring", unit="batch") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        predictor, measured = profile(engine, context, options.repeats, progress)
    notes = {"jax": jax.__version__, "max_context": context, "fitted": _error_summary(predictor, measured)}
    save_profile(
        options.out, predictor, subject(model, params, config), notes
    )  # so that it is kept if the evaluation fails
    if options.check:
        shapes = random_shapes(engine, context, options.check)
        notes["held_out"] = _error_summary(predictor, measure(engine, shapes, options.repeats))
    save_profile(options.out, predictor, subject(model, params, config), notes)
    print(table(predictor))
    for name, errors in notes.items():
        if isinstance(errors, dict):
            shown = f"mean {errors['mean']:.1%}, at most {errors['largest']:.1%}, of {errors['batches']} batches"
            print(f"error, {name.replace('_', ' '):<9} {shown}")
    return 0


def _error_summary(predictor: RuntimePredictor, measured: list) -> dict[str, float]:
    errors = np.abs(relative_errors(predictor, measured))
    return {"mean": float(errors.mean()), "largest": float(errors.max()), "batches": len(errors)}


def table(predictor: RuntimePredictor) -> str:
    """A table of the coefficients, with a line for each program."""
    lines = [f"{'rows':>6}  {'fixed, ms':>9}  {'a sample, us':>12}  a tile of so many tokens, for each key, ns"]
    for program in predictor.programs:
        tiles = "  ".join(f"{size}: {1e9 * x:,.0f}" for size, x in zip(program.tiles, program.per_key, strict=True))
        lines.append(f"{program.rows:>6}  {1e3 * program.fixed:>9.2f}  {1e6 * program.per_sample:>12.1f}  {tiles}")
    return "\n".join(lines)
