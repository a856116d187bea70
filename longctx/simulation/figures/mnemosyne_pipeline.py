"""The sequence pipeline: Mnemosyne's figures 14, 15, 16 and 20 (Medha's figures 5a, 8, 9, 10 and 19)."""

import dataclasses
import functools
from itertools import pairwise
from typing import Any

from longctx.models.config import LlamaConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.work import Work
from longctx.simulation.figures.figure import Figure, Inputs, Statement, ordering
from longctx.simulation.figures.mnemosyne_runs import (
    B8,
    B70,
    CHUNK,
    MODELS_BY_NAME,
    TOPOLOGY,
    Run,
    fits,
    serve,
    static,
    tokens,
)
from longctx.simulation.hardware import predictor
from longctx.simulation.utilization import mfu

STAGES = (1, 2, 4, 8, 16)
LENGTHS = (1, 2, 4, 8, 10)  # millions of tokens


@functools.cache
def prefill(model: LlamaConfig, stages: int, prompt: int, outputs: int = 1) -> Run:
    """A prompt in chunks of 4,096 over hosts of 8 GPUs, each of which is a stage."""
    return serve(model, ParallelPlan.medha(stages, 1, 8), static(CHUNK), prompt, outputs)


def striped(hosts: int, prompt: int) -> Run:
    """A whole prompt in one step, its rows sharded over hosts, whose keys go round them in a ring: Striped Attention.

    Stripes and zigzag balance the causal mask alike.
    """
    plan = ParallelPlan(1, hosts, 8, exchange="pass_kv", placement="interleave")
    return serve(B8, plan, static(-(-prompt // hosts)), prompt)


def ring_of_gpus(prompt: int) -> float:
    """TTFT of striped attention over 128 GPUs, each of which is a rank, where nothing hides the ring's hops."""
    slow = dataclasses.replace(TOPOLOGY, device=dataclasses.replace(TOPOLOGY.device, contention=1.0))
    work = Work().with_sharded(0, prompt, 128, samples=True, exchange="pass_kv")
    return predictor(B8, slow, ParallelPlan(context=128, exchange="pass_kv"), max_rows=work.rows).seconds(work)


def figure_14(inputs: Inputs) -> Figure:
    """TTFT of 1M tokens, and how long a step blocks others: striped attention against the sequence pipeline."""
    prompt = tokens(inputs, 1)
    table: list[dict[str, Any]] = []
    for hosts in STAGES:
        ring, pipeline = striped(hosts, prompt), prefill(B8, hosts, prompt)
        table.append({
            "GPUs": 8 * hosts,
            "striped TTFT, s": ring.ttft,
            "pipeline TTFT, s": pipeline.ttft,
            "striped step, s": max(step.seconds for step in ring.steps),
            "pipeline step, s": max(step.seconds for step in pipeline.steps),
        })  # fmt: skip
    one, most = table[0], table[-1]
    faster, bare = (ttft / most["pipeline TTFT, s"] for ttft in (most["striped TTFT, s"], ring_of_gpus(prompt)))
    statements = [
        Statement("14a, Medha 8", "8B, 1M, 128 H100: TTFT of striped attention over the pipeline's", 1.64, faster, "x",
                  "hosts of 8 hide the ring's hops, and stripes cost a roofline nothing, while a pipeline has to fill; in a "
                  f"ring of 128 GPUs whose hops nothing hides it would be {bare:.2f}"),
        ordering("14a", "8B, 1M, 128 H100: TTFT of the pipeline is under 15 s", most["pipeline TTFT, s"] < 15),
        Statement("14b, Medha 5a", "8B, 1M, 128 H100: the longest step of the pipeline, chunks of 4,096", 62,
                  most["pipeline step, s"] * 1e3, "ms"),
        Statement("14b", "8B, 1M, 8 H100: how long striped attention blocks others", 120, one["striped step, s"], "s"),
        ordering("14b", "at any number of hosts, the pipeline's steps are at least 50 times shorter",
                 all(row["striped step, s"] > 50 * row["pipeline step, s"] for row in table)),
    ]  # fmt: skip

    def draw(left: Any, right: Any) -> None:
        gpus = [row["GPUs"] for row in table]
        for axes, what in ((left, "TTFT, s"), (right, "step, s")):
            for name in ("striped", "pipeline"):
                axes.plot(gpus, [row[f"{name} {what}"] for row in table], "o-", label=name)
            axes.set(xscale="log", yscale="log", xlabel="H100", ylabel=what)
            axes.legend()

    title = "Striped attention and the sequence pipeline: Llama-3 8B, 1M tokens"
    return Figure("mnemosyne_figure_14", title, "mnemosyne", statements, table, draw, panels=2)


def figure_15(inputs: Inputs) -> Figure:
    """TTFT of 1M to 10M tokens over 1 to 16 hosts, and what does not fit into their memory."""
    table: list[dict[str, Any]] = []
    for name, model in MODELS_BY_NAME.items():
        for millions in LENGTHS:
            prompt, base = tokens(inputs, millions), None
            for stages in STAGES:
                row: dict[str, Any] = {"model": name, "million tokens": millions, "stages": stages}
                row["fits"] = fits(model, ParallelPlan.medha(stages, 1, 8), round(millions * 1e6))
                if row["fits"]:
                    row["TTFT, s"] = ttft = prefill(model, stages, prompt).ttft
                    base = base or ttft * stages
                    row["scaling"] = base / (ttft * stages)
                table.append(row)
    scaling = {
        name: [row["scaling"] for row in table if row["fits"] and row["model"] == name] for name in ("8B", "70B")
    }

    def at(model: str, millions: int, stages: int) -> dict[str, Any]:
        return next(row for row in table if [*row.values()][:3] == [model, millions, stages])

    two, devices = at("8B", 2, 16), 128
    totals = prefill(B8, 16, tokens(inputs, 2)).totals
    used = {causal: mfu(B8, totals, TOPOLOGY.device, devices, two["TTFT, s"], causal) for causal in (True, False)}
    statements = [
        *(ordering("15, Medha 9", f"{name}: at least 80 % scaling to 16 hosts, 1M to 10M", min(scaling[name]) >= 0.8)
          for name in ("8B", "70B")),
        Statement("15a", "8B, 2M, 128 H100: TTFT", 30, two["TTFT, s"], "s"),
        ordering("15a", "8B: 30 s are kept to 2M on 128 H100, not at 4M",
                 two["TTFT, s"] <= 30 < at("8B", 4, 16)["TTFT, s"]),
        Statement("15a", "8B, 2M in 30 s on 128 H100: MFU without the causal mask, as equation 1 counts", 0.56,
                  used[False], "", f"the paper's is of 30 s; with the mask ours is {used[True]:.2f}, and theirs 0.28"),
        ordering("15b", "70B, 10M does not fit 4 hosts, and fits 8; 8B, 10M fits 4 (figure 17's plans)",
                 at("70B", 10, 8)["fits"] and not at("70B", 10, 4)["fits"] and at("8B", 10, 4)["fits"]),
        ordering("15b", "70B, 1M fits one host (figure 7's setting)", at("70B", 1, 1)["fits"]),
    ]  # fmt: skip

    def draw(*panels: Any) -> None:
        for axes, name in zip(panels, MODELS_BY_NAME, strict=True):
            for millions in LENGTHS:
                rows = [r for r in table if r["model"] == name and r["million tokens"] == millions]
                done = [r for r in rows if r["fits"]]
                (line,) = axes.plot(
                    [r["stages"] for r in done], [r["TTFT, s"] for r in done], "o-", label=f"{millions}M"
                )
                axes.plot([r["stages"] for r in rows if not r["fits"]], [5 * millions for r in rows if not r["fits"]],
                          "x", color=line.get_color())  # fmt: skip
            axes.axhline(30, color="#888888", linewidth=0.8)
            axes.set(xscale="log", yscale="log", xlabel="hosts of 8 H100 (stages)", ylabel="TTFT, s",
                     title=f"Llama-3 {name}; x: does not fit")  # fmt: skip
            axes.legend()

    title = "The sequence pipeline scales to 16 hosts"
    return Figure("mnemosyne_figure_15", title, "mnemosyne", statements, table, draw, panels=2)


def figure_16(inputs: Inputs) -> Figure:
    """TPOT after 2M tokens over 1 to 16 stages."""
    prompt, table = tokens(inputs, 2), list[dict[str, Any]]()
    for name, model in MODELS_BY_NAME.items():
        for stages in STAGES:
            if fits(model, ParallelPlan.medha(stages, 1, 8), 2_000_000):
                tpot = prefill(model, stages, prompt, 16).tpot
                table.append({"model": name, "stages": stages, "TPOT, s": tpot})
    more = {}
    for name in MODELS_BY_NAME:
        rows = [row["TPOT, s"] for row in table if row["model"] == name]
        more[name] = rows[-1] / rows[0]
    statements = [
        *(ordering("16, Medha 10", f"{name}, 2M: TPOT with 16 stages is at most 20 % above the fewest that fit",
                   more[name] <= 1.2) for name in MODELS_BY_NAME),
        ordering("16", "2M: 16 stages cost the smaller model more", more["8B"] > more["70B"]),
        ordering("16", "2M: TPOT rises with the stages, for both models", all(
            one["TPOT, s"] < other["TPOT, s"] for one, other in pairwise(table) if one["model"] == other["model"]
        )),
    ]  # fmt: skip

    def draw(axes: Any) -> None:
        for name in MODELS_BY_NAME:
            rows = [row for row in table if row["model"] == name]
            axes.plot([r["stages"] for r in rows], [r["TPOT, s"] * 1e3 for r in rows], "o-", label=f"Llama-3 {name}")
        axes.set(xscale="log", xlabel="stages", ylabel="TPOT, ms", ylim=(0, None))
        axes.legend()

    title = "Stages hardly lengthen decodes: 2M tokens of context"
    return Figure("mnemosyne_figure_16", title, "mnemosyne", statements, table, draw)


def figure_20(inputs: Inputs) -> Figure:
    """Model FLOPs utilisation of prefill over 1 to 16 hosts, with the causal mask and without."""
    table: list[dict[str, Any]] = []
    for name, model in MODELS_BY_NAME.items():
        for millions in LENGTHS:
            for stages in STAGES:
                if not fits(model, ParallelPlan.medha(stages, 1, 8), round(millions * 1e6)):
                    continue
                run = prefill(model, stages, tokens(inputs, millions))
                used = [
                    mfu(model, run.totals, TOPOLOGY.device, 8 * stages, run.ttft, causal) for causal in (False, True)
                ]
                table.append({"model": name, "million tokens": millions, "stages": stages, "MFU without mask": used[0],
                              "MFU": used[1]})  # fmt: skip
    every = [row["MFU without mask"] for row in table]
    large = [row["MFU without mask"] for row in table if row["model"] == "70B"]
    at_128 = [row["MFU without mask"] for row in table if row["model"] == "70B" and row["stages"] == 16]
    about = "attention without the causal mask, as equation 1 counts"
    statements = [
        Statement("20, Medha 19", f"70B: mean MFU; {about}", 0.55, sum(large) / len(large)),
        Statement("6.5", f"8B and 70B: best MFU; {about}", 0.75, max(every)),
        ordering("Medha 19", f"70B, 128 H100: MFU above 50 % at every length; {about}", min(at_128) > 0.5),
        ordering("6.5", "MFU falls as hosts are added, for each model and length", all(
            one["MFU"] > other["MFU"] for one, other in pairwise(table) if one["stages"] < other["stages"]
        )),
    ]  # fmt: skip

    def draw(*panels: Any) -> None:
        for axes, name in zip(panels, MODELS_BY_NAME, strict=True):
            for millions in LENGTHS:
                rows = [r for r in table if r["model"] == name and r["million tokens"] == millions]
                axes.plot(
                    [r["stages"] for r in rows], [r["MFU without mask"] for r in rows], "o-", label=f"{millions}M"
                )
            axes.set(xscale="log", xlabel="stages", ylabel="MFU without mask", ylim=(0, 1), title=f"Llama-3 {name}")
            axes.legend()

    title = "Model FLOPs utilisation of the sequence pipeline"
    return Figure("mnemosyne_figure_20", title, "mnemosyne", statements, table, draw, panels=2)
