"""Mooncake on its conversation trace: where a prompt is computed, and coupled instances; figures 6 and 11."""

from typing import Any

import numpy as np

from papers.figures.figure import Figure, Inputs, Statement, corrected, ordering
from papers.medha.runs import draw_cdf
from papers.mooncake.cluster import CHUNK, PAPER, SERVERS, TPOT, TTFT, Outcome, predict, serve
from papers.mooncake.workloads import PAPER_RATE, conversation, faster, token_rate

# Mean TTFT in seconds of each policy, and its name in the paper; the means are of the paper's FAST'25 version.
POLICIES = {
    "random": ("random", 19.65),
    "least_loaded": ("load balancing", 5.27),
    "cache_aware": ("cache-aware", 3.58),
    "kvcache_centric": ("KVCache-centric", 3.07),
}
CLUSTER, HOSTS = "8P+8D", 8
SHARES = np.linspace(0.01, 0.99, 99)  # of requests, at which TTFTs are compared


def figure_6(inputs: Inputs) -> Figure:
    """TTFT by policy, on 8 prefill and 8 decode instances."""
    trace = conversation(inputs)
    found = {policy: serve(CLUSTER, trace, policy=policy, settings=SERVERS) for policy in POLICIES}
    paper = serve(CLUSTER, trace, settings=PAPER)
    matched = serve(CLUSTER, faster(trace, PAPER_RATE / token_rate(trace)), settings=SERVERS)
    mean = {policy: float(outcome.ttft.mean()) for policy, outcome in found.items()}
    kept = {policy: float((outcome.ttft <= TTFT).mean()) for policy, outcome in found.items()}
    table: list[dict[str, Any]] = [
        {"run": name, "mean TTFT, s": float(outcome.ttft.mean()), "TTFT p50, s": float(np.quantile(outcome.ttft, 0.5)),
         "TTFT p90, s": float(np.quantile(outcome.ttft, 0.9)), f"TTFT within {TTFT:.0f} s": _share(outcome.ttft, TTFT),
         "hit rate": outcome.hit_rate, "prefixes fetched": outcome.num_fetched, "requests": len(outcome.ttft)}
        for name, outcome in {**found, "kvcache_centric, the paper's protocol": paper,
                              "kvcache_centric, token rate of the paper": matched}.items()
    ]  # fmt: skip
    centric = POLICIES["kvcache_centric"][1]
    alone = {policy: _alone(outcome) for policy, outcome in found.items()}
    explained = (float(matched.ttft.mean()) - mean["kvcache_centric"]) / (centric - mean["kvcache_centric"])
    rate = (
        f"with the token rate of the paper's real data (table 1) KVCache-centric takes {matched.ttft.mean():.2f} s, "
        f"{explained:.0%} of its difference from the paper: the rate is {'' if explained > 0.5 else 'not '}most of it"
    )
    whys = {
        policy: f"{outcome.hit_rate:.0%} of the tokens are cached, so prompts take {alone[policy].mean():.2f} s and "
        f"{alone[policy].sum() / HOSTS / outcome.seconds:.0%} of the hosts' time; {rate}"
        for policy, outcome in found.items()
    }
    queued = {policy: mean[policy] - float(alone[policy].mean()) for policy in POLICIES}
    statements = [
        Statement("6", f"{CLUSTER}, conversation trace: mean TTFT, {name} (FAST'25)", seconds, mean[policy], "s",
                  whys[policy])
        for policy, (name, seconds) in POLICIES.items()
    ]  # fmt: skip
    statements += [
        Statement("6", f"{CLUSTER}, conversation trace: mean TTFT, KVCache-centric, by the paper's protocol (FAST'25)",
                  centric, float(paper.ttft.mean()), "s", whys["kvcache_centric"]),
        *(Statement("6", f"{CLUSTER}: mean TTFT of {POLICIES[policy][0]} over that of KVCache-centric (FAST'25)",
                    POLICIES[policy][1] / centric, mean[policy] / mean["kvcache_centric"], "x",
                    f"{queued[policy]:.2f} of {mean[policy]:.2f} s are beyond prompts alone, queues and transfers, of "
                    f"KVCache-centric's {mean['kvcache_centric']:.2f} s {queued['kvcache_centric']:.2f}; the paper's "
                    "parts are not known")
          for policy in ("random", "least_loaded", "cache_aware")),
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
    return Figure(title, corrected(statements), table, draw, panels=2)


def _alone(outcome: Outcome) -> np.ndarray:
    """Seconds of each completed request's prompt without a queue; `[completed]`."""
    both = zip(outcome.cached.astype(int).tolist(), outcome.prompt.astype(int).tolist(), strict=True)
    return np.array([predict().prefill_seconds(cached, prompt, CHUNK) for cached, prompt in both])


def figure_11(inputs: Inputs) -> Figure:
    """TTFT and TBT of 10 prefill and 10 decode instances, and of 20 coupled ones, on the real trace."""
    trace = conversation(inputs)
    ours, paper = (serve("10P+10D", trace, settings=settings) for settings in (SERVERS, PAPER))
    theirs = serve("20M", trace)
    both = {"Mooncake-[10P+10D]": ours, "vLLM-[20M]": theirs}
    table: list[dict[str, Any]] = [
        {"system": name, "requests": x.came, f"TTFT within {TTFT:.0f} s": _share(x.ttft, TTFT),
         f"mean TBT within {TPOT} s": _share(x.tpot, TPOT), f"tail TBT within {TPOT} s": _share(x.tbt, TPOT),
         "completed within both SLOs, tail TBT": x.good(TTFT, TPOT, tail=True), "with mean TBT": x.good(TTFT, TPOT),
         "mean TTFT, s": float(x.ttft.mean()), "hit rate": x.hit_rate,
         **{f"{kind} p{q}, s": float(np.quantile(values, q / 100))
            for kind, values in (("TTFT", x.ttft), ("mean TBT", x.tpot), ("tail TBT", x.tbt)) for q in (50, 90, 99)}}
        for name, x in {**both, "Mooncake-[10P+10D], the paper's protocol": paper}.items()
    ]  # fmt: skip
    more = ours.good(TTFT, TPOT, tail=True) / theirs.good(TTFT, TPOT, tail=True)
    by_mean = 100 * _share(theirs.tpot, TPOT)
    tail = "TBT of 0.1 s, the mean of a request's longest tenth of gaps (FAST'25)"
    why = f"by the mean of all its gaps {by_mean:.0f} %"
    slow = [float(np.quantile(x.tbt, 0.99)) for x in (theirs, ours)]
    parts = f"{_share(theirs.tbt, TPOT):.0%} of the requests keep TBT, {_share(theirs.ttft, TTFT):.0%} TTFT"
    gaps = np.abs(np.quantile(ours.ttft, SHARES) - np.quantile(theirs.ttft, SHARES)) / TTFT
    statements = [
        *corrected([
            Statement("11", "10P+10D: requests within a TTFT of 30 s", 100, 100 * _share(ours.ttft, TTFT), "%"),
            Statement("11", "10P+10D, by the paper's protocol: requests within a TTFT of 30 s", 100,
                      100 * _share(paper.ttft, TTFT), "%"),
            Statement("11", f"10P+10D: requests within a {tail}", 100, 100 * _share(ours.tbt, TPOT), "%"),
            Statement("11", f"10P+10D, by the paper's protocol: requests within a {tail}", 100,
                      100 * _share(paper.tbt, TPOT), "%"),
            Statement("11", "requests that complete within both SLOs, 10P+10D over 20 coupled", 1.75, more, "x",
                      f"of the coupled ones {parts}"),
        ]),
        Statement("11", "20 coupled: requests within a TTFT of 30 s", 100, 100 * _share(theirs.ttft, TTFT), "%"),
        Statement("11", f"20 coupled: requests within a {tail}", 57, 100 * _share(theirs.tbt, TPOT), "%", why),
        ordering("11", "TTFT curves are nearly equal: at no quantile to 99 % do they differ by more than a tenth of 30 "
                 f"s (here by {TTFT * gaps.max():.1f} s at most)", bool(gaps.max() <= 0.1),
                 "20 coupled instances all prefill, and 10 do, but coupled ones find "
                 f"{theirs.hit_rate:.0%} of the tokens cached, Mooncake {ours.hit_rate:.0%}"),
        ordering("11", "some requests have extremely high TBTs with coupled instances, and none has with Mooncake: the "
                 f"slowest hundredth is above {slow[0]:.2f} s, and above {slow[1]:.2f} s (ten SLOs, and one)",
                 slow[0] > 10 * TPOT > TPOT > slow[1],
                 "a long prompt that is read whole stops all decodes of its instance"),
    ]  # fmt: skip

    def draw(left: Any, right: Any) -> None:
        for name, outcome in both.items():
            draw_cdf(left, outcome.ttft, name)
            draw_cdf(right, outcome.tbt, name)
        left.axvline(TTFT, linestyle=":", color="black")
        right.axvline(TPOT, linestyle=":", color="black")
        left.set(xlabel="TTFT, s", ylabel="share of requests", xscale="log")
        right.set(xlabel="TBT (longest tenth), s", ylabel="share of requests", xscale="log")
        left.legend()

    title = "Real trace: LLaMA2-70B, 10 prefill and 10 decode instances against 20 coupled ones"
    return Figure(title, statements, table, draw, panels=2)


def _share(values: np.ndarray, limit: float) -> float:
    return float((values <= limit).mean())
