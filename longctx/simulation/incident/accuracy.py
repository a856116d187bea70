"""What a simulation is worth: an incident simulated from its first step on, beside what happened."""

from collections.abc import Callable
from typing import Any

import numpy as np

from longctx.serving.recording.reader import RecordedLog
from longctx.serving.request.output import Metrics
from longctx.simulation.incident.alternative import Alternative
from longctx.simulation.incident.baseline import Baseline

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
    """What `simulate_incident` found, as a table."""
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
