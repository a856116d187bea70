"""Predicted against measured steps on meshes of CPU devices: `python -m benchmarks.mesh_profile`.

For each plan an engine of a random Llama is measured as `longctx profile` does, its predictor fitted, and random
batches measured that the fit has not seen, of every kind of rows that the plan has. Devices share this machine's cores.
A time is the least of several runs in random order, as others may use the machine too; the fit has what a batch on
other ranks adds as a term of its own (`Work.elsewhere`).

A line for each plan and kind of rows: how many batches, predicted and measured seconds of all of them, and the error of
a batch, |predicted / measured - 1|: its mean, that weighted by time, and the largest.
"""

import argparse
import json
import sys
from pathlib import Path

import jax
import numpy as np

from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, ParallelPlan
from longctx.serving.predictor.fit import Measurement, fit, fit_mesh, relative_errors
from longctx.serving.predictor.mesh import kind_of
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.profiler import buckets_of, measure, random_shapes, shapes_to_measure, tiles

PLANS = {
    "1x2x1 kvp": ParallelPlan(context=2, exchange="kvp"),
    "1x2x1 pass_kv": ParallelPlan(context=2, exchange="pass_kv"),
    "1x2x1 pass_q": ParallelPlan(context=2, exchange="pass_q"),
    "2x1x1": ParallelPlan(stage=2),
    "1x1x2": ParallelPlan(tensor=2),
    "2x2x2 pass_kv": ParallelPlan(2, 2, 2, "pass_kv", "interleave"),
    "2x2x2 pass_q": ParallelPlan(2, 2, 2, "pass_q", "interleave"),
}
MODEL = LlamaConfig(258, 512, 1408, 4, 8, 4, 64, max_positions=8192)
CONFIG = EngineConfig(page_size=16, num_pages=400, max_running=8, token_budget=256, buckets=(32, 256), max_length=4096)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", default=",".join(PLANS), help=f"of {', '.join(PLANS)}; default: all")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each batch (7)")
    parser.add_argument("--check", type=int, default=60, help="batches that the fit has not seen, of each plan (60)")
    parser.add_argument("--context", type=int, default=2048, help="the longest context on a rank, in tokens (2048)")
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    model = Llama(MODEL)
    params = model.init(jax.random.key(0))
    rows: list[dict[str, object]] = []
    print("| plan | rows | batches | predicted, s | measured, s | error: mean | by time | largest |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in options.plans.split(","):
        engine = Engine(model, params, CONFIG, plan=PLANS[name])
        measured = measure(engine, shapes_to_measure(engine, options.context), options.repeats, statistic=min)
        fitted = (fit if engine.plan.context == 1 else fit_mesh)(measured, buckets_of(engine), tiles(engine))
        shapes = random_shapes(engine, options.context, options.check)
        held_out = measure(engine, shapes, options.repeats, statistic=min)
        kinds = sorted({kind_of(work) for work, _ in held_out})
        for kind in [*kinds, "all"] if len(kinds) > 1 else ["all"]:
            some = [(work, seconds) for work, seconds in held_out if kind in ("all", kind_of(work))]
            rows.append({"plan": name, "rows": kind} | _errors(fitted, some))
            print("| " + " | ".join(_shown(value) for value in rows[-1].values()) + " |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _errors(predictor: Predictor, measured: list[Measurement]) -> dict[str, float]:
    seconds, errors = [time for _, time in measured], np.abs(relative_errors(predictor, measured))
    return {
        "batches": len(measured),
        "predicted": sum(predictor.seconds(work) for work, _ in measured),
        "measured": sum(seconds),
        "mean": float(errors.mean()),
        "by_time": float(np.average(errors, weights=seconds)),
        "largest": float(errors.max()),
    }


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
