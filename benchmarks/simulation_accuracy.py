"""The simulator against the real engine: `python -m benchmarks.simulation_accuracy`, as tables in markdown.

One workload, by several policies, on the built-in model on this CPU, and in simulation with the predictor of `longctx
profile` and with what the engine's thread takes (`HostTimes`). Both are measured here. Engine runs of all policies and
measurements of batches take turns. On a shared machine others make some of them slower: of each policy those runs count
(`--rounds` of them) during which other processes used least of the processors, and so of the measurements to which the
predictor is fitted. Figures and errors are medians over these runs, each simulation being compared with a run.

Two simulations of every engine run tell errors apart:

- `profile`: batches take what the predictor says. All errors are in it.
- `measured`: the device is as fast at every moment as the engine's was: while the engine took 3 ms for what is
  predicted to take 2, the simulated one does two thirds of its work. The error of predictions is not in it, but that of
  queueing: of who is in which batch and when, and of all that happens between batches.

Source: Vidur, section 7 (errors of predicted runtimes and of whole workloads apart).
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.host_probe import measure_host
from benchmarks.usage import Usage
from longctx.models import Llama, load_checkpoint
from longctx.models.builtin import TINY
from longctx.models.params import Params
from longctx.serving import Engine, EngineConfig, Slo, StepMetrics
from longctx.serving.predictor import RuntimePredictor, Work
from longctx.serving.predictor.fit import Measurement, fit
from longctx.serving.profiler import measure, shapes_to_measure, tiles
from longctx.simulation import HostTimes, Instance, Record, Served, Simulation, replay
from longctx.simulation.instance.virtual_executor import DeviceSpeed
from longctx.simulation.workloads import Lengths, WorkloadRequest, arrive_at_rate, synthesize

CONFIG = EngineConfig(
    max_running=16,
    max_length=2048,
    num_pages=512,
    token_budget=256,
    buckets=(8, 32, 128, 256),
    chunking="static",
    slo=Slo(ttft_least=0.05),
    prefix_cache=False,
    max_logprobs=0,
)
POLICIES = ("fcfs", "srpf", "ilrs")
PROMPTS, OUTPUTS = Lengths(32, 1500, True), Lengths(8, 64)
KINDS = ("profile", "measured")


def work_of(step: StepMetrics) -> Work:
    """What a step of one rank computed."""
    work = Work(step.decodes, step.samples, step.decode_keys)
    for start, count in step.chunks:
        work = work.with_chunk(start, count, False)
    return work


def figures(served: Iterable[Served]) -> dict[str, float]:
    """Means and 90th percentiles, in seconds."""
    rows = list(served)
    values = {"TTFT": [x.ttft for x in rows], "TPOT": [x.tpot for x in rows if x.tpot is not None]}
    return {
        f"{name} {what}": float(how(found))
        for name, found in values.items()
        for what, how in (("mean", np.mean), ("p90", lambda x: np.percentile(x, 90)))
    }


class Run(NamedTuple):
    """The engine under a policy; `others`: processors that other processes used meanwhile."""

    record: Record
    start: float
    others: float

    @property
    def busy(self) -> float:
        """The share of its time in which a step ran."""
        return sum(step.seconds for step in self.record.steps) / self.record.seconds


@dataclasses.dataclass
class Bench:
    """What is simulated, and how fast it is."""

    model: Llama
    params: Params
    requests: list[WorkloadRequest]
    profiled: Engine
    host: HostTimes = dataclasses.field(default_factory=HostTimes)
    measured: list[tuple[float, list[Measurement]]] = dataclasses.field(default_factory=list)
    predictor: RuntimePredictor = dataclasses.field(init=False)
    factors: dict[bool, float] = dataclasses.field(default_factory=dict)

    def engine(self, policy: str, **more: Any) -> Engine:
        return Engine(self.model, self.params, dataclasses.replace(CONFIG, policy=policy), **more)

    def measure(self, repeats: int = 1) -> None:
        """Measure all batches of a profile once more."""
        usage, shapes = Usage(), shapes_to_measure(self.profiled, self.profiled.max_length)
        found = measure(self.profiled, shapes, repeats)
        self.measured.append((usage.others(), found))

    def fit(self, number: int) -> None:
        """Fit the predictor to the medians of so many measurements, the least disturbed ones.

        Then batches of a kind take, in sum, what they took in these measurements: where a machine is disturbed all the
        time, the mean is larger than the median.
        """
        calm = [found for _, found in sorted(self.measured, key=lambda x: x[0])[:number]]
        times = [(turns[0][0], statistics.median(x for _, x in turns)) for turns in zip(*calm, strict=True)]
        self.predictor = fit(times, CONFIG.row_buckets, tiles(self.profiled))
        for kind in (False, True):
            rows = [
                (x, self.predictor.seconds(work)) for found in calm for work, x in found if bool(work.chunks) == kind
            ]
            measured, predicted = map(sum, zip(*rows, strict=True))
            self.factors[kind] = measured / predicted

    def seconds(self, work: Work) -> float:
        """Predicted, of a batch."""
        return self.factors[bool(work.chunks)] * self.predictor.seconds(work)

    def run(self, policy: str, predictor: RuntimePredictor) -> Run:
        record = Record()
        engine = self.engine(policy, predictor=predictor, monitor=record.steps.append)
        engine.warm_up()
        start, usage = time.monotonic(), Usage()
        replay(engine, self.requests, time.monotonic, record=record)
        return Run(record, start, usage.others())

    def simulate(self, policy: str, run: Run | None = None) -> list[Served]:
        """By prediction; of a run, with the speed that the device had at every moment of it.

        What was measured of a step has the thread's work on batches and results in it.
        """
        config, host, speed = dataclasses.replace(CONFIG, policy=policy), self.host, None
        if run is not None:
            host = HostTimes(request=host.request)
            seconds = [self.seconds(work_of(step)) for step in run.record.steps]
            ends = [step.finished - run.start for step in run.record.steps]
            begins = [end - step.seconds for end, step in zip(ends, run.record.steps, strict=True)]
            speed = DeviceSpeed(zip(begins, ends, seconds, strict=True))
        predicted = lambda batch: self.seconds(batch.work)  # noqa: E731
        instance = Instance(
            self.model.config, config, self.predictor, seconds=predicted, host=host, speed=speed, skips_decodes=False
        )
        return Simulation([instance]).run(self.requests).served

    def steps(self, runs: Iterable[Run]) -> np.ndarray:
        """`[steps, 3]`: measured seconds, predicted ones, and whether there were prompts, of those known exactly."""
        rows = [
            (step.seconds, self.seconds(work_of(step)) + self.host.shared, bool(step.chunks))
            for run in runs
            for step in run.record.steps
            if step.is_exact
        ]
        return np.array(rows)


def of_rounds(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def per_request(served: Iterable[Sequence[Served]], name: str) -> np.ndarray:
    """`[requests]`: a figure of each request, the median over rounds."""
    rows = [[getattr(x, name) for x in sorted(round_, key=lambda x: x.number)] for round_ in served]
    return np.median(np.array(rows, float), 0)


def compare(bench: Bench, policy: str, runs: list[Run]) -> dict[str, Any]:
    """The engine's figures under a policy, and those of the three simulations of each round; plain data."""
    profile = bench.simulate(policy)
    kinds: dict[str, list[list[Served]]] = {
        "profile": [profile] * len(runs),
        "measured": [bench.simulate(policy, run) for run in runs],
    }
    engine = [figures(run.record.served) for run in runs]
    found: dict[str, Any] = {"engine": of_rounds(engine), "busy": statistics.median(run.busy for run in runs)}
    found["others"] = [run.others for run in runs]
    for kind, sides in kinds.items():
        ours = [figures(side) for side in sides]
        errors = [{name: x[name] / y[name] - 1 for name in y} for x, y in zip(ours, engine, strict=True)]
        requests = {}
        for name in ("ttft", "tpot"):
            real, simulated = per_request([run.record.served for run in runs], name), per_request(sides, name)
            bias = float(simulated.mean() / real.mean() - 1)
            requests[name] = {"bias": bias, "correlation": float(np.corrcoef(real, simulated)[0, 1])}
        found[kind] = {"figures": of_rounds(ours), "error": of_rounds(errors), "requests": requests}
    return found


def operators(bench: Bench, runs: Iterable[Run]) -> list[dict[str, Any]]:
    """How far predicted seconds of batches are off."""
    steps, rows = bench.steps(runs), []
    for name, kind in (("decodes alone", 0), ("with prompts", 1)):
        measured, predicted, _ = steps[steps[:, 2] == kind].T
        off = np.abs(predicted / measured - 1)
        rows.append(
            {
                "batches": name,
                "number": len(measured),
                "measured": float(np.median(measured)),
                "bias": float(predicted.sum() / measured.sum() - 1),
                "error": float(off.mean()),
                "by time": float(np.average(off, weights=measured)),
                "correlation": float(np.corrcoef(measured, predicted)[0, 1]),
            }
        )
    return rows


def tables(results: dict[str, dict[str, Any]], batches: list[dict[str, Any]]) -> str:
    lines = [
        "| policy | | TTFT mean | p90 | TPOT mean | p90 | TTFT bias, correlation | TPOT bias, correlation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for policy, found in results.items():
        told = " | ".join(f"{1e3 * x:.2f} ms" for x in found["engine"].values())
        others = statistics.mean(found["others"])
        lines.append(f"| {policy} | engine, {found['busy']:.0%} busy; others {others:.2f} cores | {told} | | |")
        for kind in KINDS:
            simulated, error = found[kind]["figures"], found[kind]["error"]
            told = " | ".join(f"{1e3 * x:.2f} ms ({error[name]:+.1%})" for name, x in simulated.items())
            each = " | ".join(f"{x['bias']:+.1%}, {x['correlation']:.3f}" for x in found[kind]["requests"].values())
            lines.append(f"| | {kind} | {told} | {each} |")
    lines += ["", "| batches | number | measured, median | bias | error, mean | weighted by time | correlation |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in batches:
        shares = " | ".join(f"{row[name]:+.1%}" if name == "bias" else f"{row[name]:.1%}" for name in _SHARES)
        told = f"{row['number']:,} | {1e3 * row['measured']:.2f} ms | {shares} | {row['correlation']:.3f}"
        lines.append(f"| {row['batches']} | {told} |")
    return "\n".join(lines)


_SHARES = ("bias", "error", "by time")


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each policy that count")
    parser.add_argument("--minutes", type=float, default=4.0, help="for which runs take turns")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    model, params = load_checkpoint(TINY)
    requests = arrive_at_rate(synthesize(options.requests, PROMPTS, OUTPUTS, seed=options.seed), options.rate)
    profiled = Engine(model, params, CONFIG)
    tell("compiles ...")
    profiled.warm_up()
    bench = Bench(model, params, requests, profiled)
    bench.measure(repeats=2)
    bench.fit(1)
    known = bench.predictor  # what the engines schedule by
    hosts, turns, begin = [], dict[str, list[Run]](), time.monotonic()
    while not turns or len(turns[POLICIES[0]]) < options.rounds or time.monotonic() - begin < 60 * options.minutes:
        usage = Usage()
        host = measure_host(bench.engine("fcfs", predictor=known))
        hosts.append((usage.others(), host))
        for policy in POLICIES:
            bench.measure()
            run = bench.run(policy, known)
            turns.setdefault(policy, []).append(run)
            ttft, _, tpot, _ = figures(run.record.served).values()
            told = f"{1e3 * ttft:.1f} ms, TPOT {1e3 * tpot:.2f} ms, {run.busy:.0%} busy"
            tell(f"{len(hosts)} {policy}: TTFT {told}; others used {run.others:.2f} processors")
    bench.fit(2 * options.rounds)
    runs = {name: sorted(each, key=lambda run: run.others)[: options.rounds] for name, each in turns.items()}
    calm = [host for _, host in sorted(hosts, key=lambda x: x[0])[: options.rounds]]
    medians = {name: statistics.median(getattr(x, name) for x in calm) for name in ("request", "batch", "results")}
    bench.host = HostTimes(**medians, shares_cores=True)

    results = {policy: compare(bench, policy, runs[policy]) for policy in runs}
    batches = operators(bench, [run for each in runs.values() for run in each])
    print(
        f"{options.requests} requests, {options.rate:g} a second; {options.rounds} of {len(hosts)} runs each; "
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}; the thread: "
        + ", ".join(f"{1e6 * x:.0f} µs a {name}" for name, x in medians.items())
        + "; means over medians: "
        + ", ".join(f"{x:.2f} ({'with prompts' if kind else 'decodes'})" for kind, x in bench.factors.items())
    )
    print(f"\n{tables(results, batches)}")


if __name__ == "__main__":
    main()
