"""Drawings of simulated deployments and of sweeps over them, with matplotlib (extra `plot`)."""

from collections.abc import Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.plotting import COLORS, MARKERS, drawing, save, save_both, style, to_svg
from longctx.simulation.record import Record, merge_timelines
from longctx.simulation.reports.plots import plot_chunks, plot_requests, plot_slack, plot_timeline
from longctx.simulation.reports.stage_trace import StageTrace, Tick

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWING = "drawing"  # name of the files in a folder of results
SWEPT = (("ttft", "TTFT"), ("tpot", "TPOT"))


def plot_deployment(record: Record, traces: List[StageTrace], path: Path) -> None:
    """Write a drawing of a workload in virtual time, as PNG or SVG, by the path's suffix.

    Rows of panels: distributions of TTFT and TPOT, requests over time; chunks, slack, pages by context rank; and Gantt
    charts of the first instance, of its stages and of its context ranks, if there are several.

    Args:
      traces: of each instance, at least one.
    """
    with style():
        save(_draw(record, traces), path)


def write_deployment(record: Record, traces: List[StageTrace], folder: Path) -> str:
    """Write the drawing of `plot_deployment` as `drawing.svg` and `drawing.png`; what the first has."""
    with style():
        figure = _draw(record, traces)
        save_both(figure, folder, DRAWING)
        return to_svg(figure)


def plot_sweep(rows: List[Mapping[str, Any]], names: List[str], path: Path) -> None:
    """Write a drawing of a sweep, see `write_sweep_drawing`, as PNG or SVG."""
    with style():
        save(_draw_sweep(rows, names), path)


def write_sweep_drawing(rows: List[Mapping[str, Any]], names: List[str], folder: Path) -> str:
    """Draw median (lines) and P99 (dashes) of TTFT and TPOT, and the share in time, over the last numeric name.

    It is written as `drawing.svg` and `drawing.png`.

    Args:
      rows: values by name, and `summary`, of each point.
      names: that are swept.

    Returns:
      What the SVG has.
    """
    with style():
        figure = _draw_sweep(rows, names)
        save_both(figure, folder, DRAWING)
        return to_svg(figure)


def _draw(record: Record, traces: List[StageTrace]) -> "Figure":
    first = traces[0]
    has_ranks = any(tick.ranks for tick in first.busiest)
    heights = [3.2, 3.2, 0.8 + 0.35 * first.num_stages, *([0.8 + 0.35 * first.num_ranks] * has_ranks)]
    figure, _ = drawing(0, 13.2, sum(heights))
    grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
    axes = [[figure.add_subplot(grid[row, column]) for column in range(3)] for row in range(2)]
    plot_requests(record, *axes[0][:2])
    timelines = [[(load.time, load.running, load.waiting) for load in trace.loads.values] for trace in traces]
    plot_timeline(merge_timelines(timelines), axes[0][2])
    plot_chunks([chunk for trace in traces for chunk in trace.chunks.values], axes[1][0])
    plot_slack(record, 0.0, axes[1][1])
    plot_pages(first, axes[1][2])
    if first.busiest:
        plot_stages(first, figure.add_subplot(grid[2, :]))
    if has_ranks:
        plot_rank_times(first, figure.add_subplot(grid[3, :]))
    return figure


def plot_stages(trace: StageTrace, axes: Any) -> None:
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
            axes.broken_barh(bars, (stage - 0.4, 0.8), facecolor=color, label=label if stage == 0 else None, **_EDGE)
    _finish_chart(ticks, f"Stages of the first instance, {len(ticks)} steps in its busiest time", axes)
    axes.set_yticks(range(trace.num_stages), [f"stage {stage}" for stage in range(trace.num_stages)])
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, ncols=2)


def plot_rank_times(trace: StageTrace, axes: Any) -> None:
    """Draw the Gantt chart of context ranks: when each computes in the first stage, by prediction; grey: it waits."""
    ticks = [tick for tick in trace.busiest if tick.ranks]
    for rank in range(trace.num_ranks):
        axes.broken_barh([(tick.start, tick.seconds) for tick in ticks], (rank - 0.4, 0.8), facecolor="0.88")
        bars = [(tick.start, min(tick.ranks[rank], tick.seconds)) for tick in ticks]
        axes.broken_barh(bars, (rank - 0.4, 0.8), facecolor=COLORS[rank % len(COLORS)], **_EDGE)
    _finish_chart(ticks, "Context ranks: compute, and wait (grey)", axes)
    axes.set_yticks(range(trace.num_ranks), [f"rank {rank}" for rank in range(trace.num_ranks)])


_EDGE = {"edgecolor": "white", "linewidth": 0.4}


def _finish_chart(ticks: List[Tick], title: str, axes: Any) -> None:
    axes.set(title=title, xlabel="seconds", xlim=(ticks[0].start, ticks[-1].start + ticks[-1].seconds))
    axes.invert_yaxis()
    axes.grid(visible=False)


def plot_pages(trace: StageTrace, axes: Any) -> None:
    """Draw the pages that sequences hold on each context rank, over time."""
    loads = trace.loads.values
    for rank in range(trace.num_ranks):
        held = [load.pages[rank] for load in loads]
        axes.step([load.time for load in loads], held, where="post", label=f"rank {rank}")
    axes.set(title="Pages held on each rank of the first instance", xlabel="seconds", ylabel="pages")
    if trace.num_ranks > 1:
        axes.legend()


def _draw_sweep(rows: List[Mapping[str, Any]], names: List[str]) -> "Figure":
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
        for panel, (name, _) in zip(axes, SWEPT, strict=False):
            known = [row for row in own if row["summary"][name] is not None]
            for quantile, line in (("p50", "-"), ("p99", "--")):
                values = [row["summary"][name][quantile] for row in known]
                shown = label if quantile == "p50" else None
                panel.plot([row[along] for row in known], values, line, label=shown, **look)
        known = [row for row in own if row["summary"].get(last) is not None]
        axes[2].plot([row[along] for row in known], [row["summary"][last] for row in known], label=label, **look)
    for panel, (_, title) in zip(axes, SWEPT, strict=False):
        panel.set(title=f"{title}, median and P99 (dashed)", xlabel=along, ylabel="seconds", yscale="log")
    axes[2].set(title=title_of[last][0], xlabel=along, ylabel=title_of[last][1])
    if others:
        axes[0].legend()
    return figure
