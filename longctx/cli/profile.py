"""`longctx profile`: measure an engine's steps and fit a runtime predictor to them, or fit a topology to tables."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longctx.cli.engine import EngineLoader, show_compiling
from longctx.cli.files import check_input
from longctx.cli.settings import engine_config, given_topology
from longctx.parallel.operator_fit import fit_device, prediction_errors, read_table
from longctx.serving.predictor import Predictor
from longctx.serving.predictor.file import save_profile
from longctx.serving.predictor.fit import Measurement, relative_errors
from longctx.serving.profiler import links, longest_context, measure, profile, random_shapes


def run(options: argparse.Namespace) -> int:
    """Measure, write the profile, and print its errors."""
    if options.tables:
        return _import_tables(options)
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
    for name, errors in notes.items():
        if name in ("fitted", "held_out"):
            shown = f"mean {errors['mean']:.1%}, {errors['by_time']:.1%} weighted by time, at most"
            print(f"error, {name.replace('_', ' '):<9} {shown} {errors['largest']:.1%}, of {errors['batches']} batches")
    return 0


def _import_tables(options: argparse.Namespace) -> int:
    """Fit the device and the link of a topology to tables, write it, and print the errors."""
    topology = given_topology(options)
    if topology is None:
        raise ValueError("--import needs --topology, whose data sheet the tables are compared with")
    for name in options.tables:
        check_input("--import", Path(name))
    try:
        tables = {name: read_table(Path(name)) for name in options.tables}
        device, link = fit_device(tables, topology.device, topology.links.get("tensor"))
        errors = {name: prediction_errors(table, device, link) for name, table in tables.items()}
    except ValueError as error:
        raise ValueError(f"--import: {error}") from None
    links = topology.links if link is None else {**topology.links, "tensor": link}
    fitted = dataclasses.replace(topology, device=device, links=links, name=f"{topology.name}, imported")
    options.out.write_text(json.dumps(fitted.to_dict(), indent=1) + "\n", encoding="utf-8")
    if not options.quiet:
        for name, off in errors.items():
            print(f"{name}: {tables[name].kind}, {len(off):,} rows, mean error {np.abs(off).mean():.1%}")
    return 0


def _error_summary(predictor: Predictor, measured: list[Measurement]) -> dict[str, float]:
    errors, seconds = np.abs(relative_errors(predictor, measured)), [time for _, time in measured]
    by_time = float(np.average(errors, weights=seconds))
    return {"mean": float(errors.mean()), "by_time": by_time, "largest": float(errors.max()), "batches": len(errors)}
