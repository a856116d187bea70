"""Sizes of chunks: Mnemosyne's figures 7 and 8 and section 4.2 (Medha's figures 5b and 6, and section 3.2)."""

from itertools import pairwise
from typing import Any

from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.predictor.work import Work
from longctx.simulation.figures.figure import Figure, Inputs, Statement, ordering
from longctx.simulation.figures.mnemosyne_runs import B8, B70, Run, adaptive, predict, serve, static, tokens

HOST = ParallelPlan.medha(tensor=8)
SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def attention_seconds(predictor: Predictor, prompt: int, chunk: int) -> float:
    """Predicted seconds of attention of a prompt in chunks: of its steps, less those of the same rows without it."""
    total = 0.0
    for start in range(0, prompt, chunk):
        count = min(chunk, prompt - start)
        total += predictor.seconds(Work().with_chunk(start, count, False)) - predictor.seconds(Work(count))
    return total


def figure_7(inputs: Inputs) -> Figure:
    """Attention of 70B, and a whole prompt of 8B, by the size of chunks: 1M tokens, 8 H100."""
    prompt, predictor = tokens(inputs, 1), predict(B70, HOST)
    table: list[dict[str, Any]] = []
    for chunk in SIZES:
        attention = attention_seconds(predictor, prompt, chunk)
        ttft = serve(B8, HOST, static(chunk), prompt).ttft
        table.append({"chunk": chunk, "70B attention, s": attention, "8B TTFT, s": ttft})
    by_chunk = {row["chunk"]: row for row in table}
    attention = by_chunk[32]["70B attention, s"] / by_chunk[2048]["70B attention, s"]
    whole = by_chunk[32]["8B TTFT, s"] / by_chunk[4096]["8B TTFT, s"]
    over_128 = by_chunk[128]["70B attention, s"] / by_chunk[2048]["70B attention, s"]
    statements = [
        Statement("7, Medha 5b", "70B, 1M, 8 H100: attention in chunks of 32 over chunks of 2,048", 1.11, attention),
        ordering("7", "70B, 1M: attention in chunks of 128 takes at most 10 % more than of 2,048", over_128 <= 1.1),
        Statement("4.2, Medha 3.2", "8B, 1M, 8 H100: prefill in chunks of 32 over chunks of 4,096", 1.75, whole),
    ]

    def draw(left: Any, right: Any) -> None:
        for axes, name in ((left, "70B attention, s"), (right, "8B TTFT, s")):
            axes.plot(SIZES, [row[name] for row in table], "o-")
            axes.set(xscale="log", xlabel="chunk, tokens", ylabel=name, ylim=(0, None))

    title = "Small chunks cost attention little, and the rest more: 1M tokens on 8 H100"
    return Figure("mnemosyne_figure_7", title, "mnemosyne", statements, table, draw, panels=2)


def figure_8(inputs: Inputs) -> Figure:
    """TTFT of a long prompt and the time between tokens beside it, with static and adaptive chunks: 8B, 1M, 8 H100."""
    # Adaptive chunks have up to 4,096 tokens: of static ones that large there is nothing to gain.
    prompt, sizes = tokens(inputs, 1), SIZES[2:-1] if not inputs.quick else SIZES[3:-1:2]
    statics = [serve(B8, HOST, static(size + 1), prompt, short=1) for size in sizes]
    # Each adaptive run may take as long for a step as the static one has between tokens.
    adaptives = [serve(B8, HOST, adaptive(run.gap(0.95)), prompt, short=1) for run in statics]
    table = [_row("static", size, run) for size, run in zip(sizes, statics, strict=True)]
    table += [_row("adaptive", static.gap(0.95), run) for static, run in zip(statics, adaptives, strict=True)]
    shrinks = all(before >= after for run in adaptives for before, after in pairwise(run.chunks[:-1]))
    statements = [
        ordering("8a, Medha 6a", "larger static chunks: lower TTFT, longer time between tokens", all(
            big.ttft < small.ttft and big.gap(0.95) > small.gap(0.95) for small, big in pairwise(statics)
        )),
        ordering("8b, Medha 6b", "adaptive chunks: lower TTFT at the same P95 between tokens, at each of the sizes", all(
            run.ttft < other.ttft and run.gap(0.95) <= 1.01 * other.gap(0.95)
            for run, other in zip(adaptives, statics, strict=True)
        )),
        ordering("4.2", "adaptive chunks begin large and shrink with the context before them", shrinks),
        ordering("8b", "adaptive chunks: P50 between tokens is within 5 % of P95, as steps take equally long", all(
            run.gap(0.5) > 0.95 * run.gap(0.95) for run in adaptives
        )),
    ]  # fmt: skip

    def draw(left: Any, right: Any) -> None:
        for name, runs in (("static", statics), ("adaptive", adaptives)):
            left.plot([run.gap(0.95) * 1e3 for run in runs], [run.ttft for run in runs], "o-", label=name)
        left.set(xscale="log", xlabel="P95 between tokens beside it, ms", ylabel="TTFT of 1M tokens, s")
        left.legend()
        for run in adaptives:
            right.plot([step.finished for step in run.steps], run.chunks, label=f"{run.gap(0.95) * 1e3:.0f} ms")
        right.set(yscale="log", xlabel="s", ylabel="adaptive chunk, tokens")
        right.legend()

    title = "Static chunks trade TTFT for time between tokens; adaptive ones less so: Llama-3 8B, 1M tokens, 8 H100"
    return Figure("mnemosyne_figure_8", title, "mnemosyne", statements, table, draw, panels=2)


def _row(kind: str, setting: float, run: Run) -> dict[str, Any]:
    return {
        "chunks": kind,
        "chunk or target, s": setting,
        "TTFT, s": run.ttft,
        "P50 between tokens, s": run.gap(0.5),
        "P95 between tokens, s": run.gap(0.95),
        "largest chunk": max(run.chunks),
        "smallest chunk": min(run.chunks[:-1]),
        "steps": len(run.steps),
    }
