"""Comparisons of an incident with other settings, and with its own simulation from the first step on."""

from collections.abc import Callable
from typing import Any

import numpy as np

from longctx.serving.recording.reader import RecordedLog
from longctx.serving.request.output import Metrics
from longctx.serving.scheduler.batch import Batch
from longctx.simulation.incident.alternative import Alternative
from longctx.simulation.incident.baseline import Baseline
from longctx.simulation.incident.replayer import Replayer
from longctx.simulation.incident.text import describe_rows
from longctx.simulation.reports.report import percentiles, share


def describe_difference(baseline: Baseline, alternative: Alternative, make_replayer: Callable[..., Replayer]) -> str:
    """The first decision that differs, as recorded and otherwise.

    Args:
      make_replayer: makes one of the same log, with such arguments.
    """
    difference = alternative.difference
    if difference is None:
        return "no decision differs"
    recorded = recorded_batch(make_replayer, difference.number, difference.step)
    error = baseline.times.error
    return (
        f"the first decision that differs is in step {difference.step}, at {difference.now - baseline.start:.6f} s\n"
        f"  recorded   {describe_rows(recorded)}\n"
        f"  otherwise  {describe_rows(difference.batch)}\n"
        "from there on, what steps take is predicted, not measured"
        + ("" if error is None else f"; predictions of the recorded steps are off by {error:.1%} of their time")
    )


def recorded_batch(make_replayer: Callable[..., Replayer], number: int, step: int) -> Batch | None:
    """The batch that was planned as the one of such a number, if that was in this step."""
    planned: list[Batch] = []
    replayer = make_replayer(planned=lambda batch, now: planned.append(batch))
    for moment in replayer.run():
        if moment.number == step:
            break
    return planned[number] if number < len(planned) else None


def compare(baseline: Baseline, control: Alternative, alternative: Alternative) -> dict[str, Any]:
    """Return the figures of the requests that had ended by themselves, as plain data.

    Args:
      control: the recorded settings, predicted from the decision on from which the alternative is.
    """
    ended = [order for order, output in baseline.outputs.items() if output.finish_reason in ("stop", "length")]
    both = [order for order in ended if order in alternative.outputs]
    for side in (control, alternative):
        both = [x for x in both if x in side.outputs and side.outputs[x].finish_reason in ("stop", "length")]
    return {
        "completions": len(both),
        "left_out": len(ended) - len(both),  # otherwise they were cancelled, or came to no end
        **{
            name: _summarize([side.outputs[order].metrics for order in both])
            for name, side in (("recorded", baseline), ("predicted", control), ("otherwise", alternative))
        },
    }


def _summarize(metrics: list[Metrics]) -> dict[str, Any]:
    return {
        "ttft": percentiles([m.ttft for m in metrics if m.ttft is not None]),
        "tpot": percentiles([m.tpot for m in metrics if m.tpot is not None]),
        "kept_ttft": share([m.kept_ttft for m in metrics]),
        "kept_tpot": share([m.kept_tpot for m in metrics]),
        "preemptions": sum(m.preemptions for m in metrics),
        "cached_tokens": sum(m.cached_tokens for m in metrics),
        "seconds": max((m.finished for m in metrics if m.finished is not None), default=0.0)
        - min((m.arrival for m in metrics), default=0.0),
    }


def comparison_table(comparison: dict[str, Any]) -> str:
    """A comparison as a table. The change is between two predictions, so that their common error is not in it."""
    sides = [comparison[name] for name in ("recorded", "predicted", "otherwise")]
    rows: list[tuple[str, ...]] = [("", "recorded", "as predicted", "otherwise", "change")]
    for name in ("ttft", "tpot"):
        for percentile in ("p50", "p99"):
            values = [side[name] and side[name][percentile] for side in sides]
            rows.append((f"{name.upper()} {percentile}", *_cells(values, 1e3, " ms")))
    for name, title in (("kept_ttft", "in time"), ("kept_tpot", "within their TPOT")):
        rows.append((title, *_cells([side[name] for side in sides], 100, " %")))
    for name in ("preemptions", "cached_tokens"):
        rows.append((name.replace("_", " "), *_cells([side[name] for side in sides], 1, "", 0)))
    rows.append(("until the last end", *_cells([side["seconds"] for side in sides], 1, " s")))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  ".join(
            f"{cell:>{width}}" if i else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    left_out = comparison["left_out"]
    title = f"{comparison['completions']:,} completions that ended by themselves"
    if left_out:
        title += f" ({left_out:,} others are left out, which did not otherwise)"
    return "\n".join([title, *lines])


def _cells(values: list[float | None], scale: float, unit: str, digits: int = 2) -> list[str]:
    """The values, and the change from the second to the third."""
    _, before, after = values
    shown = ["-" if x is None else f"{scale * x:,.{digits}f}{unit}" for x in values]
    change = "-" if before is None or after is None else f"{scale * (after - before):+,.{digits}f}{unit}"
    return [*shown, change]


_SIDES = ("measured", "predicted")
_FIGURES: dict[str, Callable[[np.ndarray], Any]] = {
    "mean": np.mean,
    "p50": np.median,
    "p90": lambda x: np.percentile(x, 90),
    "p99": lambda x: np.percentile(x, 99),
}


def simulate_incident(log: RecordedLog, baseline: Baseline) -> dict[str, Any]:
    """The recorded requests and settings in virtual time, twice; plain data, times in seconds.

    `measured`: the device is at every moment as fast as it was, so what differs from the record is the simulator's.
    `predicted`: steps take what the engine's predictor says, times a factor for each kind of step, as under other
    settings; what differs from `measured` is the predictor's.

    Returns:
      For `ttft` and `tpot`: of `recorded`, `measured` and `predicted` the figures, the mean and percentiles; of the
      latter two also `bias`, the mean difference over the recorded mean, and `correlation`, over requests, with what
      was recorded. `completions`: how many ended by themselves.
    """
    sides: dict[str, dict[int, Metrics]] = {}
    for name in _SIDES:
        header = log.header
        again = Alternative(
            log, baseline, header.config, header.num_pages, predicts_from=0, measured=name == "measured"
        )
        again.run()
        sides[name] = {order: output.metrics for order, output in again.outputs.items()}
    ended = [order for order, output in baseline.outputs.items() if output.finish_reason in ("stop", "length")]
    found: dict[str, Any] = {"completions": len(ended), "step_time_error": baseline.times.error}
    for name in ("ttft", "tpot"):
        recorded = {order: getattr(baseline.outputs[order].metrics, name) for order in ended}
        orders = [order for order, seconds in recorded.items() if seconds is not None]
        real = np.array([recorded[order] for order in orders], float)
        found[name] = {"recorded": _figures(real)}
        for side, metrics in sides.items():
            ours = np.array([getattr(metrics[order], name) for order in orders], float)
            found[name][side] = _figures(ours) | _agreement(ours, real)
    return found


def _figures(values: np.ndarray) -> dict[str, float]:
    return {name: float(how(values)) for name, how in _FIGURES.items()} if len(values) else {}


def _agreement(ours: np.ndarray, real: np.ndarray) -> dict[str, float | None]:
    if len(real) == 0 or not real.mean():
        return {"bias": None, "correlation": None}
    varies = len(real) > 1 and bool(real.std()) and bool(ours.std())
    correlation = float(np.corrcoef(ours, real)[0, 1]) if varies else None
    return {"bias": float((ours - real).mean() / real.mean()), "correlation": correlation}


def accuracy_table(found: dict[str, Any]) -> str:
    """Return the result of `simulate_incident` as a table."""
    rows: list[tuple[str, ...]] = [("", "recorded", "measured steps", "off by", "predicted steps", "off by")]
    for name in ("ttft", "tpot"):
        recorded = found[name]["recorded"]
        for figure, real in recorded.items():
            cells = [f"{1e3 * real:,.2f} ms"]
            for side in _SIDES:
                ours = found[name][side][figure]
                cells += [f"{1e3 * ours:,.2f} ms", f"{ours / real - 1:+.1%}" if real else "-"]
            rows.append((f"{name.upper()} {figure}", *cells))
        if recorded:
            cells = [""]
            for side in _SIDES:
                correlation = found[name][side]["correlation"]
                cells += ["-" if correlation is None else f"{correlation:.4f}", ""]
            rows.append((f"{name.upper()} correlation", *cells))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            f"{cell:>{width}}" if i else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    error = found["step_time_error"]
    told = "" if error is None else f"; predictions of its steps are off by {error:.1%} of their time"
    return "\n".join([f"simulated from the first step on: {found['completions']:,} completions{told}", *lines])
