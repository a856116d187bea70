"""Drawings of served workloads, simulated deployments and sweeps, with matplotlib, which is imported only to draw."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx import extras
from longctx.plotting import COLORS, MARKERS, can_draw, drawing, save, save_both, style
from longctx.serving.engine.metrics import StepMetrics
from longctx.simulation.record import Record, merge_timelines
from longctx.simulation.reports.report import PROMISES, idle_shares, summarize
from longctx.simulation.reports.stage_trace import StageTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDE = 100  # the largest latency over the smallest, from which on a logarithmic axis shows more
_POINTS = 4000  # of a curve: no more can be told apart, and files stay small
_SWEPT = (("ttft", "TTFT"), ("tpot", "TPOT"))


def check_can_plot(path: Path) -> None:
    """Check that drawings can be written to a path; ValueError if not, or if matplotlib is not installed."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"must end in .png or .svg, got {path}")
    extras.check("plot", "")


def write_drawing(draw: Callable[[], "Figure"], path: Path) -> None:
    """Write what a function draws as PNG or SVG, by the path's suffix."""
    with style():
        save(draw(), path)


def write_drawings(draw: Callable[[], "Figure"], folder: Path) -> str | None:
    """Write what a function draws as `drawing.svg` and `drawing.png`; return the SVG, or None without matplotlib."""
    if not can_draw():
        return None
    with style():
        save_both(draw(), folder, "drawing")
    return (folder / "drawing.svg").read_text(encoding="utf-8")  # a layout may move when it is drawn again


def thinned(values: List[Any]) -> List[Any]:
    """Return at most `_POINTS` of values, evenly, and the last one."""
    step = -(-len(values) // _POINTS)
    return values if step <= 1 else [*values[::step], values[-1]]


def draw_record(record: Record) -> "Figure":
    """Draw what an engine served.

    The upper row shows cumulative distributions of TTFT and TPOT, and running and waiting requests over time. The lower
    row, if steps were recorded, shows prefill chunks over time, predicted over measured seconds of steps, and relative
    slack at admission and at the first token. With several context ranks a third row is the Gantt chart of their steps:
    when each of them computes, by prediction, and when it waits for slower ones.
    """
    rows = 2 if record.steps else 1
    num_ranks = max((len(step.rank_seconds) for step in record.steps), default=1)
    heights = [3.6] * rows + ([1.2 + 0.3 * num_ranks] if num_ranks > 1 else [])
    figure, _ = drawing(0, 12, sum(heights))
    grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
    axes = [[figure.add_subplot(grid[row, column]) for column in range(3)] for row in range(rows)]
    _plot_requests(record, *axes[0][:2])
    _plot_timeline(record.timeline, axes[0][2])
    if record.steps:
        _plot_steps(record, *axes[1])
    if num_ranks > 1:
        plot_ranks(record.steps, figure.add_subplot(grid[rows, :]))
    summary = summarize(record)
    kept = [f"{summary[key]:.1%} {name}" for key, name in PROMISES if summary[key] is not None]
    figure.suptitle(", ".join(kept))
    return figure


def draw_deployment(record: Record, traces: List[StageTrace]) -> "Figure":
    """Draw a workload in virtual time, of which there is a trace of each instance.

    Rows of panels: distributions of TTFT and TPOT, requests over time; chunks, slack, pages by context rank; and Gantt
    charts of the first instance, of its stages and of its context ranks, if there are several.
    """
    first = traces[0]
    has_ranks = any(tick.ranks for tick in first.busiest)
    heights = [3.2, 3.2, 0.8 + 0.35 * first.num_stages, *([0.8 + 0.35 * first.num_ranks] * has_ranks)]
    figure, _ = drawing(0, 13.2, sum(heights))
    grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
    axes = [[figure.add_subplot(grid[row, column]) for column in range(3)] for row in range(2)]
    _plot_requests(record, *axes[0][:2])
    timelines = [[(load.time, load.running, load.waiting) for load in trace.loads.values] for trace in traces]
    _plot_timeline(merge_timelines(timelines), axes[0][2])
    _plot_chunks([chunk for trace in traces for chunk in trace.chunks.values], axes[1][0])
    _plot_slack(record, 0.0, axes[1][1])
    _plot_pages(first, axes[1][2])
    if first.busiest:
        _plot_stages(first, figure.add_subplot(grid[2, :]))
    if has_ranks:
        ticks = [tick for tick in first.busiest if tick.ranks]
        busy = [[min(tick.ranks[rank], tick.seconds) for tick in ticks] for rank in range(first.num_ranks)]
        labels = [f"rank {rank}" for rank in range(first.num_ranks)]
        _plot_busy([(tick.start, tick.seconds) for tick in ticks], busy, labels, figure.add_subplot(grid[3, :]))
    return figure


def draw_cluster(record: Record, ttft: float, tpot: float) -> "Figure":
    """Draw TTFT and time between tokens beside their SLOs, in seconds; loads of the pools; and predicted TTFTs."""
    figure, _ = drawing(0, 10, 6.8)
    axes = list(figure.subplots(2, 2).flat)
    tpots = [each.tpot for each in record.served if each.tpot is not None]
    tbts = [each.tbt for each in record.placed if each.tbt is not None]
    for values, panel, label in (
        ([each.ttft for each in record.served], axes[0], None),
        (tpots, axes[1], "mean of a request"),
        (tbts, axes[1], "mean of its longest tenth"),
    ):
        if values:
            panel.ecdf(values, label=label)
    for panel, slo, title in ((axes[0], ttft, "TTFT"), (axes[1], tpot, "Time between tokens")):
        panel.axvline(slo, color="grey", linewidth=1, linestyle=":")
        panel.set(title=title, xlabel="seconds", ylabel="share of requests")
    axes[1].legend()
    points = thinned(record.loads)
    for name in ("prefill", "decode"):
        axes[2].plot([each.at for each in points], [getattr(each, name) for each in points], label=name)
    axes[2].axhline(1.0, color="grey", linewidth=1, linestyle=":")
    axes[2].set(title="Load of the pools", xlabel="seconds", ylabel="predicted over SLO")
    axes[2].legend()
    predicted = [each.assignment.ttft for each in record.placed]
    axes[3].plot([each.ttft for each in record.served], predicted, ".", markersize=2, rasterized=len(predicted) > 2000)
    if predicted:
        most = max(*predicted, *(each.ttft for each in record.served))
        axes[3].plot([0, most], [0, most], color="grey", linewidth=1)
    axes[3].set(title="TTFT as predicted", xlabel="seconds", ylabel="seconds, predicted")
    return figure


def draw_sweep(rows: List[Mapping[str, Any]], names: List[str]) -> "Figure":
    """Draw median (lines) and P99 (dashes) of TTFT and TPOT, and the share in time, over the last numeric name swept.

    Args:
      rows: values by name, and `summary`, of each point.
    """
    rows = [row for row in rows if "summary" in row]
    varied = [name for name in names if len({row[name] for row in rows}) > 1] or list(names)
    numeric = [name for name in varied if all(isinstance(row[name], int | float) for row in rows)]
    along = numeric[-1] if numeric else varied[-1]
    others = [name for name in varied if name != along]
    figure, axes = drawing(3)
    last = "capacity" if any("capacity" in row["summary"] for row in rows) else "in_time"
    title_of = {"capacity": ("Capacity", "requests/s"), "in_time": ("In time", "share of requests")}
    series: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        series.setdefault(tuple(row[name] for name in others), []).append(row)
    for number, (key, own) in enumerate(series.items()):
        label = ", ".join(f"{name} {value}" for name, value in zip(others, key, strict=True)) or None
        look = {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}
        for panel, (name, _) in zip(axes, _SWEPT, strict=False):
            known = [row for row in own if row["summary"][name] is not None]
            for quantile, line in (("p50", "-"), ("p99", "--")):
                values = [row["summary"][name][quantile] for row in known]
                shown = label if quantile == "p50" else None
                panel.plot([row[along] for row in known], values, line, label=shown, **look)
        known = [row for row in own if row["summary"].get(last) is not None]
        axes[2].plot([row[along] for row in known], [row["summary"][last] for row in known], label=label, **look)
    for panel, (_, title) in zip(axes, _SWEPT, strict=False):
        panel.set(title=f"{title}, median and P99 (dashed)", xlabel=along, ylabel="seconds", yscale="log")
    axes[2].set(title=title_of[last][0], xlabel=along, ylabel=title_of[last][1])
    if others:
        axes[0].legend()
    return figure


def _plot_requests(record: Record, ttft_axes: Any, tpot_axes: Any) -> None:
    """Draw cumulative distributions of TTFT and TPOT."""
    tpots = [served.tpot for served in record.served if served.tpot is not None]
    for axes, name, values in ((ttft_axes, "TTFT", [s.ttft for s in record.served]), (tpot_axes, "TPOT", tpots)):
        if values:
            axes.ecdf(values)
        is_wide = bool(values) and max(values) > _WIDE * max(min(values), 1e-9)
        axes.set(title=name, xlabel="seconds", ylabel="share of requests", xscale="log" if is_wide else "linear")


def _plot_timeline(timeline: List[tuple[float, int, int]], axes: Any) -> None:
    """Draw running and waiting requests over time."""
    if timeline:
        seconds, running, waiting = zip(*thinned(timeline), strict=True)
        axes.step(seconds, running, where="post", label="running")
        axes.step(seconds, waiting, where="post", label="waiting")
        axes.legend()
    axes.set(title="Requests", xlabel="seconds", ylabel="requests")


def _plot_steps(record: Record, chunk_axes: Any, step_axes: Any, slack_axes: Any) -> None:
    start = record.steps[0].finished - record.steps[0].seconds
    _plot_chunks([(step.finished - start, count) for step in record.steps for _, count in step.chunks], chunk_axes)
    steps = [step for step in record.steps if step.is_exact] or record.steps
    predicted, measured = ([getattr(step, name) for step in steps] for name in ("predicted", "seconds"))
    step_axes.plot(measured, predicted, ".", markersize=3)
    ends = min(*predicted, *measured), max(*predicted, *measured)
    step_axes.plot(ends, ends, color="grey", linewidth=1)
    step_axes.set(title="Steps", xlabel="seconds, measured", ylabel="seconds, predicted", xscale="log", yscale="log")
    _plot_slack(record, start, slack_axes)


def _plot_chunks(chunks: List[tuple[float, int]], axes: Any) -> None:
    """Draw chunks of prompts, (seconds, tokens), over time."""
    if chunks:
        axes.plot(*zip(*chunks, strict=True), ".", markersize=3, rasterized=len(chunks) > _POINTS // 2)
    axes.set(title="Chunks of prompts", xlabel="seconds", ylabel="tokens")


def _plot_slack(record: Record, start: float, axes: Any) -> None:
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
    ranks = range(len(steps[0].rank_seconds))
    busy = [[step.seconds * (1 - step.idle_share[rank]) for step in steps] for rank in ranks]
    labels = [f"rank {rank}, {share:.0%} idle" for rank, share in enumerate(idle_shares(steps) or [])]
    _plot_busy(spans, busy, labels, axes)


def _plot_busy(spans: List[tuple[float, float]], busy: List[List[float]], labels: List[str], axes: Any) -> None:
    """Draw (start, seconds) of steps in grey, and over them the seconds that each rank computes."""
    edge = {"edgecolor": "white", "linewidth": 0.5 if len(spans) < 200 else 0}
    for rank, seconds in enumerate(busy):
        bars = [(start, own) for (start, _), own in zip(spans, seconds, strict=True)]
        axes.broken_barh(spans, (rank - 0.4, 0.8), facecolor="0.88", **edge)
        axes.broken_barh(bars, (rank - 0.4, 0.8), facecolor=COLORS[rank % len(COLORS)], **edge)
    _finish_chart(spans, "Context ranks: compute, and wait (grey)", labels, axes)


def _plot_stages(trace: StageTrace, axes: Any) -> None:
    """Draw the Gantt chart of stages: bars of batches with prompts and of decodes alone; grey: waiting for a stage."""
    ticks = trace.busiest
    kinds = (("with prompts", COLORS[0]), ("decodes alone", COLORS[1]))
    for stage in range(trace.num_stages):
        spans = [(tick.start, tick.seconds, tick.stages[stage]) for tick in ticks]
        axes.broken_barh([(at, seconds) for at, seconds, _ in spans], (stage - 0.4, 0.8), facecolor="0.88")
        for (label, color), has_prompt in zip(kinds, (True, False), strict=True):
            bars = [
                (at, batch.seconds)
                for at, _, batch in spans
                if batch is not None and bool(batch.prompt_tokens) == has_prompt
            ]
            axes.broken_barh(
                bars,
                (stage - 0.4, 0.8),
                facecolor=color,
                label=label if stage == 0 else None,
                edgecolor="white",
                linewidth=0.4,
            )
    title = f"Stages of the first instance, {len(ticks)} steps in its busiest time"
    labels = [f"stage {stage}" for stage in range(trace.num_stages)]
    _finish_chart([(tick.start, tick.seconds) for tick in ticks], title, labels, axes)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, ncols=2)


def _finish_chart(spans: List[tuple[float, float]], title: str, labels: List[str], axes: Any) -> None:
    axes.set(title=title, xlabel="seconds", xlim=(spans[0][0], sum(spans[-1])))
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(visible=False)


def _plot_pages(trace: StageTrace, axes: Any) -> None:
    """Draw the pages that sequences hold on each context rank, over time."""
    loads = trace.loads.values
    for rank in range(trace.num_ranks):
        held = [load.pages[rank] for load in loads]
        axes.step([load.time for load in loads], held, where="post", label=f"rank {rank}")
    axes.set(title="Pages held on each rank of the first instance", xlabel="seconds", ylabel="pages")
    if trace.num_ranks > 1:
        axes.legend()
