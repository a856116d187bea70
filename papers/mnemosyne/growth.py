"""A long prompt among others: Mnemosyne's sections 4.4 and 6.3, figures 19 and 22 (Medha's section 3.4)."""

from itertools import pairwise
from typing import Any

import numpy as np

from longctx.models import cache_bytes, weight_bytes
from longctx.serving import ParallelPlan
from longctx.serving.predictor import Work, readable_tokens
from papers.figures.figure import Figure, Inputs, Statement, ordering
from papers.mnemosyne.chunks import SIZES
from papers.mnemosyne.ranks import STAGES, spread
from papers.mnemosyne.runs import (
    B8,
    CHUNK,
    DEVICE,
    HOST,
    MODELS_BY_NAME,
    SHORT,
    TPOT_TARGET,
    M,
    Row,
    Run,
    doubling,
    lines,
    predict,
    ranks_of,
    serve,
    static,
    tokens,
)


def _millions(value: float, place: int) -> str:
    """Format a number of tokens on an axis of millions."""
    return f"{value / M:g}"


def timeline(run: Run, every: int = 1) -> list[Row]:
    """Return one in `every` steps of a run."""
    rows, before = list[Row](), 0
    for number, (step, count) in enumerate(zip(run.steps, run.chunks, strict=True)):
        if number % every == 0:
            row = {"tokens_before": before, "ends_s": step.finished, "ranks": ranks_of(step), "step_s": step.seconds}
            rows.append(row)
        before += count
    return rows


def grows_at(run: Run) -> list[int]:
    """The tokens after which each further rank came."""
    steps = timeline(run)
    return [after["tokens_before"] for before, after in pairwise(steps) if after["ranks"] > before["ranks"]]


def section_4_4(inputs: Inputs) -> Figure:
    """A chunk of 128 tokens beside decodes as a context grows to 4M: on one rank, and on ranks that are added."""
    prompt, chunk = tokens(inputs, 4), 128 if not inputs.quick else 1024
    alone = serve(B8, HOST, static(chunk + 1), prompt, short=1)
    grown = serve(B8, spread(1, 4, prompt), static(chunk), prompt)
    table = [
        {"setting": name, **row}
        for name, run in (("1 rank", alone), ("4 ranks", grown))
        for row in timeline(run, len(run.steps) // 64 + 1)
    ]
    first, later = (
        max(step.seconds for step in grown.steps if (ranks_of(step) > 1) == is_later) for is_later in (False, True)
    )
    p95 = alone.gap(0.95) * 1e3
    about = "8B, 4M: steps of one rank grow with the context; with ranks added at each 1M they stay as at the first 1M"
    statements = [
        Statement("4.4", "8B, 4M, 8 H100: P95 between tokens beside chunks of 128", 100, p95, "ms"),
        ordering("10", about, later <= 1.2 * first and alone.longest_step > 2 * later),
    ]

    def draw(axes: Any) -> None:
        lines(axes, table, "tokens_before", "step_s", by="setting", marker="-")
        axes.set(xlabel="tokens before the chunk, M", ylabel="step, s", ylim=(0, None))
        axes.xaxis.set_major_formatter(_millions)

    title = "Ranks that are added bound the time of a step: Llama-3 8B, 4M tokens in chunks of 128"
    return Figure(title, statements, table, draw)


def section_6_3(inputs: Inputs) -> Figure:
    """Growth of a request onto another rank: memory is full, or decodes would not keep 30 ms between tokens."""
    prompt, table, statements = tokens(inputs, 10), list[Row](), list[Statement]()
    room = 3 * prompt // 10
    by_memory, by_latency = dict[str, list[int]](), dict[str, list[int]]()
    for (name, model), paper in zip(MODELS_BY_NAME.items(), (4.0, 2.0), strict=True):
        stages = STAGES[name]
        plan = ParallelPlan.medha(stages, 4, 8)
        for reason, run, grows in (
            ("memory", serve(model, plan, static(CHUNK), prompt, 16, memory=room), by_memory),
            ("latency", serve(model, plan, static(CHUNK, TPOT_TARGET), prompt, 16), by_latency),
        ):
            grows[name] = grows_at(run)
            row: Row = {"model": name, "limit": reason, "tpot_s": run.tpot}
            table.append(row | {f"rank_{number}_at": at for number, at in enumerate(grows[name], 2)})
        one = predict(model, ParallelPlan.medha(stages, tensor=8))
        share = DEVICE.reached_key_bandwidth / DEVICE.memory_bandwidth
        limit = readable_tokens(one, TPOT_TARGET, stages, 2**24) / M
        keys, weights = (
            size / 8 / DEVICE.memory_bandwidth * 1e3
            for size in (cache_bytes(model, round(paper * M)), weight_bytes(model))
        )
        about = f"{name}, SPP{stages}: longest context of one rank that keeps a TPOT of 30 ms"
        why = (
            f"by data sheet {paper:.0f}M keys take {keys:.1f} ms of the 30 and the weights {weights:.1f}; ours is for "
            f"keys at {share:.0%} of that rate (FlashAttention 3, measured) and latencies of kernels and all-reduces"
        )
        statements.append(Statement("6.3", about, paper, limit, "M tokens", why))
    is_filled = all([round(at / room, 1) for at in grown] == [1, 2, 3] for grown in by_memory.values())
    shorter = min(by_latency["70B"], default=prompt) < min(by_latency["8B"], default=prompt)
    statements += [
        ordering("6.3", "by latency, 70B grows onto a second rank at a shorter context than 8B", shorter),
        ordering("4.4", "by memory, 10M grow from rank to rank as each is full: ranks of 3M", is_filled),
    ]
    title = "A request grows onto another rank by memory or by latency: 10M tokens, up to 4 ranks"
    return Figure(title, statements, table)


def figure_19(inputs: Inputs) -> Figure:
    """GPUs in use as 2M tokens are computed: TP8, SPP4, up to 4 ranks. The caption says 8B, the text 70B."""
    prompt, table, statements = tokens(inputs, 2), list[Row](), list[Statement]()
    for name, model in MODELS_BY_NAME.items():
        rows = timeline(serve(model, spread(4, 4, prompt), static(CHUNK), prompt))
        table += [{"model": name, **row, "gpus": 32 * row["ranks"]} for row in rows]
        for quarter, which in enumerate(("first", "second", "third", "last")):
            middle = (quarter + 0.5) * prompt / 4
            gpus = 32 * max(row["ranks"] for row in rows if row["tokens_before"] <= middle)
            about = f"{name}: GPUs in the {which} quarter of 2M tokens"
            statements.append(Statement("19", about, 32 * (quarter + 1), gpus, "GPUs", basis="arithmetic"))
        grown = [row["step_s"] for row in rows[:-1] if row["ranks"] > 1]  # the last chunk is shorter
        longest = max(row["step_s"] for row in rows if row["ranks"] == 1)
        is_even = max(grown) < 1.2 * min(min(grown), longest)
        statements.append(ordering("19", f"{name}: with more than one rank, steps differ by less than 20 %", is_even))

    def draw(left: Any, right: Any) -> None:
        lines(left, table, "tokens_before", "gpus", by="model", label="Llama-3 {}", marker="-")
        lines(right, table, "tokens_before", "step_s", by="model", label="Llama-3 {}", marker="-")
        left.set(xlabel="tokens before the chunk, M", ylabel="H100 in use", ylim=(0, 140))
        right.set(xlabel="tokens before the chunk, M", ylabel="step, s", ylim=(0, None))
        for axes in (left, right):
            axes.xaxis.set_major_formatter(_millions)

    title = "GPUs are added as a context grows: 2M tokens, TP8, SPP4, KVP up to 4"
    return Figure(title, statements, table, draw, panels=2)


def figure_22(inputs: Inputs) -> Figure:
    """P95 of the time of batches of a chunk of a 1M prompt and up to 128 decodes of 1,000 tokens: 8B, 8 H100.

    Steps lengthen with the context before the chunk, so P95 is the batch at 95 % of the prompt. The core serves one
    setting: there decodes have more tokens each as the prompt goes on.
    """
    prompt, predictor, p95 = tokens(inputs, 1), predict(B8, HOST), dict[tuple[int, int], float]()
    for chunk in SIZES:
        for decodes in (0, 8, 32, 128):
            batch = [(round(0.95 * prompt) - chunk, chunk, False), *[(SHORT, 1, True)] * decodes]
            p95[chunk, decodes] = predictor.seconds(Work.of(batch))
    table: list[Row] = [{"chunk": chunk, "decodes": decodes, "p95_s": each} for (chunk, decodes), each in p95.items()]
    more = {chunk: p95[chunk, 128] / p95[chunk, 0] for chunk in SIZES}
    for decodes in (0, 16):
        run = serve(B8, HOST, static(CHUNK + decodes), prompt, short=decodes)
        core = float(np.quantile([step.seconds for step in run.steps], 0.95))
        table.append({"chunk": CHUNK, "decodes": decodes, "core_p95_s": core})
    why = (
        f"{more[128] - 1:.1%} in chunks of 128, and {more[32] - 1:.0%} in chunks of 32, as decodes are most of the rows"
    )
    is_5 = all(more[chunk] <= 1.05 for chunk in SIZES if chunk >= 256)
    longer = all(p95[a, 0] < p95[b, 0] for a, b in pairwise(SIZES))
    statements = [
        Statement(
            "22", "8B, 1M, 8 H100: P95 of batches with 128 decodes over none, chunks of 512", 1.05, more[512], "x"
        ),
        ordering("22", "8B, 1M: 128 decodes lengthen batches by at most 5 %, chunks of 256 to 4,096", is_5, why),
        ordering("22", "larger chunks: longer batches", longer),
    ]

    def draw(axes: Any) -> None:
        lines(axes, table, "chunk", "p95_s", by="decodes", label="{} decodes")
        doubling(axes, SIZES)
        axes.set(yscale="log", xlabel="chunk, tokens", ylabel="P95 of batches, s")

    title = "Decodes cost little beside a chunk of a long prompt: Llama-3 8B, 1M tokens, 8 H100"
    return Figure(title, statements, table, draw)
