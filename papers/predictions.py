"""Times that this engine is predicted to take on H100, to be tested there: `python -m papers.predictions`.

It writes `docs/results/predictions.md`: for models, GPUs and lengths of a prompt the plan with the least TTFT of those
that `longctx plan` looks at, its times, and the command that measures them.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from longctx.parallel import Topology
from longctx.serving import ParallelPlan
from longctx.simulation.models import MODELS
from longctx.simulation.planner.search import Goal, Planned, search

NAMES = ("llama-3-8b", "llama-3-70b", "llama-3-405b")
GPUS = (1, 8, 16, 64)
LENGTHS = (8_192, 131_072, 1_000_000, 10_000_000)
OUTPUT = 256
TPOT = 0.1  # of a request that decodes beside the prompt
# 10th and 90th percentile of measured over predicted, of the 77 runs of vLLM and SGLang in bfloat16 in silicon.md.
TTFT_RANGE, TPOT_RANGE = (0.87, 1.17), (0.96, 1.04)
HEAD = ("model", "GPUs", "tokens", "plan", "TTFT", "TPOT", "flags of the command")
PAGE = """# Predictions to be tested

TTFT and TPOT of one request on an idle engine of this library, in bfloat16 on H100s of 80 GB: **predicted, none of it
measured**. Devices are those of [simulation_hardware.md](../simulation_hardware.md): attention as fast as
FlashAttention 3, products and all-reduces as vLLM's. Up to 8 GPUs are one host (`h100-nvlink`), more are hosts of 8
(`h100-rdma`). Of the plans that `longctx plan` looks at, each row has the one with the least TTFT whose memory suffices
and which lets another request decode in {tpot:.0f} ms; a plan is `stage x context x tensor`.
`python -m papers.predictions` writes this page.

Intervals are what runs of vLLM and SGLang on H100 took over what was predicted of them, from the 10th to the 90th
percentile ([silicon.md](silicon.md)): TTFT {ttft[0]} to {ttft[1]} times, TPOT {tpots[0]} to {tpots[1]} times. These had
up to 16,000 tokens on up to 8 GPUs, so for longer prompts and more hosts they are too narrow. Overheads of this
engine's host are not in the predictions.

To test a row, with a checkpoint of these sizes whose `max_position_embeddings` allows the length (times do not depend
on weights), in each host's process of a group as in [distributed.md](../distributed.md):

    longctx bench --model DIR --dtype bfloat16 --requests 1 --prompt-tokens TOKENS --output-tokens {output} FLAGS

"""


def predict(name: str, gpus: int, tokens: int) -> Planned | None:
    """Predict the plan with the least TTFT of a prompt of `tokens` tokens; None: no plan has the memory."""
    model = dataclasses.replace(MODELS[name], max_positions=max(MODELS[name].max_positions, tokens + OUTPUT))
    topology = Topology.preset("h100-nvlink" if gpus <= 8 else "h100-rdma")
    plans = search(model, topology, gpus, Goal(tokens, ttft=1e6, tpot=TPOT, output_tokens=OUTPUT)).plans
    return min(plans, key=lambda planned: (planned.prompt.ttft, planned.prompt.tpot), default=None)


def flags(planned: Planned) -> str:
    """Return what `longctx bench` is given of a plan."""
    plan, config, default = planned.deployment.plan, planned.deployment.config, ParallelPlan()
    words = [
        f"--{name.replace('_', '-')} {getattr(plan, name)}"
        for name in ("stage", "context", "tensor", "exchange", "placement", "rank_tokens", "ffn")
        if getattr(plan, name) != getattr(default, name)
    ]
    return " ".join([*words, f"--chunking {config.chunking}", f"--token-budget {config.token_budget}"])


def table() -> Iterator[tuple[str, ...]]:
    """Yield the rows, with a head; cases that no plan has the memory for are left out."""
    yield HEAD
    yield ("---",) * len(HEAD)
    for name in NAMES:
        for gpus in GPUS:
            for tokens in LENGTHS:
                planned = predict(name, gpus, tokens)
                if planned is not None:
                    plan, prompt = planned.deployment.plan, planned.prompt
                    sizes = f"{plan.stage} x {plan.context} x {plan.tensor}"
                    ttft = _with_range(prompt.ttft, TTFT_RANGE, "s")
                    tpot = _with_range(1e3 * prompt.tpot, TPOT_RANGE, "ms")
                    yield (name, str(gpus), f"{tokens:,}", sizes, ttft, tpot, f"`{flags(planned)}`")


def _with_range(value: float, factors: tuple[float, float], unit: str) -> str:
    shown, low, high = (f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" for x in (value, *(value * each for each in factors)))
    return f"{shown} {unit} ({low} to {high})"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m papers.predictions", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder to write into")
    path = parser.parse_args().out / "predictions.md"
    page = PAGE.format(tpot=1e3 * TPOT, ttft=TTFT_RANGE, tpots=TPOT_RANGE, output=OUTPUT)
    path.write_text(page + "\n".join(f"| {' | '.join(cells)} |" for cells in table()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
