"""Mnemosyne's figures 1 (the whole), 13 (against vLLM), 21 (bandwidth) and 22 (batches); Medha's figure 20."""

import dataclasses
import math
from itertools import pairwise
from typing import Any

import numpy as np

from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.work import Work
from longctx.simulation.figures.figure import Figure, Inputs, Statement, ordering
from longctx.simulation.figures.mnemosyne_chunks import HOST, SIZES
from longctx.simulation.figures.mnemosyne_pipeline import LENGTHS, prefill
from longctx.simulation.figures.mnemosyne_ranks import RANKS, STAGES, decode
from longctx.simulation.figures.mnemosyne_runs import (
    B8,
    CHUNK,
    MODELS_BY_NAME,
    SHORT,
    TOPOLOGY,
    TPOT_TARGET,
    fits,
    predict,
    serve,
    static,
    tokens,
)
from longctx.simulation.record import Totals
from longctx.simulation.utilization import mbu

MULTIPROCESSORS = 132  # of an H100 SXM, by data sheet
QUERY_BLOCK = 128  # queries of a thread block of FlashAttention-2 with heads of 128 (its paper, 3.3)


def figure_1(inputs: Inputs) -> Figure:
    """TTFT and TPOT to 10M tokens on 128 H100: 16 stages for the one, 4 ranks of 4 stages for the other."""
    table: list[dict[str, Any]] = []
    for name, model in MODELS_BY_NAME.items():
        ranks = 16 // STAGES[name]
        for millions in LENGTHS:
            if fits(model, ParallelPlan.medha(STAGES[name], ranks, 8), round(millions * 1e6)):
                prompt = tokens(inputs, millions)
                table.append({"model": name, "million tokens": millions, "TTFT, s": prefill(model, 16, prompt).ttft,
                              "ranks": ranks, "TPOT, s": decode(model, STAGES[name], ranks, prompt)})  # fmt: skip
    small = [row for row in table if row["model"] == "8B"]
    statements = [
        ordering("1", "8B: prompts of up to 10M tokens are served on 128 H100", small[-1]["million tokens"] == 10),
        ordering("1", "8B, 128 H100: at most 30 ms between tokens up to 10M",
                 all(row["TPOT, s"] <= TPOT_TARGET for row in small)),
        ordering("1", "from 1M to 10M TPOT grows less than tokens, and TTFT more",
                 small[-1]["TPOT, s"] / small[0]["TPOT, s"] < 10 < small[-1]["TTFT, s"] / small[0]["TTFT, s"]),
    ]  # fmt: skip

    def draw(left: Any, right: Any) -> None:
        for axes, what in ((left, "TTFT, s"), (right, "TPOT, s")):
            for name in MODELS_BY_NAME:
                rows = [row for row in table if row["model"] == name]
                axes.plot([r["million tokens"] for r in rows], [r[what] for r in rows], "o-", label=f"Llama-3 {name}")
            axes.set(xlabel="tokens, M", ylabel=what)
            axes.legend()
        left.set(yscale="log")
        right.axhline(TPOT_TARGET, color="#888888", linewidth=0.8)

    title = "Up to 10M tokens on 128 H100"
    return Figure("mnemosyne_figure_1", title, "mnemosyne", statements, table, draw, panels=2)


def figure_13(inputs: Inputs) -> Figure:
    """Against vLLM with TP8: prefill whose kernels divide queries alone among multiprocessors, and decode."""
    prompt, table = tokens(inputs, 1), list[dict[str, Any]]()
    for chunk in (128, 256, 512, 1024, 2048, 4096):
        blocks = math.ceil(chunk / QUERY_BLOCK) * B8.num_heads // HOST.tensor
        busy = min(1.0, blocks / MULTIPROCESSORS)
        predictor = predict(B8, HOST, chunk)
        divided = dataclasses.replace(predictor, per_pair=predictor.per_pair / busy)
        ours = serve(B8, HOST, static(chunk), prompt).ttft
        theirs = divided.prefill_seconds(0, prompt, chunk)
        table.append({"chunk": chunk, "thread blocks": blocks, "TTFT, s": ours, "TTFT, queries alone divided, s": theirs,
                      "ratio": theirs / ours})  # fmt: skip
    at_512 = next(row["ratio"] for row in table if row["chunk"] == 512)
    tpot = decode(B8, 1, 1, prompt)
    statements = [
        Statement("13a", "8B, 1M, TP8: vLLM's TTFT over ours, both in vLLM's default chunks of 512", 6.0, at_512, "x",
                  "4 heads x 4 blocks of 128 queries busy 16 of 132 multiprocessors; the paper does not say its chunk, "
                  "and vLLM's host is not counted"),
        Statement("13b", "8B, 1M, TP8: vLLM's TPOT over ours", 3.8, 1.0, "x",
                  f"the devices do the same: the paper's gain is the host's, {2.8 * tpot * 1e3:.0f} ms a step for page tables "
                  "of 62,500 entries, Ray and no CUDA graphs, of which a simulation of devices knows nothing"),
        ordering("13a", "the smaller the chunk, the more vLLM's kernels lose",
                 all(one["ratio"] > other["ratio"] for one, other in pairwise(table))),
    ]  # fmt: skip

    def draw(axes: Any) -> None:
        for name, label in (
            ("TTFT, s", "queries and keys divided"),
            ("TTFT, queries alone divided, s", "queries alone"),
        ):
            axes.plot([row["chunk"] for row in table], [row[name] for row in table], "o-", label=label)
        axes.set(xscale="log", yscale="log", xlabel="chunk, tokens", ylabel="TTFT of 1M tokens, s")
        axes.legend()

    title = "Kernels that divide queries alone are slow in small chunks: Llama-3 8B, 8 H100"
    return Figure("mnemosyne_figure_13", title, "mnemosyne", statements, table, draw)


def figure_21(inputs: Inputs) -> Figure:
    """Model bandwidth utilisation of decodes: TP8 and 1 to 4 ranks."""
    table: list[dict[str, Any]] = []
    for name, model in MODELS_BY_NAME.items():
        for millions in LENGTHS:
            for ranks in RANKS:
                plan, prompt = ParallelPlan.medha(1, ranks, 8), tokens(inputs, millions)
                if fits(model, plan, round(millions * 1e6)):
                    tpot = decode(model, 1, ranks, prompt)
                    used = mbu(model, Totals(steps=1, rows=1, keys=prompt), TOPOLOGY.device, plan, tpot)
                    table.append(
                        {"model": name, "million tokens": millions, "ranks": ranks, "TPOT, s": tpot, "MBU": used}
                    )
    by_setting = {(row["model"], row["million tokens"], row["ranks"]): row["MBU"] for row in table}
    pairs = [(used, by_setting[m, n, 2 * r]) for (m, n, r), used in by_setting.items() if (m, n, 2 * r) in by_setting]
    statements = [
        Statement("21, Medha 20", "8B and 70B, TP8 x KVP: best MBU of decodes", 0.92, max(by_setting.values()), "",
                  "keys are read at the share that was measured of A100's kernels"),
        ordering("21", "MBU falls as ranks are added, for each model and length", all(a > b for a, b in pairs)),
        ordering("21", "MBU rises with the context, for each model and number of ranks", all(
            by_setting[m, n, r] < by_setting[m, o, r]
            for m, n, r in by_setting for o in LENGTHS if o > n and (m, o, r) in by_setting
        )),
    ]  # fmt: skip

    def draw(*panels: Any) -> None:
        for axes, name in zip(panels, MODELS_BY_NAME, strict=True):
            for ranks in RANKS:
                rows = [row for row in table if (row["model"], row["ranks"]) == (name, ranks)]
                axes.plot([r["million tokens"] for r in rows], [r["MBU"] for r in rows], "o-", label=f"KVP {ranks}")
            axes.set(xlabel="tokens of context, M", ylabel="MBU", ylim=(0, 1), title=f"Llama-3 {name}")
            axes.legend()

    title = "Model bandwidth utilisation of decodes"
    return Figure("mnemosyne_figure_21", title, "mnemosyne", statements, table, draw, panels=2)


def figure_22(inputs: Inputs) -> Figure:
    """P95 of the time of batches of a chunk of a 1M prompt and up to 128 decodes of 1,000 tokens: 8B, 8 H100.

    Steps lengthen with the context before the chunk, so P95 is the batch at 95 % of the prompt. The core serves one of
    the settings: there decodes go on, and have more tokens each when the prompt has been computed.
    """
    prompt, predictor, table = tokens(inputs, 1), predict(B8, HOST), list[dict[str, Any]]()
    for chunk in SIZES:
        for decodes in (0, 8, 32, 128):
            batch = [(round(0.95 * prompt) - chunk, chunk, False), *[(SHORT, 1, True)] * decodes]
            table.append({"chunk": chunk, "decodes": decodes, "P95, s": predictor.seconds(Work.of(batch))})
    p95 = {(row["chunk"], row["decodes"]): row["P95, s"] for row in table}
    more = {chunk: p95[chunk, 128] / p95[chunk, 0] - 1 for chunk in SIZES}
    small = [chunk for chunk in SIZES if more[chunk] > 0.05]
    run, alone = (serve(B8, HOST, static(CHUNK + short), prompt, short=short) for short in (16, 0))
    served, without = (float(np.quantile([step.seconds for step in each.steps], 0.95)) for each in (run, alone))
    statements = [
        Statement("22", "8B, 1M, 8 H100: P95 of batches with 128 decodes over none, in chunks of 512", 1.05,
                  1 + more[512]),
        ordering("22", "up to 128 decodes of 1K lengthen batches by at most 5 %, in chunks of 128 to 4,096",
                 all(more[chunk] <= 0.05 for chunk in SIZES if chunk >= 128),
                 f"more than 5 % in chunks of {', '.join(map(str, small))}"),
        ordering("22", "larger chunks: longer batches", all(p95[a, 0] < p95[b, 0] for a, b in pairwise(SIZES))),
        ordering("22", "the core's P95 with 16 decodes, chunks of 4,096, is within 1 % of the batch at 95 %, and so without",
                 abs(without / p95[CHUNK, 0] - 1) <= 0.01 and 0.99 <= served / without <= 1.05),
    ]  # fmt: skip

    def draw(axes: Any) -> None:
        for decodes in sorted({each for _, each in p95}):
            axes.plot(SIZES, [p95[chunk, decodes] * 1e3 for chunk in SIZES], "o-", label=f"{decodes} decodes")
        axes.set(xscale="log", yscale="log", xlabel="chunk, tokens", ylabel="P95 of batches, ms")
        axes.legend()

    title = "Decodes cost little beside a chunk of a long prompt: Llama-3 8B, 1M tokens, 8 H100"
    return Figure("mnemosyne_figure_22", title, "mnemosyne", statements, table, draw)
