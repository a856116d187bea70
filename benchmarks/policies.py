"""Scheduling policies in virtual time, on a mix of short and long requests: `python -m benchmarks.policies MIX.csv`.

The scheduler is the one that serves; a roofline of Llama-3 8B on 16 A100 (tensor 8, two stages) says how long a batch
takes in a stage, so that a token takes two of these. Requests are those of a file of lengths (`num_prefill_tokens`,
`num_decode_tokens`), in order, and arrive as a seeded Poisson process. Normalised TTFT is the time to the first token
over that of the prompt alone, whose chunks follow each other through the stages.

Source: Medha, 5.4, figure 22.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from longctx.models import LlamaConfig
from longctx.plotting import drawing, save, style
from longctx.serving import EngineConfig, ParallelPlan, Slo
from longctx.serving.predictor import CurvePredictor, Work
from longctx.serving.predictor.roofline import GPUS, roofline
from longctx.simulation import Instance, Served, Simulation
from longctx.simulation.workloads import WorkloadRequest, arrive_at_rate, read_workload

LLAMA_8B = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, max_positions=2_000_000)
PLAN = ParallelPlan(stage=2, tensor=8)
BUDGET = 4096
POLICIES = ("fcfs", "edf", "lrs", "lrs_relative", "ilrs")
LONG = 100_000  # tokens of a prompt that counts as long


class Run(NamedTuple):
    """A workload under one policy: TTFT in seconds and over that alone, of short and long prompts."""

    policy: str
    rate: float
    served: list[Served]
    device: CurvePredictor

    def normalised(self, low: int = 0, high: int = 10**9) -> np.ndarray:
        found = [(x.ttft, x.metrics.prompt_tokens) for x in self.served if low <= x.metrics.prompt_tokens < high]
        return np.array([ttft / seconds_alone(self.device, length) for ttft, length in found])

    def row(self) -> dict[str, Any]:
        found: dict[str, Any] = {"policy": self.policy, "rate": self.rate, "requests": len(self.served)}
        for name, ends in (("all", (0, 10**9)), ("short", (0, LONG)), ("long", (LONG, 10**9))):
            values = self.normalised(*ends)
            ttft = [x.ttft for x in self.served if ends[0] <= x.metrics.prompt_tokens < ends[1]]
            found[name] = {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)} | {
                "ttft_p50": float(np.median(ttft))
            }
        tpot = [x.tpot for x in self.served if x.tpot is not None]
        found["tpot"] = {f"p{p}": float(np.percentile(tpot, p)) for p in (50, 99)}
        found["in_time"] = float(np.mean([bool(x.kept_ttft) for x in self.served]))
        return found


def seconds_alone(device: CurvePredictor, length: int) -> float:
    """TTFT of a prompt with nobody else, in chunks of the budget: a tick takes the slowest chunk in the stages."""
    chunks = [Work().with_chunk(at, min(BUDGET, length - at), at + BUDGET >= length) for at in range(0, length, BUDGET)]
    idle = [0.0] * (PLAN.stage - 1)
    stages = [*idle, *map(device.seconds, chunks), *idle]
    return sum(max(stages[at : at + PLAN.stage]) for at in range(len(chunks) + PLAN.stage - 1))


def simulate(policy: str, requests: list[WorkloadRequest], rate: float, slo: Slo, max_share: float, seed: int) -> Run:
    device = roofline(LLAMA_8B, GPUS["A100"], BUDGET, stage=PLAN.stage, tensor=PLAN.tensor, overhead=2e-3)
    config = EngineConfig(
        page_size=256,
        # 16 GPUs of 80 GB, less the weights: 8,192 bytes a token on each of 16.
        num_pages=16 * 60 * 10**9 // (131_072 * 256),
        max_running=256,
        token_budget=BUDGET,
        policy=policy,
        chunking="adaptive",
        max_share=max_share,
        slo=slo,
        prefix_cache=False,
        run_ahead=1,
    )
    simulation = Simulation([Instance(LLAMA_8B, config, device, PLAN)])
    arriving = arrive_at_rate(requests, rate, seed)
    with tqdm(total=len(arriving), desc=f"{policy} at {rate}/s", file=sys.stderr) as bar:
        record = simulation.run(arriving, progress=lambda record: bar.update(len(record.served) - bar.n))
    return Run(policy, rate, record.served, device)


def table(rows: list[dict[str, Any]]) -> str:
    """In markdown: TTFT over that of the prompt alone; TPOT in ms."""
    lines = [
        "| requests/s | policy | all p50 | p90 | p99 | short p50 | p90 | long p50 | p90 | in time | TPOT p50 | p99 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = [row["all"][p] for p in ("p50", "p90", "p99")]
        numbers += [row[kind][p] for kind in ("short", "long") for p in ("p50", "p90")]
        told = " | ".join(f"{x:,.3g}" for x in numbers)
        tpot = " | ".join(f"{1e3 * row['tpot'][p]:.1f}" for p in ("p50", "p99"))
        lines.append(f"| {row['rate']} | {row['policy']} | {told} | {row['in_time']:.1%} | {tpot} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Medians as bars, 90 and 99 % as marks, as PNG or SVG."""
    rates = sorted({row["rate"] for row in rows})
    with style():
        save(_draw(rows, rates), path)


def _draw(rows: list[dict[str, Any]], rates: list[float]) -> Any:
    figure, _ = drawing(0, 3.6 * len(rates), 3.4)
    for axes, rate in zip(np.atleast_1d(figure.subplots(1, len(rates), sharey=True)), rates, strict=True):
        own = [row for row in rows if row["rate"] == rate]
        names = [row["policy"] for row in own]
        axes.bar(names, [row["all"]["p50"] for row in own], label="median")
        for mark, p in (("^", "p90"), ("_", "p99")):
            axes.plot(names, [row["all"][p] for row in own], mark, color="black", label=p)
        axes.set(title=f"{rate} requests/s", yscale="log")
        axes.grid(visible=False, axis="x")
    first = figure.axes[0]
    first.set_ylabel("TTFT over that of the prompt alone")
    first.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("mix", type=Path, help="CSV of lengths")
    parser.add_argument("--requests", type=int, default=1600)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.25, 0.75])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--tpot", type=float, default=0.05)
    parser.add_argument(
        "--ttft-least", type=float, default=Slo().ttft_least, help="seconds; else five times that alone"
    )
    parser.add_argument("--max-share", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    requests = read_workload(options.mix, options.requests)
    slo = Slo(ttft_factor=5.0, ttft_least=options.ttft_least, tpot=options.tpot)
    runs = [
        simulate(policy, requests, rate, slo, options.max_share, options.seed)
        for rate in options.rates
        for policy in options.policies
    ]
    rows = [run.row() for run in runs]
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
