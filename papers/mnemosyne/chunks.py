"""Sizes of chunks: Mnemosyne's figures 7, 8 and 13, and section 4.2 (Medha's figures 5b and 6, and section 3.2)."""

import dataclasses
import math
from itertools import pairwise
from typing import Any

from longctx.serving.predictor import Predictor, Work
from longctx.simulation.workloads import WorkloadRequest
from papers.baselines import make_simulation
from papers.figures.figure import Figure, Inputs, Statement, ordering
from papers.mnemosyne.runs import (
    B8,
    B70,
    HOST,
    TOPOLOGY,
    Row,
    Run,
    adaptive,
    doubling,
    lines,
    named,
    predict,
    serve,
    static,
    tokens,
)

SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MULTIPROCESSORS = 132  # of an H100 SXM, by data sheet
QUERY_BLOCK = 128  # queries of a thread block of FlashAttention-2 (its paper, 3.3)
VLLM_CHUNK = 512  # tokens; vLLM's default where prompts are chunked, in 2024


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
    attention = {chunk: attention_seconds(predictor, prompt, chunk) for chunk in SIZES}
    ttft = {chunk: serve(B8, HOST, static(chunk), prompt).ttft for chunk in SIZES}
    table = [{"chunk": chunk, "attention_70b_s": attention[chunk], "ttft_8b_s": ttft[chunk]} for chunk in SIZES]
    small, smaller = attention[32] / attention[2048], ttft[32] / ttft[4096]
    about = "70B, 1M: attention in chunks of 128 takes at most 10 % more than in chunks of 2,048"
    statements = [
        Statement("7, Medha 5b", "70B, 1M, 8 H100: attention in chunks of 32 over chunks of 2,048", 1.11, small, "x"),
        ordering("7", about, attention[128] <= 1.1 * attention[2048]),
        Statement("4.2", "8B, 1M, 8 H100: TTFT in chunks of 32 over chunks of 4,096", 1.75, smaller, "x"),
        ordering("4.2", "8B, 1M: the smaller the chunk, the longer TTFT", all(ttft[a] > ttft[b] for a, b in _PAIRS)),
    ]

    def draw(left: Any, right: Any) -> None:
        left.plot(SIZES, list(attention.values()), "o-")
        right.plot(SIZES, list(ttft.values()), "o-")
        for axes, what in ((left, "70B: attention, s"), (right, "8B: TTFT, s")):
            doubling(axes, SIZES)
            axes.set(xlabel="chunk, tokens", ylabel=what)
            axes.set_ylim(0, 1.1 * axes.dataLim.ymax)

    title = "Small chunks cost attention little, and the rest more: 1M tokens on 8 H100"
    return Figure(title, statements, table, draw, panels=2)


_PAIRS = list(pairwise(SIZES))


def figure_8(inputs: Inputs) -> Figure:
    """TTFT of a long prompt and the time between tokens beside it, with static and adaptive chunks: 8B, 1M, 8 H100."""
    # Adaptive chunks have up to 4,096 tokens: of static ones that large there is nothing to gain.
    prompt, sizes = tokens(inputs, 1), SIZES[2:-1] if not inputs.quick else SIZES[3:-1:2]
    statics = [serve(B8, HOST, static(size + 1), prompt, short=1) for size in sizes]
    # Each adaptive run may take as long for a step as the static one has between tokens.
    adaptives = [serve(B8, HOST, adaptive(run.gap(0.95)), prompt, short=1) for run in statics]
    table = [_row("static", size, run) for size, run in zip(sizes, statics, strict=True)]
    table += [_row("adaptive", size, run) for size, run in zip(sizes, adaptives, strict=True)]
    trades = all(a.ttft > b.ttft and a.gap(0.95) < b.gap(0.95) for a, b in pairwise(statics))
    both = list(zip(adaptives, statics, strict=True))
    wins = all(ours.ttft < other.ttft and ours.gap(0.95) <= 1.01 * other.gap(0.95) for ours, other in both)
    shrinks = all(before >= after for run in adaptives for before, after in pairwise(run.chunks[:-1]))
    is_even = all(run.gap(0.5) > 0.95 * run.gap(0.95) for run in adaptives)
    statements = [
        ordering("8a, Medha 6a", "larger static chunks: lower TTFT, longer time between tokens", trades),
        ordering("8b, Medha 6b", "adaptive chunks: lower TTFT than static ones of the same P95 between tokens", wins),
        ordering("4.2", "adaptive chunks begin large and shrink as the context before them grows", shrinks),
        ordering("8b", "adaptive chunks: P50 between tokens is within 5 % of P95, as steps take equally long", is_even),
    ]

    def draw(left: Any, right: Any) -> None:
        lines(left, table, "p95_between_tokens_s", "ttft_s", by="chunks")
        left.set(xscale="log", xlabel="P95 between tokens beside it, s", ylabel="TTFT of 1M tokens, s")
        named(left, (0.03, 0.05, 0.1, 0.2, 0.4))
        for run in adaptives:
            right.plot([step.finished for step in run.steps], run.chunks, label=f"{run.gap(0.95) * 1e3:.0f} ms")
        right.set(yscale="log", xlabel="s", ylabel="adaptive chunk, tokens")
        right.legend()

    title = "Static chunks trade TTFT for time between tokens; adaptive ones less so: Llama-3 8B, 1M tokens, 8 H100"
    return Figure(title, statements, table, draw, panels=2)


def _row(kind: str, size: int, run: Run) -> Row:
    return {
        "chunks": kind,
        "static_size": size,
        "ttft_s": run.ttft,
        "p50_between_tokens_s": run.gap(0.5),
        "p95_between_tokens_s": run.gap(0.95),
        "largest_chunk": max(run.chunks),
        "smallest_chunk": min(run.chunks[:-1]),
        "steps": len(run.steps),
    }


def figure_13(inputs: Inputs) -> Figure:
    """Against vLLM with TP8: prefill whose kernels divide queries alone among multiprocessors, and decode."""
    prompt, table = tokens(inputs, 1), list[Row]()
    for chunk in SIZES[2:]:
        blocks = math.ceil(chunk / QUERY_BLOCK) * B8.num_heads // HOST.tensor
        predictor, busy = predict(B8, HOST, chunk), min(1.0, blocks / MULTIPROCESSORS)
        divided = dataclasses.replace(predictor, per_pair=predictor.per_pair / busy)
        row = {"chunk": chunk, "thread_blocks": blocks, "ttft_s": serve(B8, HOST, static(chunk), prompt).ttft}
        table.append(row | {"queries_alone_s": divided.prefill_seconds(0, prompt, chunk)})
    ratios = {row["chunk"]: row["queries_alone_s"] / row["ttft_s"] for row in table}
    ours = serve(B8, HOST, static(SIZES[-1]), prompt, 16).tpot
    vllm = make_simulation("vllm", B8, TOPOLOGY, HOST.num_devices, prefix_cache=False)
    theirs = vllm.run([WorkloadRequest(0.0, prompt, 16)]).served[0].tpot
    assert ours is not None
    assert theirs is not None
    host = 2.8 * ours * 1e3  # ms: what the paper's TPOT of vLLM has beside ours
    why_prefill = (
        "4 heads x 4 blocks of 128 queries busy 16 of 132 multiprocessors; the paper does not say which chunk it had, "
        "and what vLLM's host takes is not counted"
    )
    why_decode = (
        "the devices do the same; the paper's gain is on the host (section 5: page tables sent whole, Ray, no CUDA "
        f"graphs): {host:.0f} ms a step beside our TPOT, which a simulation of devices does not know"
    )
    falls = all(before > after for before, after in pairwise(ratios.values()))
    at_512 = ratios[VLLM_CHUNK]
    statements = [
        Statement("13a", "8B, 1M, TP8: vLLM's TTFT over ours, in chunks of 512", 6.0, at_512, "x", why_prefill),
        Statement("13b", "8B, 1M, TP8: vLLM's TPOT over ours", 3.8, theirs / ours, "x", why_decode),
        ordering("13a", "8B, 1M, TP8: the smaller the chunk, the more vLLM's kernels lose", falls),
    ]

    def draw(axes: Any) -> None:
        axes.plot(SIZES[2:], [row["ttft_s"] for row in table], "o-", label="queries and keys divided")
        axes.plot(SIZES[2:], [row["queries_alone_s"] for row in table], "o-", label="queries alone")
        doubling(axes, SIZES[2:])
        axes.set(yscale="log", xlabel="chunk, tokens", ylabel="TTFT of 1M tokens, s")
        axes.legend()

    title = "Kernels that divide queries alone are slow in small chunks: Llama-3 8B, 8 H100"
    return Figure(title, statements, table, draw)
