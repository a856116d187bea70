"""One long prompt among a stream of short ones, on the real engine: `python -m benchmarks.mixed_load`.

The built-in model reads a prompt of 30,000 tokens while short requests arrive, under several policies and chunkings:
what do the short ones wait for their first token, what between tokens, and how much later is the long one? Whole-prompt
prefill, which reads each prompt in one step, is what chunking is measured against. With `--pareto`, also static chunks
of several sizes against adaptive ones with several TPOT targets, all under `ilrs`.

The predictor is fitted first, to contexts of up to 8,192 tokens, and judged by batches that it was not fitted to, of
such contexts and of four times as long ones, all measured in turns.

Source: Medha, 5.2 (figure 15) and 3.2 (figure 6).
"""

import argparse
import math
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from longctx.models import Llama, load_checkpoint
from longctx.models.builtin import TINY
from longctx.models.params import Params
from longctx.serving import Engine, EngineConfig, Slo
from longctx.serving.predictor import RuntimePredictor
from longctx.serving.predictor.fit import fit, relative_errors
from longctx.serving.profiler import measure, random_shapes, shapes_to_measure, tiles
from longctx.simulation.replay import Record, replay
from longctx.simulation.reports.report import summarize
from longctx.simulation.workloads import Lengths, WorkloadRequest, arrive_at_rate, synthesize

LONG, FITTED = 30_000, 8192
BUCKETS = (8, 32, 128, 512, 2048)
WHOLE = 30_080  # a step that holds the long prompt and all decodes

LOADS = {
    "ilrs, adaptive": ("ilrs", "adaptive"),
    "fcfs, static:512": ("fcfs", "static:512"),
    "fcfs, static:2048": ("fcfs", "static:2048"),
    "whole prompts": ("fcfs", f"static:{WHOLE}"),
}
STATIC, TARGETS = (64, 128, 256, 512, 1024, 2048), (0.05, 0.1, 0.2, 0.4, 0.8)


class Bench(NamedTuple):
    model: Llama
    params: Params
    requests: list[WorkloadRequest]

    def engine(self, policy: str, chunking: str, tpot: float, **more: Any) -> Engine:
        whole = chunking == f"static:{WHOLE}"
        config = EngineConfig(
            max_running=32,
            max_length=33_000,
            num_pages=1024,
            token_budget=WHOLE if whole else BUCKETS[-1],
            buckets=(*BUCKETS, WHOLE) if whole else BUCKETS,
            policy=policy,
            chunking=chunking,
            slo=Slo(tpot=tpot),
            prefix_cache=False,
            max_logprobs=0,
        )
        return Engine(self.model, self.params, config, **more)

    def run(self, name: str, policy: str, chunking: str, tpot: float, predictor: RuntimePredictor) -> list[float]:
        """TTFT of short requests (P50, P90), TPOT (P50, P95), TTFT of the long one, and the error of predictions."""
        tell(f"{name} ...")
        record = Record()
        known = None if str(WHOLE) in chunking else predictor  # it knows no step so large, nor does fcfs need it
        engine = self.engine(policy, chunking, tpot, predictor=known, monitor=record.steps.append)
        engine.warm_up()
        replay(engine, self.requests, time.monotonic, record=record)
        (long,) = (x for x in record.served if x.metrics.prompt_tokens == LONG)
        short = [x.ttft for x in record.served if x.metrics.prompt_tokens < LONG]
        # Every decode's wait for its token is the step in which it is computed.
        steps = [step for step in record.steps if step.finished <= (long.metrics.first_token or 0.0)]
        waits = np.repeat([step.seconds for step in steps], [step.decodes for step in steps])
        tpots = np.percentile(waits, (50, 95)).tolist() if len(waits) else [math.nan] * 2
        error = summarize(record)["prediction_error"]
        return [*np.percentile(short, (50, 90)).tolist(), *tpots, long.ttft, math.nan if error is None else error]

    def table(self, cases: list[tuple[str, str, str, float]], predictor: RuntimePredictor, rounds: int) -> str:
        """All cases in turns, in markdown, and the medians of each: the machine is shared."""
        runs = np.array([[self.run(*case, predictor) for case in cases] for _ in range(rounds)])
        lines = [
            "| | short TTFT p50 | p90 | TPOT p50 | p95 | long TTFT | predictions off by |",
            "|---|---|---|---|---|---|---|",
        ]
        for (name, *_), (*seconds, error) in zip(cases, np.nanmedian(runs, 0).tolist(), strict=True):
            lines.append(f"| {name} | {' | '.join(f'{x:.3f} s' for x in seconds)} | {error:.0%} |")
        return "\n".join(lines)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fitted(bench: Bench, repeats: int) -> RuntimePredictor:
    """The predictor, whose mean and largest errors are printed."""
    engine = bench.engine("ilrs", "static", 1.0)
    tell("compiling ...")
    engine.warm_up()
    own = shapes_to_measure(engine, FITTED)
    others = random_shapes(engine, FITTED, 40), random_shapes(engine, 4 * FITTED, 40, seed=1)
    tell("measuring ...")
    measured = measure(engine, [*own, *others[0], *others[1]], repeats)
    predictor = fit(measured[: len(own)], BUCKETS, tiles(engine))
    parts = {"fitted": measured[: len(own)], "held out": measured[len(own) : -40], "four times": measured[-40:]}
    for name, part in parts.items():
        found = np.abs(relative_errors(predictor, part))
        print(f"predictor, {name}: mean error {found.mean():.1%}, at most {found.max():.1%}, {len(found)} batches")
    return predictor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--pareto", action="store_true", help="also chunk sizes against TPOT targets")
    parser.add_argument("--seconds", type=float, default=16.0, help="for which short requests arrive")
    parser.add_argument("--rate", type=float, default=1.5, help="of them, a second")
    parser.add_argument("--tpot", type=float, default=0.2, help="seconds, adaptive chunks")
    parser.add_argument("--repeats", type=int, default=5, help="of each batch that the predictor is fitted to")
    parser.add_argument("--rounds", type=int, default=3, help="all take turns; medians count")
    options = parser.parse_args()

    count = round(options.rate * options.seconds)
    short = arrive_at_rate(synthesize(count, Lengths(32, 256, True), Lengths(8, 24)), options.rate)
    long = WorkloadRequest(0.5, LONG, 4, number=count)
    model, params = load_checkpoint(TINY)
    bench = Bench(model, params, sorted([*short, long], key=lambda request: request.arrival))
    predictor = fitted(bench, options.repeats)
    print(f"\n{count} short requests, one of {LONG:,} tokens; {jax.devices()[0].device_kind}, jax {jax.__version__}")
    loads = [(name, *how, options.tpot) for name, how in LOADS.items()]
    print(f"\n{bench.table(loads, predictor, options.rounds)}")
    if options.pareto:
        cases = [(f"static:{n}", "ilrs", f"static:{n}", options.tpot) for n in STATIC]
        cases += [(f"adaptive:{tpot}", "ilrs", "adaptive", tpot) for tpot in TARGETS]
        print(f"\n{bench.table(cases, predictor, options.rounds)}")


if __name__ == "__main__":
    main()
