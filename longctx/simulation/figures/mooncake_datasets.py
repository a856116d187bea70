"""Mooncake against coupled instances on table 1's data sets: throughput under SLOs; figures 9 and 10.

The limits are the paper's (7.1): ten times the P90 of TTFT, and five times that of TBT, at the lowest rate; of the
three systems' values the lowest, so that all have the same limits. TBT is a request's mean.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from longctx.simulation.capacity import search
from longctx.simulation.figures.figure import Figure, Inputs, Statement, ordering
from longctx.simulation.figures.mooncake_cluster import Outcome, serve
from longctx.simulation.figures.mooncake_runs import CHUNK, predict
from longctx.simulation.figures.mooncake_workloads import DATASETS, poisson

SYSTEMS = {"3P+1D": "Mooncake-[3P+1D]", "2P+2D": "Mooncake-[2P+2D]", "4M": "vLLM-[4M]"}
HOSTS = 4
REQUESTS = 1_000
LOWEST = 0.02  # the lowest rate, as a share of that at which four hosts would do nothing but compute whole prompts
TTFT_TIMES, TBT_TIMES = 10, 5


class Cell(NamedTuple):
    """P90 of a system at a rate, in seconds, and its hit rate."""

    rate: float
    ttft: float
    tbt: float
    hit_rate: float


class Found(NamedTuple):
    """A data set on the three systems.

    Attributes:
      ttft, tbt: limits of P90, in seconds.
      capacity: by system, the highest rate that keeps both.
      cells: by system, at all rates that were tried, ascending.
    """

    ttft: float
    tbt: float
    capacity: dict[str, float]
    cells: dict[str, list[Cell]]

    def at(self, system: str, rate: float) -> Cell:
        """The cell at a rate, or the next one below it."""
        return max((cell for cell in self.cells[system] if cell.rate <= rate * 1.0001), default=self.cells[system][0])


def full_rate(name: str) -> float:
    """Requests a second of mean length that four hosts can compute if nothing is cached and nobody decodes."""
    return HOSTS / predict().prefill_seconds(0, DATASETS[name].prompt, CHUNK)


@functools.cache
def compare(inputs: Inputs, name: str) -> Found:
    """Search each system's highest rate on a data set."""
    single = DATASETS[name].half  # vLLM serves simulated data's requests one by one (7.1.2)
    cells: dict[str, dict[float, Cell]] = {system: {} for system in SYSTEMS}

    def cell(system: str, rate: float, count: int) -> Cell:
        outcome = serve(system, poisson(inputs, name, rate, count), single=single)
        cells[system][rate] = found = _cell(rate, outcome)
        return found

    low = LOWEST * full_rate(name)
    lowest = [cell(system, low, REQUESTS // 5) for system in SYSTEMS]
    ttft, tbt = TTFT_TIMES * min(x.ttft for x in lowest), TBT_TIMES * min(x.tbt for x in lowest)

    def capacity(system: str) -> float:
        def is_met(rate: float) -> bool:
            found = cell(system, rate, REQUESTS)
            return found.ttft <= ttft and found.tbt <= tbt

        return search(is_met, 0.5 * full_rate(name)).rate

    capacities = {system: capacity(system) for system in SYSTEMS}
    return Found(ttft, tbt, capacities, {s: [x[rate] for rate in sorted(x)] for s, x in cells.items()})


def _cell(rate: float, outcome: Outcome) -> Cell:
    p90 = (float(np.quantile(values, 0.9)) for values in (outcome.ttft, outcome.tpot))
    return Cell(rate, *p90, outcome.hit_rate)


def _rows(found: dict[str, Found]) -> list[dict[str, Any]]:
    return [
        {"data set": name, "system": SYSTEMS[system], "requests/s": cell.rate, "TTFT p90, s": cell.ttft,
         "TBT p90, s": cell.tbt, "TTFT p90 of its limit": cell.ttft / each.ttft, "TBT p90 of its limit":
         cell.tbt / each.tbt, "keeps both": cell.ttft <= each.ttft and cell.tbt <= each.tbt, "hit rate": cell.hit_rate}
        for name, each in found.items() for system, cells in each.cells.items() for cell in cells
    ]  # fmt: skip


def _draw(found: dict[str, Found]) -> Any:
    def draw(*axes: Any) -> None:
        for panel, (name, each) in zip(axes, found.items(), strict=True):
            for system, cells in each.cells.items():
                rates = [cell.rate for cell in cells]
                (line,) = panel.plot(rates, [cell.ttft / each.ttft for cell in cells], "o-", label=SYSTEMS[system])
                panel.plot(rates, [cell.tbt / each.tbt for cell in cells], "s--", color=line.get_color())
            panel.axhline(1.0, linestyle=":", color="black")
            panel.set(xlabel="requests/s", ylabel="P90 over its limit: TTFT, TBT dashed", title=name, ylim=(0, 2))
        axes[0].legend()

    return draw


def _compared(found: Found) -> dict[str, Cell]:
    """The systems at about the rate that the best of Mooncake's keeps."""
    rate = max(found.capacity["3P+1D"], found.capacity["2P+2D"])
    return {system: found.at(system, rate) for system in SYSTEMS}


def figure_9(inputs: Inputs) -> Figure:
    """ArXiv Summarization and L-Eval."""
    found = {name: compare(inputs, name) for name in ("arxiv", "l-eval")}
    statements = []
    for (name, each), paper in zip(found.items(), (1.2, 1.4), strict=True):
        gain = each.capacity["3P+1D"] / each.capacity["4M"]
        at = _compared(each)
        statements += [
            Statement("9", f"{name}: requests/s under both SLOs, [3P+1D] over 4 coupled", paper, gain, "x"),
            ordering("9", f"{name}: [2P+2D] has a lower TBT than [3P+1D] and a worse TTFT, and a lower throughput",
                     at["2P+2D"].tbt < at["3P+1D"].tbt and at["2P+2D"].ttft > at["3P+1D"].ttft
                     and each.capacity["2P+2D"] < each.capacity["3P+1D"]),
        ]  # fmt: skip
    title = "Throughput under SLOs, public data sets: LLaMA2-70B on 4 hosts"
    return Figure("mooncake_figure_9", title, "mooncake", statements, _rows(found), _draw(found), panels=2)


def figure_10(inputs: Inputs) -> Figure:
    """Simulated data: prompts of 16K to 128K tokens, half of them cached."""
    found = {name: compare(inputs, name) for name in DATASETS if name.startswith("simulated")}
    gains = {
        name: max(each.capacity["3P+1D"], each.capacity["2P+2D"]) / each.capacity["4M"] for name, each in found.items()
    }
    most, least = max(gains, key=lambda name: gains[name]), min(gains, key=lambda name: gains[name])
    ours = [cell for each in found.values() for s in ("3P+1D", "2P+2D") for cell in each.cells[s]]
    limits = [each.tbt for each in found.values() for s in ("3P+1D", "2P+2D") for _ in each.cells[s]]
    statements = [
        Statement("10", f"simulated data: requests/s under both SLOs, Mooncake over 4 coupled, the most ({most})", 6.25,
                  gains[most], "x"),
        Statement("10", f"simulated data: the same, the least ({least})", 1.5, gains[least], "x"),
        ordering("10", "Mooncake never breaks the SLO of TBT, at any rate that was tried",
                 all(cell.tbt <= limit for cell, limit in zip(ours, limits, strict=True))),
        ordering("10", "Mooncake has a higher throughput than coupled instances at all lengths",
                 min(gains.values()) > 1),
    ]  # fmt: skip
    title = "Throughput under SLOs, simulated data: LLaMA2-70B on 4 hosts"
    return Figure("mooncake_figure_10", title, "mooncake", statements, _rows(found), _draw(found), panels=4, width=3.8)
