"""Medha's 2D against 3D parallelism under load, Llama-3 70B on 64 H100: figures 17 and 18."""

import functools
from typing import Any, Literal

from longctx.serving import ParallelPlan, Slo
from papers.figures.figure import Figure, Inputs, Statement, corrected, ordering
from papers.medha.runs import QUICK, Outcome, draw_cdf, requests, run

PLANS = {"2D": ParallelPlan.medha(8, 1, 8), "3D": ParallelPlan.medha(4, 2, 8)}  # SPP8; SPP4 x KVP2; both TP8
RATES = (0.25, 0.75, 1.25, 1.75)
WINDOW = 600.0  # seconds: eight stages have eight times as many steps as one
TARGET = 0.03  # seconds, of `EngineConfig.medha`
# "5 % long-context (2M token) requests, scaled from the Medha-SWE trace" (5.3): up to 2M. If all of these prompts had
# 2M tokens, 64 H100 could not read them at 0.25 requests a second.
SCALE = 2.0


@functools.cache
def load(inputs: Inputs, name: str, rate: float, scope: Literal["token", "batch"] = "token") -> Outcome:
    """A plan under load."""
    plan, window = PLANS[name], QUICK if inputs.quick else WINDOW
    slo = Slo(tpot=TARGET, tpot_factor=1.0, step_seconds=TARGET, tpot_scope=scope)
    workload = requests(inputs, "long", rate, window, SCALE)
    return run("medha", "llama-3-70b", "mnemosyne-h100", plan.num_devices, workload, window, plan, slo=slo)


def rows_of(inputs: Inputs) -> list[dict[str, Any]]:
    """A row of figures for each plan and rate."""
    return [
        {
            "requests/s": rate,
            "plan": name,
            "requests": len(cell.arrival),
            "TTFT p50, s": cell.quantile(0.5),
            "TTFT p90, s": cell.quantile(0.9),
            "TPOT p50, ms": 1e3 * cell.tpot_quantile(0.5),
            "TPOT p90, ms": 1e3 * cell.tpot_quantile(0.9),
            "long ended": cell.long_ended,
        }
        for rate in RATES
        for name in PLANS
        for cell in [load(inputs, name, rate)]
    ]


def figure_17(inputs: Inputs) -> Figure:
    """TTFT of both plans."""
    found = {(name, rate): load(inputs, name, rate) for rate in RATES for name in PLANS}
    apart = [found["3D", rate].quantile(0.5) / found["2D", rate].quantile(0.5) for rate in RATES]
    long = {name: sum(found[name, rate].long_ended for rate in RATES) for name in PLANS}
    statements = [
        ordering("17", "70B, 64 H100, 5 % long of up to 2M: at each rate the median TTFTs of SPP8 and SPP4 x KVP2 are "
                 "less than 2 times apart", all(0.5 < ratio < 2 for ratio in apart),
                 f"SPP8's are {', '.join(f'{1 / ratio:.2f}' for ratio in apart)} times those of SPP4 x KVP2 at "
                 f"{', '.join(map(str, RATES))}/s; where the difference comes from was not measured"),
        ordering("17", "SPP8 reads no fewer long prompts than SPP4 x KVP2, all rates together",
                 long["2D"] >= long["3D"]),
    ]  # fmt: skip

    def draw(*axes: Any) -> None:
        for panel, rate in zip(axes, RATES, strict=True):
            for name in PLANS:
                draw_cdf(panel, found[name, rate].waited, name)
            panel.set(xscale="log", xlabel="TTFT, s", ylabel="share of requests", title=f"{rate} requests/s")
        axes[0].legend()

    title = f"2D (SPP8) and 3D (SPP4 x KVP2): TTFT of Llama-3 70B on 64 H100, windows of {WINDOW:.0f} s"
    return Figure(title, corrected(statements), rows_of(inputs), draw, panels=4, width=3.8)


def figure_18(inputs: Inputs) -> Figure:
    """TPOT of both plans."""
    high = RATES[-1]
    found = {name: load(inputs, name, high) for name in PLANS}
    batch = {name: load(inputs, name, high, "batch") for name in PLANS}

    def ratio(runs: dict[str, Any], percent: int) -> float:
        return float(runs["2D"].tpot_quantile(percent / 100) / runs["3D"].tpot_quantile(percent / 100))

    why = (
        "the core's target is a token's through all stages, which both plans keep but for the smallest chunks that are "
        "efficient; were it one of a batch in a stage (4.2, batch packing), the ratio would be "
    )
    about = f"70B, 64 H100, 5 % long of up to 2M, {high}/s: TPOT of SPP8 over SPP4 x KVP2's"
    statements = [
        Statement("18", f"{about}, P{percent}", 2.0, ratio(found, percent), "x", why + f"{ratio(batch, percent):.2f}")
        for percent in (50, 90)
    ]
    statements.append(
        ordering("18", f"{high}/s: SPP4 x KVP2 has the lower TPOT at P50 and P90", all(
            found["3D"].tpot_quantile(q) < found["2D"].tpot_quantile(q) for q in (0.5, 0.9)))
    )  # fmt: skip

    def draw(*axes: Any) -> None:
        for panel, (cells, name) in zip(axes, ((found, "a token"), (batch, "a batch in a stage")), strict=True):
            for plan, cell in cells.items():
                draw_cdf(panel, 1e3 * cell.tpot[cell.tpot > 0], plan)
            panel.set(xlabel="TPOT, ms", ylabel="share of requests", title=f"target of {name}: 30 ms")
        axes[0].legend()

    title = f"2D (SPP8) and 3D (SPP4 x KVP2): TPOT of Llama-3 70B on 64 H100, windows of {WINDOW:.0f} s"
    return Figure(title, corrected(statements), rows_of(inputs), draw, panels=2)
