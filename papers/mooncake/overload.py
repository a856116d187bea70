"""Mooncake under overload: which requests are rejected, and how both pools' loads swing; table 2, figures 7 and 8."""

import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from longctx.simulation.cluster import ClusterSettings
from longctx.simulation.workloads import WorkloadRequest
from papers.figures.figure import Figure, Inputs, Statement, corrected, ordering
from papers.mooncake.cluster import CHUNK, PAPER, SERVERS, TPOT, TTFT, Outcome, predict, serve
from papers.mooncake.workloads import conversation, repeat

Rule = Literal["baseline", "early_rejection", "predicted_early_rejection"]
BASELINE: Rule = "baseline"
EARLY: Rule = "early_rejection"
PREDICTED: Rule = "predicted_early_rejection"
# Rejections of 23,000 requests, by rule.
RULES: dict[Rule, tuple[str, int]] = {
    BASELINE: ("baseline", 4_183),
    EARLY: ("early rejection", 3_771),
    PREDICTED: ("early rejection based on prediction", 3_589),
}
REQUESTS = 23_000
SPEED = 2.0
SHAPE, HOSTS = "8P+8D", 8
# Of as many machines fewer that decode, and a shorter TBT in seconds: towards where decode binds before prefill does.
SWEEP = (("13P+3D", TPOT), ("14P+2D", TPOT), ("15P+1D", TPOT), (SHAPE, 0.03))
# 20 machines (6.3), whose workload is not said. Here both pools bind: by the trace's lengths 4 decode instances are
# full when 16 prefill instances are busy. It comes as often as 6 times the trace.
MACHINES, COPIES, MINUTES = "16P+4D", 6, 20
THRESHOLD = 0.8
"""Load of the decode pool above which early rejection accepts no request (6.1: "a predefined threshold"). Before a
decode the SLO and memory are the limit. With the same limit before both, a place that is free is given away to all who
come until one of them has been prefilled, and early rejection is the baseline."""


@functools.cache
def overloaded(inputs: Inputs, rule: Rule, shape: str = SHAPE, tbt: float = TPOT, **options: Any) -> Outcome:
    """The conversation trace at twice its speed; 16 machines, by the protocol of our servers."""
    options = {"settings": SERVERS} | options
    return serve(shape, conversation(inputs, SPEED), admission=rule, tpot=tbt, **options)


def _rows(found: Mapping[Rule, Outcome], **about: Any) -> list[dict[str, Any]]:
    return [
        {**about, "admission": rule, "requests": x.came, "rejected": sum(x.rejected.values()),
         "rejected after prefill": x.rejected["decode"], "share rejected": _rejected(x),
         "completed within both SLOs": x.good(TTFT, TPOT), "TTFT p90, s": float(np.quantile(x.ttft, 0.9)),
         "most load of prefill": float(x.loads[:, 1].max()), "most load of decode": float(x.loads[:, 2].max())}
        for rule, x in found.items()
    ]  # fmt: skip


def _rejected(outcome: Outcome) -> float:
    return sum(outcome.rejected.values()) / outcome.came


def _busy(outcome: Outcome) -> float:
    """The share of the prefill instances' time that completed requests' prompts took."""
    both = zip(outcome.cached.astype(int).tolist(), outcome.prompt.astype(int).tolist(), strict=True)
    return sum(predict().prefill_seconds(cached, prompt, CHUNK) for cached, prompt in both) / HOSTS / outcome.seconds


def table_2(inputs: Inputs) -> Figure:
    """Rejections of the three rules, at twice the trace's speed."""
    found = {rule: overloaded(inputs, rule) for rule in RULES}
    paper = overloaded(inputs, EARLY, settings=PAPER)
    by_instance = overloaded(inputs, EARLY, prefill_load="instance")
    sweep = {
        each: {rule: overloaded(inputs, rule, *each) for rule in RULES} for each in SWEEP[: 1 if inputs.quick else None]
    }
    tight = {rule: swings(inputs, rule).outcome for rule in RULES}
    alike = {
        rule: serve(MACHINES, crowd(inputs), admission=rule, load_limit=THRESHOLD, settings=PAPER) for rule in RULES
    }
    equal = {rule: _rejected(outcome) for rule, outcome in alike.items()}
    than = ", ".join(
        f"{RULES[rule][0]} {abs(more):.1f} points {'more' if more > 0 else 'less'}"
        for rule in (EARLY, PREDICTED) for more in [100 * (equal[rule] - equal[BASELINE])]
    )  # fmt: skip
    loads = ", ".join(f"{x.loads[:, 1].mean():.2f} and {x.loads[:, 2].mean():.2f}" for x in alike.values())
    share = {rule: _rejected(outcome) for rule, outcome in found.items()}
    both = {rule: _rejected(outcome) for rule, outcome in tight.items()}
    vain = {rule: outcome.rejected["decode"] / outcome.came for rule, outcome in tight.items()}
    mean = {rule: float(outcome.prompt.mean()) for rule, outcome in tight.items()}
    most = max(float(x.loads[:, 2].max()) for x in found.values())
    one = found[EARLY]
    why = f"prompts take {_busy(one):.0%} of eight hosts' time, {one.hit_rate:.0%} of their tokens being cached"
    statements = [
        Statement("table 2", f"{SHAPE}, conversation trace at {SPEED:g} x: rejected, {name}", 100 * paper / REQUESTS,
                  100 * share[rule], "%", why)
        for rule, (name, paper) in RULES.items()
    ]  # fmt: skip
    statements += [
        ordering("table 2", f"{SHAPE}: the baseline rejects more than early rejection, and this more than with "
                 "prediction", share[BASELINE] > share[EARLY] > share[PREDICTED],
                 f"decode's load is {most:.2f} at most, so that all three decide by prefill's alone"),
        Statement("table 2", f"{SHAPE} at {SPEED:g} x: rejected, early rejection, by the paper's protocol",
                  100 * RULES[EARLY][1] / REQUESTS, 100 * _rejected(paper), "%", why),
        Statement("table 2", f"{SHAPE} at {SPEED:g} x: rejected, early rejection, prefill's load being the greatest "
                  "TTFT of an instance (6.1)", 100 * RULES[EARLY][1] / REQUESTS, 100 * _rejected(by_instance), "%",
                  why),
        *(_sweep(*each, outcomes) for each, outcomes in sweep.items()),
        ordering("table 2", f"{MACHINES}, by the paper's protocol, at an equal limit of {THRESHOLD} before prefill and "
                 "decode: the baseline rejects more than early rejection, and this more than with prediction: "
                 + ", ".join(f"{share:.1%}" for share in equal.values()),
                 equal[BASELINE] > equal[EARLY] > equal[PREDICTED],
                 f"than the baseline {than}, in one run each; {_vain(alike)} are rejected after their prefill; mean "
                 f"loads of prefill and decode are {loads}"),
        ordering("table 2", f"{MACHINES}, where both pools bind (figure 7): early rejection rejects more than with "
                 f"prediction: {both[EARLY]:.1%} and {both[PREDICTED]:.1%}", both[EARLY] > both[PREDICTED]),
        ordering("table 2", f"{MACHINES}: the baseline rejects more than early rejection: {both[BASELINE]:.1%} and "
                 f"{both[EARLY]:.1%}", both[BASELINE] > both[EARLY],
                 f"early rejection stops at a decode load of {THRESHOLD}, which the baseline fills up to 1, where "
                 "requests that still fit may decode, so that it serves smaller ones: their prompts have "
                 f"{mean[BASELINE]:,.0f} tokens on average, {mean[EARLY]:,.0f} with early rejection"),
        ordering("table 2", f"{MACHINES}: {vain[BASELINE]:.1%} of the requests are rejected after their prefill by the "
                 f"baseline, and by the others less than half of that: {vain[EARLY]:.1%}, {vain[PREDICTED]:.1%}",
                 vain[BASELINE] > 2 * max(vain[EARLY], vain[PREDICTED])),
    ]  # fmt: skip
    table = _rows(found, cluster=SHAPE, TBT=TPOT) + _rows({EARLY: paper}, cluster=f"{SHAPE}, the paper's protocol")
    table += _rows({EARLY: by_instance}, cluster=f"{SHAPE}, load of the instance")
    for (shape, tbt), outcomes in sweep.items():
        table += _rows(outcomes, cluster=shape, TBT=tbt)
    table += _rows(tight, cluster=MACHINES)
    table += [
        {"cluster": f"{MACHINES}, limit {THRESHOLD} before both", "admission": rule, "share rejected": share}
        for rule, share in equal.items()
    ]
    title = f"Rejected requests under overload: LLaMA2-70B, {SHAPE}, conversation trace at {SPEED:g} times its speed"
    return Figure(title, corrected(statements), table)


def _sweep(shape: str, tbt: float, found: Mapping[Rule, Outcome]) -> Statement:
    """State whether the rules are ordered as in the paper, on other machines or with another TBT."""
    share = {rule: _rejected(outcome) for rule, outcome in found.items()}
    most = ", ".join(f"{outcome.loads[:, 2].max():.2f}" for outcome in found.values())
    return ordering(
        "table 2",
        f"{shape} at {SPEED:g} x, TBT {tbt:g} s: the baseline rejects more than early rejection, and this more than "
        f"with prediction: {', '.join(f'{each:.1%}' for each in share.values())}",
        share[BASELINE] > share[EARLY] > share[PREDICTED],
        f"{_vain(found)} are rejected after their prefill, which is what early rejection can save; decode's load is at "
        f"most {most}",
    )


def _vain(found: Mapping[Rule, Outcome]) -> str:
    """The shares of requests that each rule rejects after their prefill."""
    return ", ".join(f"{outcome.rejected['decode'] / outcome.came:.1%}" for outcome in found.values())


class Swings(NamedTuple):
    """Loads of both pools over time.

    Attributes:
      minutes, prefill, decode: means over 5 s, `[bins]`.
      correlation: of both at the same time.
      staggered, lag: of prefill's load with decode's up to 40 s before, the most negative one, and the seconds before.
      prefill_amplitude, decode_amplitude: from their 5 % to their 95 % quantile.
    """

    outcome: Outcome
    minutes: np.ndarray
    prefill: np.ndarray
    decode: np.ndarray
    correlation: float
    staggered: float
    lag: float
    prefill_amplitude: float
    decode_amplitude: float


BIN, LAGS = 5.0, 9  # seconds; how many multiples of it decode's load is taken before prefill's
_WARM_UP = 120.0  # seconds until both pools are full, which are left out
_QUICK = 30.0  # seconds of quick figures


def crowd(inputs: Inputs) -> list[WorkloadRequest]:
    """Requests of `COPIES` copies of the trace, for 20 minutes after the pools have filled."""
    if inputs.quick:
        return conversation(inputs)
    window = _WARM_UP + 60 * MINUTES
    return [request for request in repeat(conversation(inputs), COPIES) if request.arrival < window]


@functools.cache
def swings(inputs: Inputs, rule: Rule, settings: ClusterSettings = SERVERS) -> Swings:
    """The loads of 20 machines by an admission rule and a protocol."""
    outcome = serve(MACHINES, crowd(inputs), admission=rule, decode_limit=THRESHOLD, settings=settings)
    at, *loads = outcome.loads.T
    begin, end = (0.0, _QUICK) if inputs.quick else (_WARM_UP, _WARM_UP + 60 * MINUTES)
    edges = np.arange(begin, end + 1, BIN)
    bins = np.digitize(at, edges)
    prefill, decode = (np.array([load[bins == b].mean() for b in range(1, len(edges))]) for load in loads)
    staggered = [_correlation(prefill[lag:], decode[: len(decode) - lag]) for lag in range(1 if inputs.quick else LAGS)]
    lag = int(np.argmin(staggered))
    amplitudes = (float(np.quantile(load, 0.95) - np.quantile(load, 0.05)) for load in (prefill, decode))
    minutes = (edges[:-1] - begin) / 60
    return Swings(outcome, minutes, prefill, decode, staggered[0], staggered[lag], BIN * lag, *amplitudes)


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    """0 if one of both does not move."""
    return float(np.corrcoef(one, other)[0, 1]) if min(one.std(), other.std()) > 0 else 0.0


def _series(found: Mapping[Rule, Swings], protocol: str) -> list[dict[str, Any]]:
    return [
        {"protocol": protocol, "admission": rule, "minute": float(minute), "load of prefill": float(p),
         "load of decode": float(d)}
        for rule, x in found.items() for minute, p, d in zip(x.minutes, x.prefill, x.decode, strict=True)
    ]  # fmt: skip


def _panel(axes: Any, title: str, found: Swings) -> None:
    axes.plot(found.minutes, found.prefill, label="prefill")
    axes.plot(found.minutes, found.decode, label="decode")
    axes.set(xlabel="minutes", ylabel="load of the pool", title=title, ylim=(0, 1.2))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.legend(ncols=2, loc="upper right")


def figure_7(inputs: Inputs) -> Figure:
    """Loads of both pools over 20 minutes with early rejection."""
    found, paper = swings(inputs, EARLY), swings(inputs, EARLY, PAPER)
    why = (
        "machines, rate and threshold were chosen so that both pools bind; with the default limit of 1, which holds "
        "before a decode too, no such swings were found"
    )
    statements = [
        *(ordering("7", f"{MACHINES}, {COPIES} x the trace, early rejection above a decode load of {THRESHOLD}"
                   f"{protocol}: both loads swing in anti-phase: prefill's is low {x.lag:.0f} s after decode's was "
                   f"high, correlation {x.staggered:.2f} (below -0.5); at the same time it is {x.correlation:.2f} "
                   "(below 0)", x.staggered < -0.5 and x.correlation < 0, why)
          for x, protocol in ((found, ""), (paper, ", by the paper's protocol"))),
        ordering("7", "they fluctuate significantly: from the 5 % to the 95 % quantile prefill's load swings by "
                 f"{found.prefill_amplitude:.2f}, decode's by {found.decode_amplitude:.2f} (both more than 0.15)",
                 min(found.prefill_amplitude, found.decode_amplitude) > 0.15),
    ]  # fmt: skip
    title = f"Loads of both pools over {MINUTES} minutes with early rejection: LLaMA2-70B, {MACHINES}"

    def draw(axes: Any) -> None:
        _panel(axes, "early rejection", found)

    rows = _series({EARLY: found}, "servers") + _series({EARLY: paper}, "paper")
    return Figure(title, corrected(statements), rows, draw, width=7.0)


def figure_8(inputs: Inputs) -> Figure:
    """The same beside early rejection based on prediction."""
    now, then = swings(inputs, EARLY), swings(inputs, PREDICTED)
    paper = {rule: swings(inputs, rule, PAPER) for rule in (EARLY, PREDICTED)}
    rejected = _rejected(now.outcome), _rejected(then.outcome)
    by_paper = [_rejected(each.outcome) for each in paper.values()]
    statements = [
        ordering("8", f"prediction damps the swings of prefill's load: amplitude {then.prefill_amplitude:.2f} after "
                 f"{now.prefill_amplitude:.2f}", then.prefill_amplitude < now.prefill_amplitude),
        ordering("8", f"and those of decode's: {then.decode_amplitude:.2f} after {now.decode_amplitude:.2f}",
                 then.decode_amplitude < now.decode_amplitude),
        ordering("8", f"and the anti-phase: correlation {then.staggered:.2f} after {now.staggered:.2f}",
                 then.staggered > now.staggered),
        ordering("8", f"the cluster handles more requests: {rejected[1]:.1%} are rejected after {rejected[0]:.1%}",
                 rejected[1] < rejected[0]),
        ordering("8", f"the cluster handles more requests, by the paper's protocol: {by_paper[1]:.1%} are rejected "
                 f"after {by_paper[0]:.1%}", by_paper[1] < by_paper[0]),
    ]  # fmt: skip

    def draw(left: Any, right: Any) -> None:
        _panel(left, "early rejection", now)
        _panel(right, "based on prediction", then)

    title = f"Loads of both pools, early rejection and based on prediction: LLaMA2-70B, {MACHINES}"
    rows = _series({EARLY: now, PREDICTED: then}, "servers") + _series(paper, "paper")
    return Figure(title, corrected(statements), rows, draw, panels=2)
