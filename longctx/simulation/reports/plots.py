"""Plots of a served workload, with matplotlib (extra `plot`), which is imported only to draw."""

from collections.abc import Sequence as List
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx import extras
from longctx.plotting import COLORS, drawing, save, style
from longctx.serving.engine.metrics import StepMetrics
from longctx.simulation.record import Record
from longctx.simulation.reports.report import PROMISES, idle_shares, summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDE = 100  # the largest latency over the smallest, from which on a logarithmic axis shows more
_POINTS = 4000  # of a curve: more are seen by nobody, and make large files


def thinned(values: List[Any]) -> List[Any]:
    """At most `_POINTS` of values, evenly, and the last one."""
    step = -(-len(values) // _POINTS)
    return values if step <= 1 else [*values[::step], values[-1]]


def check_can_plot(path: Path) -> None:
    """Check that `plot` can write to a path; ValueError if not, or if matplotlib is not installed."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"must end in .png or .svg, got {path}")
    extras.check("plot", "")


def plot(record: Record, path: Path) -> None:
    """Plot a record as PNG or SVG.

    The upper row shows cumulative distributions of TTFT and TPOT, and running and waiting requests over time. The lower
    row, if steps were recorded, shows prefill chunks over time, predicted over measured seconds of steps, and relative
    slack at admission and at the first token. With several context ranks a third row is the Gantt chart of their steps:
    when each of them computes, by prediction, and when it waits for slower ones.
    """
    with style():
        save(_draw(record), path)


def _draw(record: Record) -> "Figure":
    rows = 2 if record.steps else 1
    num_ranks = max((len(step.rank_seconds) for step in record.steps), default=1)
    heights = [3.6] * rows + ([1.2 + 0.3 * num_ranks] if num_ranks > 1 else [])
    figure, _ = drawing(0, 12, sum(heights))
    grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
    axes = [[figure.add_subplot(grid[row, column]) for column in range(3)] for row in range(rows)]
    plot_requests(record, *axes[0][:2])
    plot_timeline(record.timeline, axes[0][2])
    if record.steps:
        _plot_steps(record, *axes[1])
    if num_ranks > 1:
        plot_ranks(record.steps, figure.add_subplot(grid[rows, :]))
    summary = summarize(record)
    kept = [f"{summary[key]:.1%} {name}" for key, name in PROMISES if summary[key] is not None]
    figure.suptitle(", ".join(kept))
    return figure


def plot_requests(record: Record, ttft_axes: Any, tpot_axes: Any) -> None:
    """Draw cumulative distributions of TTFT and TPOT."""
    tpots = [served.tpot for served in record.served if served.tpot is not None]
    for axes, name, values in ((ttft_axes, "TTFT", [s.ttft for s in record.served]), (tpot_axes, "TPOT", tpots)):
        if values:
            axes.ecdf(values)
        is_wide = bool(values) and max(values) > _WIDE * max(min(values), 1e-9)
        axes.set(title=name, xlabel="seconds", ylabel="share of requests", xscale="log" if is_wide else "linear")


def plot_timeline(timeline: List[tuple[float, int, int]], axes: Any) -> None:
    """Draw running and waiting requests over time."""
    if timeline:
        seconds, running, waiting = zip(*thinned(timeline), strict=True)
        axes.step(seconds, running, where="post", label="running")
        axes.step(seconds, waiting, where="post", label="waiting")
        axes.legend()
    axes.set(title="Requests", xlabel="seconds", ylabel="requests")


def _plot_steps(record: Record, chunk_axes: Any, step_axes: Any, slack_axes: Any) -> None:
    start = record.steps[0].finished - record.steps[0].seconds
    plot_chunks([(step.finished - start, count) for step in record.steps for _, count in step.chunks], chunk_axes)
    steps = [step for step in record.steps if step.is_exact] or record.steps
    predicted, measured = ([getattr(step, name) for step in steps] for name in ("predicted", "seconds"))
    step_axes.plot(measured, predicted, ".", markersize=3)
    ends = min(*predicted, *measured), max(*predicted, *measured)
    step_axes.plot(ends, ends, color="grey", linewidth=1)
    step_axes.set(title="Steps", xlabel="seconds, measured", ylabel="seconds, predicted", xscale="log", yscale="log")
    plot_slack(record, start, slack_axes)


def plot_chunks(chunks: List[tuple[float, int]], axes: Any) -> None:
    """Draw chunks of prompts, (seconds, tokens), over time."""
    if chunks:
        axes.plot(*zip(*chunks, strict=True), ".", markersize=3, rasterized=len(chunks) > _POINTS // 2)
    axes.set(title="Chunks of prompts", xlabel="seconds", ylabel="tokens")


def plot_slack(record: Record, start: float, axes: Any) -> None:
    """Draw the relative slack of requests at their admission and with their first token; `start`: of the workload."""
    metrics = [served.metrics for served in record.served]
    admitted = [(m.admitted - start, m.slack) for m in metrics if m.admitted is not None and m.slack is not None]
    first = [
        (m.first_token - start, 1 - (m.first_token - m.arrival) / m.ttft_deadline)
        for m in metrics
        if m.first_token is not None and m.ttft_deadline is not None
    ]
    for values, marker, label in ((admitted, "o", "at admission"), (first, "x", "with the first token")):
        if values:
            axes.plot(*zip(*values, strict=True), marker, markersize=4, label=label, rasterized=len(values) > _POINTS)
    axes.axhline(0, color="grey", linewidth=1)
    axes.set(title="Relative slack", xlabel="seconds", ylabel="of the time to the deadline")
    if admitted or first:
        axes.legend()


def plot_ranks(steps: List[StepMetrics], axes: Any) -> None:
    """Draw the Gantt chart of context ranks: a bar for each step, as long as the rank computes in it, by prediction.

    A step is drawn where it ran, from its end back by its seconds. What is left of it the rank waits for slower ones.
    """
    steps = [step for step in steps if len(step.rank_seconds) > 1]
    start = min(step.finished - step.seconds for step in steps)
    spans = [(step.finished - step.seconds - start, step.seconds) for step in steps]
    edge = {"edgecolor": "white", "linewidth": 0.5 if len(steps) < 100 else 0}
    for rank in range(len(steps[0].rank_seconds)):
        busy = [(at, seconds * (1 - step.idle_share[rank])) for (at, seconds), step in zip(spans, steps, strict=True)]
        axes.broken_barh(spans, (rank - 0.4, 0.8), facecolor="0.85", **edge)
        axes.broken_barh(busy, (rank - 0.4, 0.8), facecolor=COLORS[rank % len(COLORS)], **edge)
    labels = [f"rank {rank}, {share:.0%} idle" for rank, share in enumerate(idle_shares(steps) or [])]
    axes.set(title="Ranks: compute, and wait (grey)", xlabel="seconds")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
