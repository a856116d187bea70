"""The sequence pipeline: Mnemosyne's figures 14, 15, 16 and 20 (Medha's figures 5a, 8, 9, 10 and 19)."""

import dataclasses
import functools
from itertools import pairwise
from typing import Any

from longctx.models import LlamaConfig
from longctx.serving import ParallelPlan
from longctx.serving.predictor import Work
from longctx.simulation.hardware import predictor
from longctx.simulation.utilization import mfu
from papers.figures.figure import Figure, Inputs, Statement, ordering
from papers.mnemosyne.runs import (
    B8,
    CHUNK,
    DEVICE,
    MODELS_BY_NAME,
    TOPOLOGY,
    Row,
    Run,
    doubling,
    fits,
    lines,
    serve,
    static,
    tokens,
)

STAGES = (1, 2, 4, 8, 16)
LENGTHS = (1, 2, 4, 8, 10)  # millions of tokens


def hosts(stages: int) -> ParallelPlan:
    """Hosts of 8 GPUs, each of which is a stage."""
    return ParallelPlan.medha(stages, tensor=8)


@functools.cache
def prefill(model: LlamaConfig, stages: int, prompt: int, outputs: int = 1) -> Run:
    """A prompt in chunks of 4,096."""
    return serve(model, hosts(stages), static(CHUNK), prompt, outputs)


def striped(ranks: int, prompt: int) -> Run:
    """A whole prompt in one step, its rows sharded over hosts, whose keys go round them in a ring: striped attention.

    Stripes and zigzag balance the causal mask alike.
    """
    plan = ParallelPlan(context=ranks, tensor=8, exchange="pass_kv", placement="interleave")
    return serve(B8, plan, static(-(-prompt // ranks)), prompt)


def bare_ring(ranks: int, prompt: int) -> float:
    """TTFT of striped attention over single GPUs, each of which is a rank, where nothing hides the ring's hops."""
    slow = dataclasses.replace(TOPOLOGY, device=dataclasses.replace(DEVICE, contention=1.0))
    work = Work().with_sharded(0, prompt, ranks, samples=True, exchange="pass_kv")
    return predictor(B8, slow, ParallelPlan(context=ranks, exchange="pass_kv"), max_rows=work.rows).seconds(work)


def figure_14(inputs: Inputs) -> Figure:
    """TTFT of 1M tokens, and how long a step blocks others: striped attention against the sequence pipeline."""
    prompt, table = tokens(inputs, 1), list[Row]()
    for stages in STAGES:
        for name, run in (("striped", striped(stages, prompt)), ("pipeline", prefill(B8, stages, prompt))):
            row = {"system": name, "gpus": 8 * stages, "ttft_s": run.ttft, "longest_step_s": run.longest_step}
            table.append(row)
    ttft, step = ({(r["system"], r["gpus"]): r[name] for r in table} for name in ("ttft_s", "longest_step_s"))
    faster = ttft["striped", 128] / ttft["pipeline", 128]
    bare = bare_ring(128, prompt) / ttft["pipeline", 128]
    why = (
        "a ring of 16 hosts hides its hops under attention, and has no pipeline to fill; "
        f"over 128 single GPUs, with hops that nothing hides, it would be {bare:.2f}"
    )
    longest = step["pipeline", 128] * 1e3
    shorter = all(step["striped", 8 * n] > 50 * step["pipeline", 8 * n] for n in STAGES)
    statements = [
        Statement("14a, Medha 8", "8B, 1M, 128 H100: TTFT of striped attention over ours", 1.64, faster, "x", why),
        ordering("14a, Medha 8", "8B, 1M, 128 H100: TTFT of the pipeline is under 15 s", ttft["pipeline", 128] < 15),
        Statement(
            "14b, Medha 5a", "8B, 1M, 128 H100: longest step of the pipeline, chunks of 4,096", 62, longest, "ms"
        ),
        Statement("14b", "8B, 1M, 8 H100: how long striped attention blocks others", 120, step["striped", 8], "s"),
        ordering("14b", "8B, 1M: the pipeline's steps are at least 50 times shorter, on 8 to 128 H100", shorter),
    ]

    def draw(left: Any, right: Any) -> None:
        lines(left, table, "gpus", "ttft_s", by="system")
        lines(right, table, "gpus", "longest_step_s", by="system")
        for axes, what in ((left, "TTFT, s"), (right, "longest step, s")):
            doubling(axes, [8 * stages for stages in STAGES])
            axes.set(yscale="log", xlabel="H100", ylabel=what)

    title = "Striped attention and the sequence pipeline: Llama-3 8B, 1M tokens"
    return Figure(title, statements, table, draw, panels=2)


def _grid(inputs: Inputs) -> list[Row]:
    """Every model, length and number of stages: what fits, and its TTFT, scaling and MFU."""
    table = list[Row]()
    for name, model in MODELS_BY_NAME.items():
        for millions in LENGTHS:
            least = None  # GPU-seconds with the fewest stages that fit
            for stages in STAGES:
                row: Row = {"model": name, "million_tokens": millions, "stages": stages}
                row["fits"] = fits(model, hosts(stages), millions)
                if row["fits"]:
                    run = prefill(model, stages, tokens(inputs, millions))
                    least = least or run.ttft * stages
                    row |= {"ttft_s": run.ttft, "scaling": least / (run.ttft * stages)}
                    for column, causal in (("mfu", True), ("mfu_without_mask", False)):
                        row[column] = mfu(model, run.totals, DEVICE, 8 * stages, run.ttft, causal)
                table.append(row)
    return table


def figure_15(inputs: Inputs) -> Figure:
    """TTFT of 1M to 10M tokens over 1 to 16 hosts, and what does not fit into their memory."""
    table = _grid(inputs)
    at = {(row["model"], row["million_tokens"], row["stages"]): row for row in table}
    scaling = {name: [r["scaling"] for r in table if r["fits"] and r["model"] == name] for name in MODELS_BY_NAME}
    two, four = at["8B", 2, 16], at["8B", 4, 16]
    big = at["70B", 10, 8]["fits"] and at["8B", 10, 4]["fits"] and not at["70B", 10, 4]["fits"]
    about, used = "8B, 2M on 128 H100: MFU, attention without the causal mask", two["mfu_without_mask"]
    why = f"of 30 s, as equation 1 counts; with the mask ours is {two['mfu']:.2f}, and theirs 0.28"
    statements = [
        ordering("15, Medha 9", "8B: at least 80 % scaling to 16 hosts, 1M to 10M", min(scaling["8B"]) >= 0.8),
        ordering("15, Medha 9", "70B: at least 80 % scaling to 16 hosts, 1M to 10M", min(scaling["70B"]) >= 0.8),
        Statement("15a", "8B, 2M, 128 H100: TTFT", 30, two["ttft_s"], "s"),
        ordering("15a", "8B, 128 H100: 2M within 30 s, and not 4M", two["ttft_s"] <= 30 < four["ttft_s"]),
        Statement("15a", about, 0.56, used, "", why),
        ordering("15", "70B, 10M fits 8 hosts and not 4; 8B, 10M fits 4 (figure 17's plans)", big),
        ordering("15", "8B and 70B, 1M fit one host", at["8B", 1, 1]["fits"] and at["70B", 1, 1]["fits"]),
    ]

    def draw(*panels: Any) -> None:
        for axes, name in zip(panels, MODELS_BY_NAME, strict=True):
            rows = [row for row in table if row["model"] == name]
            lines(axes, rows, "stages", "ttft_s", by="million_tokens", label="{}M")
            axes.axhline(30, color="#888888", linewidth=0.8)
            doubling(axes, STAGES)
            axes.set(yscale="log", xlabel="hosts of 8 H100 (stages)", ylabel="TTFT, s")
            axes.set_title(f"Llama-3 {name}, where it fits")
        panels[0].get_legend().remove()  # colours are those of the second

    title = "The sequence pipeline scales to 16 hosts"
    return Figure(title, statements, table, draw, panels=2)


def figure_16(inputs: Inputs) -> Figure:
    """TPOT after 2M tokens over 1 to 16 stages."""
    prompt, table = tokens(inputs, 2), list[Row]()
    for name, model in MODELS_BY_NAME.items():
        for stages in STAGES:
            if fits(model, hosts(stages), 2):
                tpot = prefill(model, stages, prompt, 16).tpot
                table.append({"model": name, "stages": stages, "tpot_s": tpot})
    tpots = {name: [row["tpot_s"] for row in table if row["model"] == name] for name in MODELS_BY_NAME}
    more = {name: each[-1] / each[0] for name, each in tpots.items()}
    rises = all(before < after for each in tpots.values() for before, after in pairwise(each))
    statements = [
        *(
            ordering(
                "16, Medha 10", f"{name}, 2M: TPOT of 16 stages is within 20 % of the fewest that fit", each <= 1.2
            )
            for name, each in more.items()
        ),
        ordering("16, Medha 10", "2M: TPOT rises with the stages, of both models", rises),
        ordering("16", "2M: 16 stages cost the smaller model a larger share", more["8B"] > more["70B"]),
    ]

    def draw(axes: Any) -> None:
        lines(axes, table, "stages", "tpot_s", by="model", label="Llama-3 {}")
        doubling(axes, STAGES)
        axes.set(xlabel="stages", ylabel="TPOT, s", ylim=(0, None))

    title = "Stages hardly lengthen decodes: 2M tokens of context"
    return Figure(title, statements, table, draw)


def figure_20(inputs: Inputs) -> Figure:
    """Model FLOPs utilisation of prefill over 1 to 16 hosts, with the causal mask and without."""
    table = [row for row in _grid(inputs) if row["fits"]]
    of_70b = [row for row in table if row["model"] == "70B"]
    mean = sum(row["mfu_without_mask"] for row in of_70b) / len(of_70b)
    best, worst = (pick(row["mfu_without_mask"] for row in table) for pick in (max, min))
    falls = all(one["mfu"] > other["mfu"] for one, other in pairwise(table) if one["stages"] < other["stages"])
    at_128 = all(row["mfu_without_mask"] > 0.5 for row in of_70b if row["stages"] == 16)
    longest = {(row["model"], row["stages"]): row["mfu_without_mask"] for row in table if row["million_tokens"] == 10}
    rises = all(row["mfu_without_mask"] <= longest.get((row["model"], row["stages"]), 1.0) for row in table)
    about = "without the causal mask"
    why = "caption: 50 to 60 %, text: 50 to 75; here no step takes longer than predicted, and none waits for the host"
    statements = [
        Statement("20, Medha 19", f"70B, 1M to 10M, 8 to 128 H100: mean MFU, {about}", 0.55, mean, "", why),
        Statement("6.5", f"8B and 70B: best MFU, {about}", 0.75, best),
        Statement("6.5", f"8B and 70B: lowest MFU, {about}", 0.5, worst),
        ordering("Medha 19", f"70B, 128 H100: MFU above 50 % at every length, {about}", at_128),
        ordering("Medha 5.5", f"MFU is highest at 10M, for each model and number of hosts, {about}", rises),
        ordering("6.5", "MFU falls as hosts are added, for each model and length", falls),
    ]

    def draw(*panels: Any) -> None:
        for axes, name in zip(panels, MODELS_BY_NAME, strict=True):
            rows = [row for row in table if row["model"] == name]
            lines(axes, rows, "stages", "mfu_without_mask", by="million_tokens", label="{}M")
            doubling(axes, STAGES)
            axes.set(xlabel="stages", ylabel="MFU without the mask", ylim=(0, 1))
            axes.set_title(f"Llama-3 {name}")

    title = "Model FLOPs utilisation of the sequence pipeline"
    return Figure(title, statements, table, draw, panels=2)
