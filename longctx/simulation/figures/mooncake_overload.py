"""Mooncake under overload: which requests are rejected, and how both pools' loads swing; table 2, figures 7 and 8."""

import functools
from typing import Any, NamedTuple

import numpy as np

from longctx.cluster.conductor.config import Admission
from longctx.simulation.figures.figure import Figure, Inputs, Statement, ordering
from longctx.simulation.figures.mooncake_cluster import TPOT, TTFT, Outcome, serve
from longctx.simulation.figures.mooncake_workloads import conversation, repeat
from longctx.simulation.workloads import WorkloadRequest

# Of 23,000 requests so many were rejected.
RULES: dict[Admission, tuple[str, int]] = {
    "baseline": ("baseline", 4_183),
    "early_rejection": ("early rejection", 3_771),
    "predicted_early_rejection": ("early rejection based on prediction", 3_589),
}
PAIR: tuple[Admission, Admission] = ("early_rejection", "predicted_early_rejection")
REQUESTS = 23_000
SPEED = 2.0
SHAPE = "8P+8D"
# 20 machines (6.3). With prompts and answers as long as the trace's, three decode instances are full when 17 prefill
# instances are, and the trace comes 5 times as fast then: as often must it be repeated for 20 minutes.
MACHINES, COPIES, MINUTES = "17P+3D", 5, 20


@functools.cache
def overloaded(inputs: Inputs, rule: Admission, shape: str = SHAPE, speed: float = SPEED) -> Outcome:
    """The conversation trace at twice its speed."""
    return serve(shape, conversation(inputs, speed), admission=rule)


def _rows(found: dict[Admission, Outcome], **about: Any) -> list[dict[str, Any]]:
    return [
        {**about, "admission": rule, "requests": x.came, "rejected": sum(x.rejected.values()),
         "rejected after prefill": x.rejected["decode"], "share rejected": _rejected(x),
         "completed within both SLOs": x.good(TTFT, TPOT), "TTFT p90, s": float(np.quantile(x.ttft, 0.9)),
         "most load of prefill": float(x.loads[:, 1].max()), "most load of decode": float(x.loads[:, 2].max())}
        for rule, x in found.items()
    ]  # fmt: skip


def _rejected(outcome: Outcome) -> float:
    return sum(outcome.rejected.values()) / outcome.came


def table_2(inputs: Inputs) -> Figure:
    """Rejections of the three rules, at twice the trace's speed."""
    found = {rule: overloaded(inputs, rule) for rule in RULES}
    tight = {rule: swings(inputs, rule).outcome for rule in RULES}
    shares = {rule: 100 * _rejected(outcome) for rule, outcome in found.items()}
    order = {
        name: _rejected(x["baseline"]) > _rejected(x["early_rejection"]) > _rejected(x["predicted_early_rejection"])
        for name, x in (("8P+8D", found), (MACHINES, tight))
    }
    most = max(float(x.loads[:, 2].max()) for x in found.values())
    statements = [
        Statement("table 2", f"{SHAPE}, conversation trace at {SPEED:g} x: rejected, {name}", 100 * paper / REQUESTS,
                  shares[rule], "%")
        for rule, (name, paper) in RULES.items()
    ]  # fmt: skip
    statements += [
        ordering("table 2", f"{SHAPE}: the baseline rejects more than early rejection, and this more than with "
                 "prediction", order["8P+8D"], f"the decode pool's load is {most:.2f} at most"),
        ordering("table 2", f"{MACHINES}, where both pools bind (as in figure 7): the same order", order[MACHINES]),
    ]  # fmt: skip
    table = _rows(found, cluster=SHAPE) + _rows(tight, cluster=MACHINES)
    title = f"Rejected requests under overload: LLaMA2-70B, {SHAPE}, conversation trace at {SPEED:g} times its speed"
    return Figure("mooncake_table_2", title, "mooncake", statements, table)


class Swings(NamedTuple):
    """Loads of both pools over time.

    Attributes:
      minutes, prefill, decode: means over 10 s, `[bins]`.
      correlation: of both.
      prefill_amplitude, decode_amplitude: from their 5 % to their 95 % quantile.
    """

    outcome: Outcome
    minutes: np.ndarray
    prefill: np.ndarray
    decode: np.ndarray
    correlation: float
    prefill_amplitude: float
    decode_amplitude: float


BIN = 10.0  # seconds
_WARM_UP = 300.0  # seconds until both pools are full, which are left out
_QUICK = 30.0  # seconds of quick figures


def crowd(inputs: Inputs) -> list[WorkloadRequest]:
    """Requests of `COPIES` copies of the trace, for 20 minutes after the pools have filled."""
    if inputs.quick:
        return conversation(inputs)
    window = _WARM_UP + 60 * MINUTES
    return [request for request in repeat(conversation(inputs), COPIES) if request.arrival < window]


@functools.cache
def swings(inputs: Inputs, rule: Admission) -> Swings:
    """The loads of 20 machines by an admission rule."""
    outcome = serve(MACHINES, crowd(inputs), admission=rule)
    at, *loads = outcome.loads.T
    begin, end = (0.0, _QUICK) if inputs.quick else (_WARM_UP, _WARM_UP + 60 * MINUTES)
    edges = np.arange(begin, end + 1, BIN)
    bins = np.digitize(at, edges)
    prefill, decode = (np.array([load[bins == b].mean() for b in range(1, len(edges))]) for load in loads)
    moves = min(prefill.std(), decode.std()) > 0
    return Swings(
        outcome,
        (edges[:-1] - begin) / 60,
        prefill,
        decode,
        float(np.corrcoef(prefill, decode)[0, 1]) if moves else 0.0,
        *(float(np.quantile(load, 0.95) - np.quantile(load, 0.05)) for load in (prefill, decode)),
    )


def _series(found: dict[Admission, Swings]) -> list[dict[str, Any]]:
    return [
        {"admission": rule, "minute": float(minute), "load of prefill": float(p), "load of decode": float(d)}
        for rule, x in found.items() for minute, p, d in zip(x.minutes, x.prefill, x.decode, strict=True)
    ]  # fmt: skip


def _panel(axes: Any, title: str, found: Swings) -> None:
    axes.plot(found.minutes, found.prefill, label="prefill")
    axes.plot(found.minutes, found.decode, label="decode")
    axes.set(xlabel="minutes", ylabel="load of the pool", title=title, ylim=(0, None))
    axes.legend()


def figure_7(inputs: Inputs) -> Figure:
    """Loads of both pools over 20 minutes with early rejection."""
    found = swings(inputs, "early_rejection")
    statements = [
        ordering("7", f"{MACHINES}, {COPIES} x the trace, early rejection: the pools' loads swing in anti-phase: "
                 f"their correlation, of means over {BIN:.0f} s, is {found.correlation:.2f} (below -0.3)",
                 found.correlation < -0.3),
        ordering("7", f"they fluctuate: from the 5 % to the 95 % quantile prefill's load swings by "
                 f"{found.prefill_amplitude:.2f}, decode's by {found.decode_amplitude:.2f} (one of them above 0.2)",
                 max(found.prefill_amplitude, found.decode_amplitude) > 0.2),
    ]  # fmt: skip
    title = f"Loads of both pools over {MINUTES} minutes with early rejection: LLaMA2-70B, {MACHINES}"

    def draw(axes: Any) -> None:
        _panel(axes, "early rejection", found)

    rows = _series({"early_rejection": found})
    return Figure("mooncake_figure_7", title, "mooncake", statements, rows, draw, width=7.0)


def figure_8(inputs: Inputs) -> Figure:
    """The same beside early rejection based on prediction."""
    early, predicted = (swings(inputs, rule) for rule in PAIR)
    found = dict(zip(PAIR, (early, predicted), strict=True))
    rejected = {rule: _rejected(x.outcome) for rule, x in found.items()}
    statements = [
        ordering("8", f"prediction damps the swings: prefill's amplitude is {predicted.prefill_amplitude:.2f} after "
                 f"{early.prefill_amplitude:.2f}, decode's {predicted.decode_amplitude:.2f} after "
                 f"{early.decode_amplitude:.2f}; both are smaller",
                 predicted.prefill_amplitude < early.prefill_amplitude
                 and predicted.decode_amplitude < early.decode_amplitude),
        ordering("8", f"and the anti-phase: correlation {predicted.correlation:.2f} after {early.correlation:.2f}",
                 predicted.correlation > early.correlation),
        ordering("8", "more requests are served: rejected are "
                 f"{rejected['predicted_early_rejection']:.1%} after {rejected['early_rejection']:.1%}",
                 rejected["predicted_early_rejection"] < rejected["early_rejection"]),
    ]  # fmt: skip

    def draw(left: Any, right: Any) -> None:
        _panel(left, "early rejection", early)
        _panel(right, "based on prediction", predicted)

    title = f"Loads of both pools, early rejection and based on prediction: LLaMA2-70B, {MACHINES}"
    return Figure("mooncake_figure_8", title, "mooncake", statements, _series(found), draw, panels=2)
