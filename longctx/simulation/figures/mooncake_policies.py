"""Mooncake on its conversation trace: where a prompt is computed, and coupled instances; figures 6 and 11."""

from typing import Any

import numpy as np

from longctx.simulation.figures.figure import Figure, Inputs, Statement, ordering
from longctx.simulation.figures.medha_runs import draw_cdf
from longctx.simulation.figures.mooncake_cluster import TPOT, TTFT, Outcome, serve
from longctx.simulation.figures.mooncake_workloads import conversation

# Mean TTFT in seconds of each policy, and its name in the paper; the means are of the paper's FAST'25 version.
POLICIES = {
    "random": ("random", 19.65),
    "least_loaded": ("load balancing", 5.27),
    "cache_aware": ("cache-aware", 3.58),
    "kvcache_centric": ("KVCache-centric", 3.07),
}
CLUSTER = "8P+8D"


def figure_6(inputs: Inputs) -> Figure:
    """TTFT by policy, on 8 prefill and 8 decode instances."""
    trace = conversation(inputs)
    found = {policy: serve(CLUSTER, trace, policy=policy) for policy in POLICIES}
    mean = {policy: float(outcome.ttft.mean()) for policy, outcome in found.items()}
    kept = {policy: float((outcome.ttft <= TTFT).mean()) for policy, outcome in found.items()}
    table = [
        {"policy": policy, "mean TTFT, s": mean[policy], "TTFT p50, s": float(np.quantile(outcome.ttft, 0.5)),
         "TTFT p90, s": float(np.quantile(outcome.ttft, 0.9)), f"TTFT within {TTFT:.0f} s": kept[policy],
         "hit rate": outcome.hit_rate, "prefixes fetched": outcome.num_fetched, "requests": len(outcome.ttft)}
        for policy, outcome in found.items()
    ]  # fmt: skip
    whys = _why_policies(found)
    statements = [
        Statement("6", f"{CLUSTER}, conversation trace: mean TTFT, {name} (FAST'25)", paper, mean[policy], "s",
                  whys[policy])
        for policy, (name, paper) in POLICIES.items()
    ]  # fmt: skip
    statements += [
        ordering("6", "mean TTFT: random > load balancing > cache-aware > KVCache-centric",
                 mean["random"] > mean["least_loaded"] > mean["cache_aware"] > mean["kvcache_centric"]),
        ordering("6", f"TTFT within {TTFT:.0f} s: KVCache-centric at least as often as cache-aware and load balancing, "
                 "and these more often than random",
                 kept["kvcache_centric"] >= max(kept["cache_aware"], kept["least_loaded"])
                 and min(kept["cache_aware"], kept["least_loaded"]) > kept["random"]),
    ]  # fmt: skip

    def draw(left: Any, right: Any) -> None:
        names = [name for name, _ in POLICIES.values()]
        left.bar(names, list(mean.values()))
        left.set_ylabel("mean TTFT, s")
        right.bar(names, [100 * share for share in kept.values()])
        right.set_ylabel(f"TTFT within {TTFT:.0f} s, %")
        for axes in (left, right):
            axes.tick_params(axis="x", labelrotation=15)

    title = "Where a prompt is computed: LLaMA2-70B, 8 prefill and 8 decode instances, conversation trace"
    return Figure("mooncake_figure_6", title, "mooncake", statements, table, draw, panels=2)


def _why_policies(found: dict[str, Outcome]) -> dict[str, str]:
    hits = {policy: f"{outcome.hit_rate:.0%}" for policy, outcome in found.items()}
    return {policy: f"hit rate {hits[policy]}" for policy in POLICIES}


def figure_11(inputs: Inputs) -> Figure:
    """TTFT and TBT of 10 prefill and 10 decode instances, and of 20 coupled ones, on the real trace."""
    trace = conversation(inputs)
    ours, theirs = serve("10P+10D", trace), serve("20M", trace)
    both = {"Mooncake-[10P+10D]": ours, "vLLM-[20M]": theirs}
    good = {name: outcome.good(TTFT, TPOT) for name, outcome in both.items()}
    table = [
        {"system": name, f"TTFT within {TTFT:.0f} s": float((x.ttft <= TTFT).mean()),
         f"mean TBT within {TPOT} s": x.share_tpot(TPOT), f"longest gap within {TPOT} s": x.share_gap(TPOT),
         "within both SLOs": good[name], "mean TTFT, s": float(x.ttft.mean()), "hit rate": x.hit_rate,
         **{f"TTFT p{q}, s": float(np.quantile(x.ttft, q / 100)) for q in (50, 90, 99)},
         **{f"TBT p{q}, s": float(np.quantile(x.tpot, q / 100)) for q in (50, 90, 99)}}
        for name, x in both.items()
    ]  # fmt: skip
    more = good["Mooncake-[10P+10D]"] / good["vLLM-[20M]"]
    statements = [
        Statement("11", "10P+10D: requests within a TTFT of 30 s", 100, 100 * float((ours.ttft <= TTFT).mean()), "%"),
        Statement("11", "20 coupled: requests within a TTFT of 30 s", 100, 100 * float((theirs.ttft <= TTFT).mean()),
                  "%"),
        Statement("11", "10P+10D: requests within a TBT of 0.1 s", 100, 100 * ours.share_tpot(TPOT), "%"),
        Statement("11", "20 coupled: requests within a TBT of 0.1 s", 57, 100 * theirs.share_tpot(TPOT), "%"),
        Statement("11", "requests within both SLOs, 10P+10D over 20 coupled", 1.75, more, "x"),
    ]  # fmt: skip

    def draw(left: Any, right: Any) -> None:
        for name, outcome in both.items():
            draw_cdf(left, outcome.ttft, name)
            draw_cdf(right, outcome.tpot, name)
        left.axvline(TTFT, linestyle=":")
        right.axvline(TPOT, linestyle=":")
        left.set(xlabel="TTFT, s", ylabel="share of requests", xscale="log")
        right.set(xlabel="TBT, s", ylabel="share of requests", xscale="log")
        left.legend()

    title = "Real trace: LLaMA2-70B, 10 prefill and 10 decode instances against 20 coupled ones"
    return Figure("mooncake_figure_11", title, "mooncake", statements, table, draw, panels=2)
