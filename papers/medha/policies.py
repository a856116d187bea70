"""Medha's scheduler against other policies: Llama-3 8B on 16 A100 with 5 % long requests; figure 22."""

from typing import Any

import numpy as np

from papers.figures.figure import Figure, Inputs, Statement, ordering
from papers.medha.runs import WINDOW, Outcome, alone, draw_cdf, serve

POLICIES = {"medha-fcfs": "FCFS", "edf": "EDF", "lrs": "LRS", "medha": "Medha"}
RATES = (0.25, 1.75)


def normalised(cell: Outcome) -> np.ndarray:
    """TTFT over that of the prompt alone; of requests without a first token, what they had waited for it."""
    return cell.waited / alone(cell.prompt)


def figure_22(inputs: Inputs) -> Figure:
    """Policies at low and at high load."""
    found = {(name, rate): normalised(serve(inputs, system, "long", rate, WINDOW))
             for rate in RATES for system, name in POLICIES.items()}  # fmt: skip
    low, high = RATES
    median = {key: float(np.median(values)) for key, values in found.items()}
    p90 = {key: float(np.quantile(values, 0.9)) for key, values in found.items()}
    theirs = serve(inputs, "lrs", "long", high, WINDOW)
    short = ~theirs.is_long
    waits = float(np.median(theirs.waited[short]) - np.median((theirs.admitted - theirs.arrival)[short]))
    lows = [median[name, low] for name in POLICIES.values()]
    statements = [
        Statement("22", f"8B, 16 A100, 5 % long, {high}/s: LRS's median TTFT, normalised, over Medha's", 1.7,
                  median["LRS", high] / median["Medha", high], "x", "under LRS a short prompt waits "
                  f"{waits:.2g} s, when it has memory, until its relative slack is that of late long prompts; "
                  "under Medha's policy it gets a share of their steps at once"),
        ordering("22", f"{high}/s: FCFS has a higher median than EDF, EDF than LRS, LRS than Medha",
                 median["FCFS", high] > median["EDF", high] > median["LRS", high] > median["Medha", high]),
        ordering("22", f"{high}/s: EDF comes close to FCFS: nearer to it than to LRS", median["FCFS", high]
                 / median["EDF", high] < median["EDF", high] / median["LRS", high]),
        ordering("22", f"{low}/s: like medians (within 3 times)", max(lows) <= 3 * min(lows)),
        ordering("22", f"{low}/s: tails differ: FCFS's P90 is more than 10 times Medha's",
                 p90["FCFS", low] > 10 * p90["Medha", low]),
    ]  # fmt: skip
    table: list[dict[str, Any]] = [
        {"requests/s": rate, "policy": name, **{
            f"normalised TTFT p{round(100 * share)}": float(np.quantile(values, share)) for share in (0.5, 0.9, 0.99)
        }}
        for (name, rate), values in found.items()
    ]  # fmt: skip

    def draw(*axes: Any) -> None:
        for panel, rate in zip(axes, RATES, strict=True):
            for name in POLICIES.values():
                draw_cdf(panel, found[name, rate], name)
            panel.set(
                xscale="log", xlabel="TTFT over that alone", ylabel="share of requests", title=f"{rate} requests/s"
            )
        axes[0].legend()

    title = "Scheduling policies: Llama-3 8B on 16 A100, 5 % long"
    return Figure("medha_figure_22", title, "medha", statements, table, draw, panels=2)
