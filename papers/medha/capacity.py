"""Medha's capacity, Llama-3 8B on 16 A100, without and with 5 % long requests: figures 1, 4, 15, 16, 21 to 23."""

from typing import Any

import numpy as np

from longctx.models import LlamaConfig
from longctx.parallel import Topology
from longctx.serving.predictor import Work
from longctx.simulation.models import MODELS
from longctx.simulation.utilization import model_flops
from papers.figures.figure import Figure, Inputs, Statement, corrected, ordering
from papers.medha.runs import RATES, WINDOW, Outcome, alone, draw_cdf, full_rate, requests, serve

SYSTEMS = ("medha", "medha-fcfs", "sarathi-512", "sarathi-2048", "loongserve")
SHORT_WINDOW = WINDOW / 4  # of short requests alone, which are in a steady state after a minute
PAPER_MFU = 0.6  # of the peak, the most that the paper reaches with 70B on H100 (5.5); it says none of 8B on A100
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)  # quantiles of figure 1
ACCEPTABLE = 10.0  # seconds of a median TTFT that is still interactive; the paper does not say what it accepts
POLICIES = {"medha-fcfs": "FCFS", "edf": "EDF", "lrs": "LRS", "medha": "Medha"}
POLICY_RATES = (0.25, 1.75)


def cells(inputs: Inputs, mix: str) -> dict[tuple[str, float], Outcome]:
    """Systems at the paper's rates; beyond saturation some that are dear are left out."""
    if mix == "short":
        return {(name, rate): serve(inputs, name, mix, rate, SHORT_WINDOW) for rate in RATES for name in SYSTEMS}
    left_out = {("medha-fcfs", 1.25), ("sarathi-512", 1.25), ("sarathi-512", 1.75)}
    wanted = [(name, rate) for rate in RATES for name in SYSTEMS if (name, rate) not in left_out]
    return {(name, rate): serve(inputs, name, mix, rate, WINDOW) for name, rate in wanted}


def saturated(inputs: Inputs, rate: float) -> str:
    """Say why queues at a rate differ by more than constants."""
    most = full_rate(inputs)
    grows = "only grow" if rate >= most else "hardly ever empty"
    return (
        f"16 A100 can read {most:.2f} of these requests a second at most, in chunks of 4,096 tokens: at {rate}/s, "
        f"{rate / most:.0%} of that, queues in order of arrival {grows}"
    )


def rows_of(found: dict[tuple[str, float], Outcome], mix: str) -> list[dict[str, Any]]:
    """A row of figures for each cell."""
    return [
        {
            "mix": mix,
            "requests/s": rate,
            "system": system,
            "requests": len(cell.arrival),
            "with a first token": int(np.isfinite(cell.first).sum()),
            "TTFT p50, s": cell.quantile(0.5),
            "TTFT p90, s": cell.quantile(0.9),
            "TPOT p50, ms": 1e3 * cell.tpot_quantile(0.5),
            "TPOT p90, ms": 1e3 * cell.tpot_quantile(0.9),
            "TPOT most, ms": 1e3 * cell.tpot_quantile(1.0),
            "long ended": cell.long_ended,
        }
        for (system, rate), cell in found.items()
    ]


def figure_1(inputs: Inputs) -> Figure:
    """TTFT of LoongServe and Medha with 5 % long requests: its distribution, and over time."""
    rate = 0.75
    medha, theirs = (serve(inputs, system, "long", rate, WINDOW) for system in ("medha", "loongserve"))
    table = [
        {"quantile": share, "medha TTFT, s": medha.quantile(share), "loongserve TTFT, s": theirs.quantile(share)}
        for share in SHARES
    ]
    ratio = {share: theirs.quantile(share) / medha.quantile(share) for share in SHARES}
    alone = np.median(serve(inputs, "loongserve", "short", rate, SHORT_WINDOW).waited)
    blocked = float(np.median(theirs.waited[~theirs.is_long]))
    statements = [
        ordering("1a", f"8B, 16 A100, 5 % long, {rate}/s: LoongServe's TTFT is at least 30 x Medha's at P50 and P90",
                 min(ratio[0.5], ratio[0.9]) >= 30),
        Statement("1a", f"8B, 16 A100, 5 % long, {rate}/s: LoongServe's TTFT over Medha's, the most of all quantiles",
                  174, max(ratio.values()), "x", saturated(inputs, rate)),
        ordering("1b", "in LoongServe short requests wait behind long ones: 100 times longer than without these",
                 blocked >= 100 * alone),
    ]  # fmt: skip

    def draw(left: Any, right: Any) -> None:
        for cell, label in ((medha, "Medha"), (theirs, "LoongServe")):
            draw_cdf(left, cell.waited, label)
            right.plot(cell.arrival / 60, cell.waited, ".", markersize=2, label=label, rasterized=True)
        left.set(xscale="log", xlabel="TTFT, s", ylabel="share of requests")
        right.set(yscale="log", xlabel="arrival, minutes", ylabel="TTFT, s")
        left.legend()
        right.legend(markerscale=4)

    title = f"TTFT of Llama-3 8B on 16 A100 at {rate} requests/s, 5 % of them long"
    return Figure(title, statements, table, draw, panels=2)


def equal_utilization(inputs: Inputs) -> Figure:
    """LoongServe's TTFT over Medha's at shares of the rate that 16 A100 can read.

    0.75/s, the last of these, is about what they can read by the cost model. The one before it is what 0.75/s is of the
    rate that they would read at `PAPER_MFU`.
    """
    most, at, model = full_rate(inputs), 0.75, MODELS["llama-3-8b"]
    prompts = [x.prompt_tokens for x in requests(inputs, "long", RATES[-1], WINDOW)]
    flops = float(np.mean([model_flops(model, Work.of([(0, tokens, True)])) for tokens in prompts]))
    paper = at * flops / (PAPER_MFU * 16 * Topology.preset("medha-a100").device.flops["bfloat16"])
    table: list[dict[str, Any]] = []
    for share in (0.5, 0.75, paper, at / most):
        medha, theirs = (serve(inputs, name, "long", share * most, WINDOW) for name in ("medha", "loongserve"))
        ratio = [theirs.quantile(q) / medha.quantile(q) for q in SHARES]
        table.append(
            {"utilization": share, "requests/s": share * most, "medha TTFT p50, s": medha.quantile(0.5),
             "loongserve TTFT p50, s": theirs.quantile(0.5), "ratio of p50": ratio[SHARES.index(0.5)],
             "ratio, the most": max(ratio)}
        )  # fmt: skip
    equal = table[-2]
    about = f"5 % long, at {equal['utilization']:.0%} of what 16 A100 read, as {at}/s is at the paper's best MFU"

    def why(column: str) -> str:
        found = ", ".join(f"{row[column]:,.0f} at {row['utilization']:.0%}" for row in table)
        waits = ", ".join(f"{row['loongserve TTFT p50, s']:.3g}" for row in table)
        ours = ", ".join(f"{row['medha TTFT p50, s']:.2g}" for row in table)
        return f"by utilisation: {found}; LoongServe's medians are {waits} s, as its queue grows, Medha's {ours} s"

    statements = [
        Statement("15b", f"{about}: LoongServe's median TTFT over Medha's", 30, equal["ratio of p50"], "x",
                  why("ratio of p50")),
        Statement("1a", f"{about}: LoongServe's TTFT over Medha's, the most of all quantiles", 174,
                  equal["ratio, the most"], "x", why("ratio, the most")),
    ]  # fmt: skip

    def draw(axes: Any) -> None:
        for column in ("ratio of p50", "ratio, the most"):
            axes.plot([100 * row["utilization"] for row in table], [row[column] for row in table], "o-", label=column)
        axes.set(
            yscale="log", xlabel="requests/s over what 16 A100 can read, %", ylabel="LoongServe's TTFT over Medha's"
        )
        axes.legend()

    title = "LoongServe against Medha at equal utilisation: 8B, 16 A100, 5 % long"
    return Figure(title, corrected(statements), table, draw)


def figure_4(inputs: Inputs) -> Figure:
    """Demand on LoongServe's pools over time: compute and memory of prompts and of decodes."""
    rate = 0.5
    cell, model = serve(inputs, "loongserve", "long", rate, WINDOW), MODELS["llama-3-8b"]
    prefill, decode = _flops(model, cell)
    times = np.linspace(0, cell.window, 361)[1:]
    reads, writes = ((a[:, None] <= times) & (times < b[:, None]) for a, b in (
        (cell.arrival, cell.first), (cell.first, cell.finished)
    ))  # fmt: skip
    tokens = cell.prompt + cell.output / 2
    compute = prefill @ reads, decode @ writes
    memory = cell.prompt @ reads, tokens @ writes
    both = (compute[0] > 0) & (compute[1] > 0)
    more = {"compute": compute[0][both] / compute[1][both], "memory": memory[0][both] / memory[1][both]}
    ends = [np.quantile(values, (0.05, 0.95)) for values in more.values()] if both.any() else []
    table = [
        {"time, s": float(at), "prefill PFLOP": p / 1e15, "decode PFLOP": d / 1e15, "prefill tokens": float(m),
         "decode tokens": float(n)}
        for at, p, d, m, n in zip(times, *compute, *memory, strict=True)
    ]  # fmt: skip
    statements = [
        ordering("4", f"8B, 16 A100, 5 % long, {rate}/s: what prefills ask for over what decodes do changes by more "
                 "than 10 times, compute and memory alike", bool(ends) and all(b > 10 * a for a, b in ends)),
        ordering("4", "prefills ask for more compute for their memory than decodes, at all times",
                 bool((more["compute"] > more["memory"]).all())),
    ]  # fmt: skip

    def draw(left: Any, right: Any) -> None:
        for axes, (read, written), what in ((left, compute, "FLOP"), (right, memory, "tokens of keys")):
            axes.plot(times / 60, read, label="prefill")
            axes.plot(times / 60, written, label="decode")
            axes.set(yscale="log", xlabel="minutes", ylabel=f"{what} of active requests")
        left.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1))

    title = f"What LoongServe's pools are asked for: 8B, 16 A100, 5 % long, {rate} requests/s"
    return Figure(title, statements, table, draw, panels=2)


def _flops(model: LlamaConfig, cell: Outcome) -> tuple[np.ndarray, np.ndarray]:
    """Return the FLOPs of each request's prompt and of its decodes; `[requests]` each."""
    prefill = [model_flops(model, Work.of([(0, int(tokens), True)])) for tokens in cell.prompt]
    decode = [
        int(count) * model_flops(model, Work(1, 1, int(tokens + count / 2)))
        for tokens, count in zip(cell.prompt, cell.output, strict=True)
    ]
    return np.array(prefill), np.array(decode)


def figure_15(inputs: Inputs) -> Figure:
    """TTFT under load, short requests alone and with 5 % long ones."""
    short, long = cells(inputs, "short"), cells(inputs, "long")
    low, high = min(rate for _, rate in short), max(rate for _, rate in short)
    medians = [short[system, low].quantile(0.5) for system in SYSTEMS]
    p90 = {(system, rate): cell.quantile(0.9) for (system, rate), cell in short.items()}
    at = 0.75
    ratio = long["loongserve", at].quantile(0.5) / long["medha", at].quantile(0.5)
    capacity = {system: max([r for s, r in long if s == system and long[s, r].quantile(0.5) <= ACCEPTABLE], default=0.0)
                for system in SYSTEMS}  # fmt: skip
    best = max(capacity[system] for system in SYSTEMS if system != "medha")
    slower = {s: long[s, at].quantile(0.5) / long["medha", at].quantile(0.5) for s in SYSTEMS}
    cut = [s for s, r in long if r == high and long[s, r].served_share < 0.9]
    grown = {s: p90[s, high] / p90[s, low] for s in SYSTEMS}
    sarathi, most = ("sarathi-512", "sarathi-2048"), short["loongserve", high]
    busy = high * float(alone(most.prompt).mean())
    waits = float(np.quantile(most.admitted - most.arrival, 0.9))
    parts = " and ".join(
        f"{short['medha', high].quantile(q) / min(short[s, high].quantile(q) for s in sarathi):.2f}" for q in (0.5, 0.9)
    )
    statements = [
        ordering("15a", f"8B, 16 A100, short: at {low}/s all systems have like median TTFTs (within 2 times)",
                 max(medians) <= 2 * min(medians)),
        ordering("15a", f"short: from {low} to {high}/s Medha's P90 stays within 1.5 times", grown["medha"] <= 1.5),
        ordering("15a", f"short: from {low} to {high}/s LoongServe's P90 grows by more than 2 times",
                 grown["loongserve"] > 2,
                 f"{grown['loongserve']:.2f} times: at {high}/s short prompts alone take {busy:.0%} of the time of 16 "
                 f"A100, so that 90 % of them wait {waits:.2g} s at most for memory; what a manager takes, or "
                 "fragments, is not in the model"),
        ordering("15a", f"short, {high}/s: Medha's TTFT is below both Sarathis' at P50 and P90", all(
            short["medha", high].quantile(q) < short[s, high].quantile(q) for s in sarathi for q in (0.5, 0.9)),
            f"{parts} of the better Sarathi's"),
        Statement("15b", f"5 % long, {at}/s: LoongServe's median TTFT over Medha's", 30, ratio, "x",
                  saturated(inputs, at)),
        Statement("15b", f"5 % long: the highest rate with a median TTFT below {ACCEPTABLE:.0f} s, Medha's over the "
                  "baselines'", 5, capacity["medha"] / max(best, RATES[0]), "x",
                  f"Medha's is {capacity['medha']}/s and the best baseline's {best}/s, of the paper's four rates"),
        ordering("15b", f"5 % long, {at}/s: first come first served makes Medha's, and Sarathi's, median TTFT 10 times "
                 "longer", all(slower[s] > 10 for s in SYSTEMS[1:4])),
        ordering("15b", f"5 % long, {high}/s: more than a tenth of the requests get no token in an hour but with Medha",
                 {*cut} == {s for s, r in long if r == high} - {"medha"}),
    ]  # fmt: skip

    def draw(*axes: Any) -> None:
        for panel, (name, found) in zip(axes, (("short", short), ("5 % long", long)), strict=True):
            for system in SYSTEMS:
                rates = [r for s, r in found if s == system]
                panel.plot(rates, [found[system, r].quantile(0.5) for r in rates], "o-", label=system)
            panel.set(yscale="log", xlabel="requests/s", ylabel="median TTFT, s", title=name)
        axes[0].legend()

    table = rows_of(short, "short") + rows_of(long, "5 % long")
    title = "TTFT under load: Llama-3 8B on 16 A100"
    return Figure(title, statements, table, draw, panels=2)


def figure_16(inputs: Inputs) -> Figure:
    """Time per output token under load."""
    short, long = cells(inputs, "short"), cells(inputs, "long")
    high = max(rate for _, rate in short)
    at = 0.75
    ratio = short["loongserve", high].tpot_quantile(0.5) / short["medha", high].tpot_quantile(0.5)
    most = max(long[s, r].tpot_quantile(1.0) for s, r in long if s == "sarathi-2048")
    ours, theirs = long["medha", at], long["loongserve", at]
    statements = [
        Statement("16a", f"8B, 16 A100, short, {high}/s: LoongServe's median TPOT over Medha's", 5, ratio, "x",
                  "a token takes TP8's two stages mostly latencies of kernels and all-reduces, which TP2 has too; only "
                  "reading the weights is 4 times as long with TP2"),
        Statement("16b", "5 % long: the most that a request's TPOT is with Sarathi, chunks of 2,048", 1.0, most, "s",
                  "of the mean over a request's tokens, as TPOT is; single gaps are longer"),
        ordering("16b", f"5 % long, {at}/s: Medha's TPOT is below LoongServe's at P90",
                 ours.tpot_quantile(0.9) <= theirs.tpot_quantile(0.9)),
        ordering("16b", f"5 % long, {at}/s: Medha's TPOT is below Sarathi's at P50 and P90", all(
            ours.tpot_quantile(q) < long[s, at].tpot_quantile(q)
            for s in ("sarathi-512", "sarathi-2048") for q in (0.5, 0.9))),
        ordering("16b", "5 % long: Medha keeps its target of 30 ms within 10 % at P99, at all rates", all(
            long[s, r].tpot_quantile(0.99) <= 1.1 * 0.03 for s, r in long if s == "medha")),
    ]  # fmt: skip

    def draw(*axes: Any) -> None:
        for panel, (name, found) in zip(axes, (("short", short), ("5 % long", long)), strict=True):
            for system in SYSTEMS:
                rates = [r for s, r in found if s == system]
                panel.plot(rates, [1e3 * found[system, r].tpot_quantile(0.9) for r in rates], "o-", label=system)
            panel.set(yscale="log", xlabel="requests/s", ylabel="P90 of TPOT, ms", title=name)
        axes[0].legend()

    table = rows_of(short, "short") + rows_of(long, "5 % long")
    return Figure("TPOT under load: Llama-3 8B on 16 A100", statements, table, draw, panels=2)


def figure_21(inputs: Inputs) -> Figure:
    """Requests that have come and not ended, over time."""
    rate = 0.75
    ours, theirs = (serve(inputs, system, "long", rate, WINDOW) for system in ("medha", "loongserve"))
    times = np.linspace(0, ours.window, 361)[1:]
    active = {cell.system: cell.active(times) for cell in (ours, theirs)}
    settled = times > ours.window / 6
    means = {system: float(found[settled].mean()) for system, found in active.items()}
    # The longest span in which only new requests come, until one long prompt lets those behind it go.
    rise = {system: float(np.max(np.diff(found)) - np.min(np.diff(found))) for system, found in active.items()}
    statements = [
        ordering("21", f"8B, 16 A100, 5 % long, {rate}/s: LoongServe has more active requests than Medha, on average",
                 means["loongserve"] > means["medha"]),
        ordering("21", "LoongServe's saw-tooth: they rise and fall by more in 10 s than Medha's",
                 rise["loongserve"] > rise["medha"]),
        ordering("21", "Medha's number is stable: it never is above three times its mean",
                 float(active["medha"][settled].max()) <= 3 * means["medha"]),
    ]  # fmt: skip
    table = [
        {"time, s": float(at), "medha": int(x), "loongserve": int(y)}
        for at, x, y in zip(times, active["medha"], active["loongserve"], strict=True)
    ]

    def draw(axes: Any) -> None:
        for system, found in active.items():
            axes.plot(times / 60, found, label=system)
        axes.set(xlabel="minutes", ylabel="active requests", yscale="log")
        axes.legend()

    title = f"Active requests: 8B, 16 A100, 5 % long, {rate} requests/s"
    return Figure(title, statements, table, draw)


def figure_23(inputs: Inputs) -> Figure:
    """A pool that is reserved for short prompts: long ones that are read in an hour, and decodes."""
    found = {
        (s, r): serve(inputs, s, "long", r, WINDOW)
        for r in RATES
        for s in ("medha", "loongserve", "loongserve-reserved")
    }
    at = 0.75
    ended = {s: found[s, at].long_ended for s, r in found if r == at}
    tpot = {s: found[s, at].tpot_quantile(0.5) for s, r in found if r == at}
    lost = ended["loongserve-reserved"]
    statements = [
        Statement("23a", f"8B, 16 A100, 5 % long, {at}/s: long prompts read with a reserved pool over Medha's", 0.8,
                  lost / max(1, ended["medha"]), "x"),
        Statement("23a", f"5 % long, {at}/s: long prompts read with a reserved pool over LoongServe's", 0.9,
                  lost / max(1, ended["loongserve"]), "x"),
        ordering("23b", f"5 % long, {at}/s: TPOT is slightly lower with a reserved pool than without (P50)",
                 tpot["loongserve-reserved"] <= tpot["loongserve"]),
        ordering("23b", f"5 % long, {at}/s: Medha's TPOT is below both LoongServes' (P50)",
                 tpot["medha"] < min(tpot["loongserve"], tpot["loongserve-reserved"]),
                 "Medha fills its steps up to the target of 30 ms, as it is asked to; LoongServe's decodes share no "
                 "step with a prompt"),
    ]  # fmt: skip

    def draw(axes: Any) -> None:
        for system in ended:
            axes.plot(RATES, [found[system, rate].long_ended for rate in RATES], "o-", label=system)
        axes.set(xlabel="requests/s", ylabel="long prompts read in an hour")
        axes.legend()

    title = "A reserved pool for short prompts: Llama-3 8B on 16 A100"
    return Figure(title, statements, rows_of(found, "5 % long"), draw)


def normalised(cell: Outcome) -> np.ndarray:
    """TTFT over that of the prompt alone; of requests without a first token, what they had waited for it."""
    return cell.waited / alone(cell.prompt)


def figure_22(inputs: Inputs) -> Figure:
    """Policies at low and at high load."""
    found = {(name, rate): normalised(serve(inputs, system, "long", rate, WINDOW))
             for rate in POLICY_RATES for system, name in POLICIES.items()}  # fmt: skip
    low, high = POLICY_RATES
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
        for panel, rate in zip(axes, POLICY_RATES, strict=True):
            for name in POLICIES.values():
                draw_cdf(panel, found[name, rate], name)
            panel.set(
                xscale="log", xlabel="TTFT over that alone", ylabel="share of requests", title=f"{rate} requests/s"
            )
        axes[0].legend()

    title = "Scheduling policies: Llama-3 8B on 16 A100, 5 % long"
    return Figure(title, statements, table, draw, panels=2)
