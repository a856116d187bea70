"""Mooncake against coupled instances on table 1's data sets: throughput under SLOs; figures 9 and 10.

The limits are the paper's (7.1): ten times the P90 of TTFT, and five times that of TBT, at the lowest rate; of the
paper's three systems the lowest of these, so that all have the same limits. TBT is a request's mean. Mooncake runs by
the protocol of our servers, and [3P+1D] by the paper's protocol too, within the same limits.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from longctx.simulation.capacity import search
from longctx.simulation.cluster import ClusterSettings
from longctx.simulation.workloads import TRACE_BLOCK
from papers.figures.figure import Figure, Inputs, Statement, corrected, ordering
from papers.mooncake.cluster import CHUNK, PAPER, SERVERS, predict, serve
from papers.mooncake.workloads import DATASETS, poisson

OURS, MORE_DECODE, THEIRS = "Mooncake-[3P+1D]", "Mooncake-[2P+2D]", "vLLM-[4M]"
BY_CACHE, BATCHED = "vLLM-[4M], placed by cache", "vLLM-[4M], batched"
BY_PAPER = "Mooncake-[3P+1D], the paper's protocol"
HOSTS = 4
REQUESTS = {"arxiv": 1_000, "l-eval": 1_000}
FEWER = 500  # requests of simulated data
LOWEST = 0.02  # the lowest rate, as a share of that at which four hosts would do nothing but compute whole prompts
TTFT_TIMES, TBT_TIMES = 10, 5


class System(NamedTuple):
    """A cluster, its placement policy, whether coupled instances serve one request at a time, and the protocol."""

    shape: str
    policy: str | None = None
    single: bool = False
    settings: ClusterSettings = SERVERS


class Cell(NamedTuple):
    """P90 of a system at a rate, in seconds, and its hit rate."""

    rate: float
    ttft: float
    tbt: float
    hit_rate: float


class Found(NamedTuple):
    """A data set on several systems.

    Attributes:
      ttft, tbt: limits of P90, in seconds.
      capacity: by system, the highest rate that keeps both.
      cells: by system, at all rates that were tried, ascending; a P90 of TTFT above twice its limit is infinite.
      common: by system, at the highest rate of Mooncake-[2P+2D].
    """

    ttft: float
    tbt: float
    capacity: dict[str, float]
    cells: dict[str, list[Cell]]
    common: dict[str, Cell]

    def gain(self, over: str = THEIRS) -> float:
        """Mooncake's highest rate over that of another system."""
        return max(self.capacity[OURS], self.capacity[MORE_DECODE]) / self.capacity[over]


def systems(name: str) -> dict[str, System]:
    """The paper's three systems on a data set, [3P+1D] by the paper's protocol, and coupled instances in another way.

    vLLM serves requests of simulated data one by one (7.1.2); and batched, as the other data sets' are. Where much is
    cached, its instances are chosen by their queues alone; and by their caches too.
    """
    single = bool(DATASETS[name].prefixes)
    found = {OURS: System("3P+1D"), MORE_DECODE: System("2P+2D"), THEIRS: System("4M", single=single)}
    found[BY_PAPER] = System("3P+1D", settings=PAPER)
    if single:
        found[BATCHED] = System("4M")
    elif DATASETS[name].questions > 1:
        found[BY_CACHE] = System("4M", "cache_aware")
    return found


def full_rate(name: str) -> float:
    """Return the requests a second, of mean length, that four hosts can compute without a cache and without decodes."""
    return HOSTS / predict().prefill_seconds(0, DATASETS[name].prompt, CHUNK)


@functools.cache
def compare(inputs: Inputs, name: str) -> Found:
    """Search each system's highest rate on a data set."""
    tried, count, low = systems(name), REQUESTS.get(name, FEWER), LOWEST * full_rate(name)
    cells: dict[str, dict[float, Cell]] = {system: {} for system in tried}

    def cell(system: str, rate: float, give_up: float | None = None) -> Cell:
        if rate not in cells[system]:
            shape, policy, single, settings = tried[system]
            requests = poisson(inputs, name, rate, count)
            outcome = serve(shape, requests, policy=policy, single=single, settings=settings, give_up=give_up)
            ttft = float(np.quantile(outcome.waits(), 0.9, method="higher"))  # it may be infinite
            p90 = ttft, float(np.quantile(outcome.tpot, 0.9))
            cells[system][rate] = Cell(rate, *p90, outcome.hit_rate)
        return cells[system][rate]

    lowest = [cell(system, low) for system in (OURS, MORE_DECODE, THEIRS)]
    ttft, tbt = TTFT_TIMES * min(x.ttft for x in lowest), TBT_TIMES * min(x.tbt for x in lowest)

    def capacity(system: str) -> float:
        if inputs.quick:
            return cell(system, 0.5 * full_rate(name)).rate

        def is_met(rate: float) -> bool:
            found = cell(system, rate, 2 * ttft)
            return found.ttft <= ttft and found.tbt <= tbt

        return search(is_met, 0.5 * full_rate(name)).rate

    capacities = {system: capacity(system) for system in tried}
    common = {system: cell(system, capacities[MORE_DECODE]) for system in tried}
    return Found(ttft, tbt, capacities, {s: [x[rate] for rate in sorted(x)] for s, x in cells.items()}, common)


def _rows(found: dict[str, Found]) -> list[dict[str, Any]]:
    return [
        {"data set": name, "system": system, "requests/s": cell.rate, "TTFT p90, s": cell.ttft, "TBT p90, s": cell.tbt,
         "TTFT p90 of its limit": cell.ttft / each.ttft, "TBT p90 of its limit": cell.tbt / each.tbt,
         "keeps both": cell.ttft <= each.ttft and cell.tbt <= each.tbt, "hit rate": cell.hit_rate}
        for name, each in found.items() for system, cells in each.cells.items() for cell in cells if cell.ttft < np.inf
    ]  # fmt: skip


def _draw(found: dict[str, Found]) -> Any:
    def draw(*axes: Any) -> None:
        for panel, (name, each) in zip(axes, found.items(), strict=False):
            for system, cells in each.cells.items():
                if system == BY_PAPER:
                    continue
                cells = [cell for cell in cells if cell.ttft < np.inf]
                rates = [cell.rate for cell in cells]
                (line,) = panel.plot(rates, [cell.ttft / each.ttft for cell in cells], "o-", label=system)
                panel.plot(rates, [cell.tbt / each.tbt for cell in cells], "s--", color=line.get_color())
            panel.axhline(1.0, linestyle=":", color="black")
            most = 1.2 * max(each.capacity.values())
            panel.set(xlabel="requests/s", ylabel="P90 over its limit (TBT dashed)", title=name, ylim=(0, 2))
            panel.set_xlim(0, most)
            panel.legend(fontsize="small")

    return draw


def figure_9(inputs: Inputs) -> Figure:
    """ArXiv Summarization and L-Eval."""
    found = {name: compare(inputs, name) for name in ("arxiv", "l-eval")}
    arxiv, questions = found.values()
    hits = {system: cell.hit_rate for system, cell in questions.common.items()}
    by_cache = questions.gain(BY_CACHE)
    whys = {
        "arxiv": f"its P90 of TBT is what binds vLLM, at {arxiv.capacity[THEIRS]:.2f} requests/s",
        "l-eval": f"placed by load, vLLM finds {hits[THEIRS]:.0%} of the tokens in the cache of the instance that it "
        f"goes to, Mooncake {hits[OURS]:.0%}; placed by cache too it finds {hits[BY_CACHE]:.0%}: {by_cache:.2f} times",
    }
    statements = []
    for (name, each), paper in zip(found.items(), (1.2, 1.4), strict=True):
        at = each.common
        statements += [
            Statement("9", f"{name}: requests/s under both SLOs, [3P+1D] over 4 coupled instances", paper,
                      each.capacity[OURS] / each.capacity[THEIRS], "x", whys[name]),
            Statement("9", f"{name}, by the paper's protocol: requests/s under both SLOs, [3P+1D] over 4 coupled "
                      "instances", paper, each.capacity[BY_PAPER] / each.capacity[THEIRS], "x", whys[name]),
            ordering("9", f"{name}: [2P+2D] has a lower TBT than both others, a higher TTFT than both, and a lower "
                     "throughput than [3P+1D]",
                     at[MORE_DECODE].tbt < min(at[OURS].tbt, at[THEIRS].tbt)
                     and at[MORE_DECODE].ttft > max(at[OURS].ttft, at[THEIRS].ttft)
                     and each.capacity[MORE_DECODE] < each.capacity[OURS]),
        ]  # fmt: skip
    statements.append(
        Statement("9", "l-eval: the same, over 4 coupled instances that are chosen by their caches too", 1.4, by_cache,
                  "x", f"hit rates {hits[OURS]:.0%} and {hits[BY_CACHE]:.0%}")
    )  # fmt: skip
    title = "Throughput under SLOs, public data sets: LLaMA2-70B on 4 hosts"
    return Figure(title, corrected(statements), _rows(found), _draw(found), panels=2)


def figure_10(inputs: Inputs) -> Figure:
    """Simulated data: prompts of 16K to 128K tokens, half of them cached."""
    names = [name for name in DATASETS if DATASETS[name].prefixes]
    found = {name: compare(inputs, name) for name in (names[:1] if inputs.quick else names)}
    gains = {name: each.gain() for name, each in found.items()}
    batched = {name: each.gain(BATCHED) for name, each in found.items()}
    most, least = max(gains, key=lambda name: gains[name]), min(gains, key=lambda name: gains[name])
    never = all(cell.tbt <= x.tbt for x in found.values() for s in (OURS, MORE_DECODE) for cell in x.cells[s])
    by_one = (
        "served one by one, a request keeps a host for its decoding too, of about 11 s, beside a prefill of "
        f"{_prefill(most):.1f} s ({most}) or {_prefill(least):.1f} s ({least})"
    )
    why = f"{by_one}; batched, the gains are " + ", ".join(f"{gain:.2f}" for gain in batched.values())
    tokens = DATASETS[most].prompt
    last = predict().prefill_seconds(tokens - TRACE_BLOCK, tokens, CHUNK)
    rest = f"; the decode instance computes the last page of each prompt, {TRACE_BLOCK} tokens, in {last:.2f} s"
    disrupted = "P90 of TBT of the batched ones there: " + ", ".join(
        f"{1e3 * each.common[BATCHED].tbt:.0f} ms" for each in found.values()
    )
    broken = "P90 of TBT is at most " + ", ".join(
        f"{max(c.tbt for s in (OURS, MORE_DECODE) for c in x.cells[s]) / x.tbt:.2f}" for x in found.values()
    )
    statements = [
        Statement("10", f"simulated data: requests/s under both SLOs, Mooncake over 4 coupled, the most ({most})", 6.25,
                  gains[most], "x", why + rest),
        Statement("10", f"simulated data: the same, the least ({least})", 1.5, gains[least], "x", why),
        *(Statement("10", f"simulated data, by the paper's protocol: requests/s under both SLOs, [3P+1D] over 4 "
                    f"coupled, {name}", paper, found[name].capacity[BY_PAPER] / found[name].capacity[THEIRS], "x",
                    by_one)
          for name, paper in ((most, 6.25), (least, 1.5))),
        ordering("10", "Mooncake never breaks the SLO of TBT, at any rate that was tried", never,
                 f"{broken} of the limit"),
        ordering("10", "Mooncake has a higher throughput than coupled instances, one by one or batched, at all lengths",
                 min(*gains.values(), *batched.values()) > 1, why),
        ordering("10", "prompts disrupt the decodes of coupled instances that batch: at the highest rate of [2P+2D] "
                 "their TBT is higher than Mooncake's, at all lengths",
                 all(x.common[BATCHED].tbt > max(x.common[OURS].tbt, x.common[MORE_DECODE].tbt)
                     for x in found.values()), disrupted),
    ]  # fmt: skip
    title = "Throughput under SLOs, simulated data: LLaMA2-70B on 4 hosts"
    rows = _rows(found)
    return Figure(title, corrected(statements), rows, _draw(found), 4, width=3.8)


def _prefill(name: str) -> float:
    """Seconds of a prompt of simulated data of which the first half is cached."""
    tokens = DATASETS[name].prompt
    return predict().prefill_seconds(tokens // 2, tokens, CHUNK)
