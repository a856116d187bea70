"""KV parallelism: Mnemosyne's figures 1, 17, 18 and 21 (Medha's figures 11, 13 and 20)."""

import functools
from itertools import pairwise
from typing import Any

from longctx.models import LlamaConfig
from longctx.serving import ParallelPlan
from longctx.serving.predictor import Work
from longctx.simulation import Totals
from longctx.simulation.utilization import mbu
from papers.figures.figure import Figure, Inputs, Statement, ordering
from papers.mnemosyne.pipeline import LENGTHS, prefill
from papers.mnemosyne.runs import (
    B8,
    CHUNK,
    DEVICE,
    MODELS_BY_NAME,
    TOPOLOGY,
    TPOT_TARGET,
    Row,
    fits,
    lines,
    predict,
    serve,
    static,
    tokens,
)

RANKS = (1, 2, 4)
STAGES = {"8B": 4, "70B": 8}  # figure 17
SIZES = (32, 64, 128, 256)  # figure 18


def spread(stages: int, ranks: int, prompt: int, tensor: int = 8) -> ParallelPlan:
    """A plan whose ranks get equal parts of a prompt, one after the other."""
    return ParallelPlan.medha(stages, ranks, tensor, rank_tokens=-(-prompt // ranks))


@functools.cache
def decode(model: LlamaConfig, stages: int, ranks: int, prompt: int) -> float:
    """TPOT after a prompt, seconds. In which chunks it was computed does not matter."""
    tpot = serve(model, spread(stages, ranks, prompt), static(16 * CHUNK), prompt, 16).tpot
    assert tpot is not None
    return tpot


def figure_1(inputs: Inputs) -> Figure:
    """TTFT and TPOT to 10M tokens on 128 H100: 16 stages for the one, ranks of 4 or 8 stages for the other."""
    table = list[Row]()
    for name, model in MODELS_BY_NAME.items():
        ranks = 16 // STAGES[name]
        for millions in LENGTHS:
            prompt = tokens(inputs, millions)
            row: Row = {"model": name, "million_tokens": millions, "ttft_s": prefill(model, 16, prompt).ttft}
            table.append(row | {"ranks": ranks, "tpot_s": decode(model, STAGES[name], ranks, prompt)})
    small = [row for row in table if row["model"] == "8B"]
    ttft, tpot = (small[-1][column] / small[0][column] for column in ("ttft_s", "tpot_s"))
    keeps = all(row["tpot_s"] <= TPOT_TARGET for row in small)
    has_room = fits(B8, ParallelPlan.medha(16, tensor=8), 10) and fits(B8, ParallelPlan.medha(4, 4, 8), 10)
    statements = [
        ordering("1", "8B: 10M tokens fit 128 H100, in 16 stages and in 4 ranks of 4", has_room),
        ordering("1", "8B, 128 H100: at most 30 ms between tokens up to 10M (4 ranks)", keeps),
        ordering("1", "8B, from 1M to 10M: TPOT grows by less than 10, TTFT by more", tpot < 10 < ttft),
    ]

    def draw(left: Any, right: Any) -> None:
        lines(left, table, "million_tokens", "ttft_s", by="model", label="Llama-3 {}")
        lines(right, table, "million_tokens", "tpot_s", by="model", label="Llama-3 {}")
        right.axhline(TPOT_TARGET, color="#888888", linewidth=0.8)
        left.set(xlabel="tokens, M", ylabel="TTFT, s", yscale="log")
        right.set(xlabel="tokens, M", ylabel="TPOT, s", ylim=(0, None))

    title = "Up to 10M tokens on 128 H100"
    return Figure(title, statements, table, draw, panels=2)


def further_collectives(layers: float) -> float:
    """Seconds that merging takes more in some layers with three collectives, of few bytes, than with our one.

    Maxima, sums and results are reduced one after another where online softmax is spread over ranks as it stands; ours
    gathers whole states, once.
    """
    return 2 * layers * TOPOLOGY.hardware("context").collective(0)


def figure_17(inputs: Inputs) -> Figure:
    """TPOT after 4M and 10M tokens with 1, 2 and 4 ranks."""
    tpot = {
        (name, millions, ranks): decode(model, STAGES[name], ranks, tokens(inputs, millions))
        for name, model in MODELS_BY_NAME.items()
        for millions in (4, 10)
        for ranks in RANKS
    }
    table: list[Row] = [
        {"model": name, "million_tokens": millions, "ranks": ranks, "tpot_s": seconds}
        for (name, millions, ranks), seconds in tpot.items()
    ]
    gain = {(name, millions): tpot[name, millions, 1] / tpot[name, millions, 4] for name, millions, _ in tpot}
    more = further_collectives(B8.num_layers)
    whys = {
        millions: "we merge states by one collective a layer; with three (maximum, sum, result) it is "
        f"{tpot['8B', millions, 1] / (tpot['8B', millions, 4] + more):.2f}"
        for millions in (4, 10)
    }
    saved = 100 - 100 * tpot["8B", 10, 2] / tpot["8B", 10, 1]
    less = all(tpot[*key, 1] > tpot[*key, 2] > tpot[*key, 4] for key in gain)
    longer = all(gain[name, 4] < gain[name, 10] < 4 for name in MODELS_BY_NAME)
    statements = [
        Statement("17a, Medha 11", "8B, SPP4, 4M: TPOT of 1 rank over 4", 1.7, gain["8B", 4], "x", whys[4]),
        Statement("17a, Medha 11", "8B, SPP4, 10M: TPOT of 1 rank over 4", 2.5, gain["8B", 10], "x", whys[10]),
        Statement("17a, Medha 11", "8B, SPP4, 10M: TPOT that a second rank saves", 40, saved, "%"),
        Statement("17a, Medha 11", "8B, SPP4, 10M, 2 ranks: tokens per second", 30, 1 / tpot["8B", 10, 2], "1/s"),
        ordering("17, Medha 11", "more ranks: lower TPOT, for both models at 4M and 10M", less),
        ordering("17, Medha 11", "ranks gain more at 10M than at 4M, and less than their number", longer),
    ]

    def draw(*panels: Any) -> None:
        for axes, name in zip(panels, MODELS_BY_NAME, strict=True):
            rows = [row for row in table if row["model"] == name]
            lines(axes, rows, "ranks", "tpot_s", by="million_tokens", label="{}M")
            axes.axhline(TPOT_TARGET, color="#888888", linewidth=0.8)
            axes.set(xlabel="context ranks (KVP)", ylabel="TPOT, s", ylim=(0, None), title=f"Llama-3 {name}")

    title = "KV parallelism shortens decodes"
    return Figure(title, statements, table, draw, panels=2)


def equation_10(plan: ParallelPlan, prompt: int, chunk: int) -> tuple[float, float]:
    """TTFT, and P95 of the time between tokens beside it, of a prompt in equal chunks, in seconds.

    While the first rank fills, steps lengthen with its keys. Then they stay: full ranks read as many keys in each, and
    states are merged. A token takes a step in each stage.
    """
    full = -(-prompt // plan.context)
    predictor = predict(B8, plan, chunk)
    local = [predictor.seconds(Work().with_chunk(at, chunk, False)) for at in (round(0.95 * full), full - chunk)]
    merged = predictor.seconds(Work().with_chunk(full, chunk, False, replicated=True))
    late, last = local if plan.context == 1 else (merged, merged)
    ttft = predictor.prefill_seconds(0, full, chunk) + (plan.context - 1) * (full // chunk) * merged
    return ttft + (plan.stage - 1) * last, plan.stage * late


def figure_18(inputs: Inputs) -> Figure:
    """TTFT against P95 between tokens over chunk sizes and ranks: 8B, TP4, SPP4, 1M to 4M.

    Equation 10 gives all of them: 4M in chunks of 32 are 125,000 steps. The core serves 1M in the larger chunks.
    """
    table, ttft, gap, served = list[Row](), dict[Any, float](), dict[Any, float](), list[float]()
    for millions in (1, 2, 4):
        for ranks in RANKS:
            for chunk in SIZES:
                prompt, key = tokens(inputs, millions), (millions, ranks, chunk)
                plan = spread(4, ranks, prompt, tensor=4)
                ttft[key], gap[key] = equation_10(plan, prompt, chunk)
                row: Row = {"million_tokens": millions, "ranks": ranks, "chunk": chunk, "ttft_s": ttft[key]}
                row["p95_s"] = gap[key]
                if millions == 1 and chunk >= 128:
                    row["core_ttft_s"] = serve(B8, plan, static(chunk), prompt).ttft
                    served.append(row["core_ttft_s"] / ttft[key])
                table.append(row)
    sizes = list(pairwise(SIZES))
    trades = all(
        ttft[m, r, big] < ttft[m, r, small] and gap[m, r, big] > gap[m, r, small]
        for m, r, _ in ttft
        for small, big in sizes
    )
    both = all(a[4, 1, c] > a[4, 2, c] > a[4, 4, c] for a in (ttft, gap) for c in SIZES)
    at_1m = ttft[1, 1, 32] < min(ttft[1, 2, 32], ttft[1, 4, 32])
    ratio = {millions: ttft[millions, 4, 32] / ttft[millions, 1, 32] for millions in (1, 2, 4)}
    # Three collectives a layer, in all steps but those of the first rank; a stage has a quarter of the layers.
    three = {
        (m, r): ttft[m, r, 32] + (r - 1) / r * tokens(inputs, m) / 32 * further_collectives(B8.num_layers / 4)
        for m in (1, 2, 4)
        for r in RANKS
    }
    of_three, p95 = three[2, 4] / three[2, 1], gap[4, 1, 128] * 1e3
    is_best = three[1, 1] < min(three[1, 2], three[1, 4]) and three[4, 4] < min(three[4, 1], three[4, 2])
    about = "chunks of 32, three collectives a layer: 1 rank is best at 1M, alike at 2M (20 %), 4 are best at 4M"
    why = "we merge states by one collective a layer"
    plans = f"the paper does not say the plan: it is {gap[4, 2, 128] * 1e3:.0f} with 2 ranks, and half with TP8 (4.4)"
    is_equal = all(abs(each - 1) <= 0.02 for each in served)
    statements = [
        ordering("18", "larger chunks: lower TTFT, longer time between tokens, for all lengths and ranks", trades),
        ordering(
            "18",
            "1M, chunks of 32: one rank has the lowest TTFT",
            at_1m,
            f"{why}, so ranks gain at 1M already; see three, below",
        ),
        Statement(
            "18",
            "2M, chunks of 32: TTFT of 4 ranks over 1",
            1.0,
            ratio[2],
            "x",
            f"{why}; with three it is {of_three:.2f}",
        ),
        ordering("18, Medha 13", "4M: more ranks lower TTFT and time between tokens, in chunks of any size", both),
        ordering("18", "the longer the context, the more 4 ranks gain in chunks of 32", ratio[1] > ratio[2] > ratio[4]),
        Statement("Medha 3.4", "8B, 4M, TP4 x SPP4, chunks of 128: P95 between tokens", 100, p95, "ms", plans),
        ordering(
            "equation 10", "8B: the core's TTFT is within 2 % of the equation (1M, chunks of 128 and 256)", is_equal
        ),
        ordering("18", about, is_best and abs(of_three - 1) <= 0.2),
    ]

    def draw(*panels: Any) -> None:
        for axes, millions in zip(panels, (1, 2, 4), strict=True):
            rows = [row for row in table if row["million_tokens"] == millions]
            lines(axes, rows, "ttft_s", "p95_s", by="ranks", label="KVP {}")
            axes.set(xlabel="TTFT, s", ylabel="P95 between tokens, s", title=f"{millions}M tokens", yscale="log")

    title = "TTFT against time between tokens: Llama-3 8B, TP4, SPP4, chunks of 32 to 256"
    return Figure(title, statements, table, draw, panels=3)


def figure_21(inputs: Inputs) -> Figure:
    """Model bandwidth utilisation of decodes: TP8 and 1 to 4 ranks."""
    table = list[Row]()
    for name, model in MODELS_BY_NAME.items():
        for millions in LENGTHS:
            for ranks in RANKS:
                plan, prompt = ParallelPlan.medha(1, ranks, 8), tokens(inputs, millions)
                if fits(model, plan, millions):
                    tpot = decode(model, 1, ranks, prompt)
                    row: Row = {"model": name, "million_tokens": millions, "ranks": ranks, "tpot_s": tpot}
                    row["mbu"] = mbu(model, Totals(steps=1, rows=1, keys=prompt), DEVICE, plan, tpot)
                    table.append(row)
    used = {(row["model"], row["million_tokens"], row["ranks"]): row["mbu"] for row in table}
    falls = all(each > used.get((name, millions, 2 * ranks), 0.0) for (name, millions, ranks), each in used.items())
    share = DEVICE.reached_key_bandwidth / DEVICE.memory_bandwidth
    why = f"keys are read at {share:.0%} of the data sheet, as FlashAttention 3 was measured; latencies come on top"
    statements = [
        Statement("21, Medha 20", "8B and 70B, TP8 x KVP: best MBU of decodes", 0.92, max(used.values()), "", why),
        ordering("21, 6.5", "MBU falls as ranks are added, for each model and length", falls),
    ]

    def draw(*panels: Any) -> None:
        for axes, name in zip(panels, MODELS_BY_NAME, strict=True):
            rows = [row for row in table if row["model"] == name]
            lines(axes, rows, "million_tokens", "mbu", by="ranks", label="KVP {}")
            axes.set(xlabel="tokens of context, M", ylabel="MBU", ylim=(0, 1), title=f"Llama-3 {name}")

    title = "Model bandwidth utilisation of decodes"
    return Figure(title, statements, table, draw, panels=2)
