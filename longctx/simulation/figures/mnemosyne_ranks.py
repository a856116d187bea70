"""KV parallelism: Mnemosyne's sections 4.4 and 6.3, figures 10, 17, 18 and 19 (Medha's section 3.4, figures 11, 13)."""

import functools
from itertools import pairwise
from typing import Any

from longctx.models.config import LlamaConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.runtime import readable_tokens
from longctx.simulation.figures.figure import Figure, Inputs, Statement, ordering
from longctx.simulation.figures.mnemosyne_runs import (
    B8,
    CHUNK,
    MODELS_BY_NAME,
    TPOT_TARGET,
    Run,
    predict,
    ranks_of,
    serve,
    static,
    tokens,
)

RANKS = (1, 2, 4)
STAGES = {"8B": 4, "70B": 8}  # figure 17


def spread(stages: int, ranks: int, prompt: int, tensor: int = 8) -> ParallelPlan:
    """A plan whose ranks get equal parts of a prompt, one after the other."""
    return ParallelPlan.medha(stages, ranks, tensor, rank_tokens=-(-prompt // ranks))


@functools.cache
def decode(model: LlamaConfig, stages: int, ranks: int, prompt: int) -> float:
    """TPOT after a prompt, seconds. How its chunks were computed does not matter."""
    tpot = serve(model, spread(stages, ranks, prompt), static(16 * CHUNK), prompt, 16).tpot
    assert tpot is not None
    return tpot


def section_4_4(inputs: Inputs) -> Figure:
    """A chunk of 128 tokens beside decodes as a context grows to 4M: on one rank, and on ranks that are added."""
    prompt, chunk = tokens(inputs, 4), 128 if not inputs.quick else 1024
    alone = serve(B8, ParallelPlan.medha(tensor=8), static(chunk + 1), prompt, short=1)
    grown = serve(B8, spread(1, 4, prompt), static(chunk), prompt)
    table = [row for name, run in (("1 rank", alone), ("4 ranks", grown)) for row in _steps(name, run)]
    first, *others = ([s.seconds for s in grown.steps if ranks_of(s) == ranks] for ranks in (1, 2, 3, 4))
    later = [seconds for part in others for seconds in part]
    statements = [
        Statement("4.4, Medha 3.4", "8B, 4M, 8 H100: P95 between tokens beside chunks of 128", 100,
                  alone.gap(0.95) * 1e3, "ms"),
        ordering("10", "8B, 4M: steps of one rank grow with the context; with a rank added at each 1M they stay within "
                 "20 % of the first rank's longest", max(later) <= 1.2 * max(first) < 0.5 * alone.gap(1)),
    ]  # fmt: skip

    def draw(axes: Any) -> None:
        for setting in ("1 rank", "4 ranks"):
            rows = [row for row in table if row["setting"] == setting]
            axes.plot([r["tokens before"] / 1e6 for r in rows], [r["step, s"] * 1e3 for r in rows], label=setting)
        axes.set(xlabel="tokens before the chunk, M", ylabel="step, ms", ylim=(0, None))
        axes.legend()

    title = "Ranks that are added bound the time of a step: Llama-3 8B, 4M tokens in chunks of 128"
    return Figure("mnemosyne_section_4_4", title, "mnemosyne", statements, table, draw)


def section_6_3(inputs: Inputs) -> Figure:
    """When a request grows onto another rank: memory is full, or decodes would not keep 30 ms between tokens."""
    prompt, table, statements = tokens(inputs, 10), list[dict[str, Any]](), list[Statement]()
    limits = {}
    for name, model in MODELS_BY_NAME.items():
        stages, paper = STAGES[name], {"8B": 4.0, "70B": 2.0}[name]
        plan, alone = ParallelPlan.medha(stages, 4, 8), ParallelPlan.medha(stages, 1, 8)
        limit = readable_tokens(predict(model, alone), TPOT_TARGET, stages, 2**24)
        limits[name] = limit
        room = prompt // 3
        for reason, config, memory in (
            ("memory", static(CHUNK), room),
            ("latency", static(CHUNK, TPOT_TARGET), None),
        ):
            run = serve(model, plan, config, prompt, 16, memory=memory)
            at = 0
            for step, count, after in zip(run.steps, run.chunks, [*run.steps[1:], None], strict=True):
                at += count
                if after is None or ranks_of(after) > ranks_of(step):
                    table.append({"model": name, "limit": reason, "tokens": at, "ranks until there": ranks_of(step),
                                  "TPOT at the end, s": run.tpot})  # fmt: skip
        about = f"{name}, SPP{stages}: longest context with which one rank keeps a TPOT of 30 ms"
        keys, weights = (2e6 * 163840 * 2 / 8 / 3.35e12, 0) if name == "70B" else (0, 0)
        statements.append(Statement("6.3", about, paper, limit / 1e6, "M tokens"))
    return Figure("mnemosyne_section_6_3", "x", "mnemosyne", statements, table)


def _steps(setting: str, run: Run) -> list[dict[str, Any]]:
    """About 64 steps of a run, evenly spaced."""
    rows, at = [], 0
    for number, (step, count) in enumerate(zip(run.steps, run.chunks, strict=True)):
        if number % (len(run.steps) // 64 + 1) == 0:
            rows.append({"setting": setting, "tokens before": at, "ranks": ranks_of(step), "step, s": step.seconds})
        at += count
    return rows
