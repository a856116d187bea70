"""Compares what happened with what would have happened: the first decision that differs, and how requests fared."""

from collections.abc import Callable
from typing import Any

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
    """How the requests fared that had ended by themselves, as plain data.

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
