"""Comparison of an incident with what other settings would have made of it."""

from typing import Any

from longctx.serving.recording.log import RecordedLog
from longctx.serving.request.output import Metrics
from longctx.serving.scheduler.batch import Batch
from longctx.simulation.incident.alternative import Alternative
from longctx.simulation.incident.baseline import Baseline
from longctx.simulation.incident.explain import names
from longctx.simulation.incident.replayer import Replayer
from longctx.simulation.reports.report import percentiles, share


def describe_difference(log: RecordedLog, baseline: Baseline, alternative: Alternative) -> str:
    """Describe the first decision that differs, as recorded and otherwise."""
    difference = alternative.difference
    if difference is None:
        return "no decision differs"
    error = baseline.times.error
    return (
        f"the first decision that differs is in step {difference.step}, at {difference.now - baseline.start:.6f} s\n"
        f"  recorded   {_describe_rows(_recorded_batch(log, difference.number, difference.step))}\n"
        f"  otherwise  {_describe_rows(difference.batch)}\n"
        "from there on, what steps take is predicted, not measured"
        + ("" if error is None else f"; predictions of the recorded steps are off by {error:.1%} of their time")
    )


def _recorded_batch(log: RecordedLog, number: int, step: int) -> Batch | None:
    """Return the batch that was planned as the one of such a number, if that was in this step."""
    planned = 0
    for moment in Replayer(log).run():
        if moment.number == step:
            return moment.plans[number - planned] if number - planned < len(moment.plans) else None
        planned += len(moment.plans)
    return None


def _describe_rows(batch: Batch | None) -> str:
    """Describe what a batch computes, by request."""
    if batch is None or not batch.chunks:
        return "nothing"
    parts = []
    decodes = [chunk.sequence for chunk in batch.chunks if chunk.decodes]
    if decodes:
        parts.append(f"{len(decodes)} decode{'s' * (len(decodes) > 1)} ({names(decodes)})")
    for chunk in batch.chunks:
        if not chunk.decodes:
            ranks = "" if chunk.ranks == (0,) else f" on ranks {', '.join(map(str, chunk.ranks))}"
            parts.append(f"{names([chunk.sequence])}: {chunk.num_tokens:,} tokens from {chunk.start:,}{ranks}")
    if batch.admitted:
        parts.append(f"admitted: {names(batch.admitted)}")
    return "; ".join(parts)


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
    """Return a comparison as a table; the change is between two predictions, so their common error is not in it."""
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
    lines = [f"{row[0]:<18}" + "".join(f"{cell:>16}" for cell in row[1:]) for row in rows]
    left_out = comparison["left_out"]
    title = f"{comparison['completions']:,} completions that ended by themselves"
    if left_out:
        title += f" ({left_out:,} others are left out, which did not otherwise)"
    return "\n".join([title, *lines])


def _cells(values: list[float | None], scale: float, unit: str, digits: int = 2) -> list[str]:
    """Return the values, and the change from the second to the third."""
    _, before, after = values
    shown = ["-" if x is None else f"{scale * x:,.{digits}f}{unit}" for x in values]
    change = "-" if before is None or after is None else f"{scale * (after - before):+,.{digits}f}{unit}"
    return [*shown, change]
