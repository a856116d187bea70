"""Reports of a served workload: summary, table, JSON and plots."""

import dataclasses
import importlib.util
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

import numpy as np

from longctx.serving.engine.metrics import StepMetrics
from longctx.simulation.record import Record

PERCENTILES = (50, 90, 99)
_PROMISES = ("kept_ttft", "in time"), ("kept_tpot", "within their TPOT")


def summarize(record: Record) -> dict[str, Any]:
    """Summarize a record as plain data: token counts, tokens per second, percentiles of TTFT and TPOT in seconds."""
    metrics = [served.metrics for served in record.served]
    output_tokens = sum(m.output_tokens for m in metrics)
    prompt_tokens = sum(m.prompt_tokens for m in metrics)
    return {
        "requests": len(metrics),
        "failed": record.failed,
        "seconds": record.seconds,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(m.cached_tokens for m in metrics),
        "output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / max(record.seconds, 1e-9),
        "tokens_per_second": (prompt_tokens + output_tokens) / max(record.seconds, 1e-9),
        "ttft": percentiles([served.ttft for served in record.served]),
        "tpot": percentiles([served.tpot for served in record.served if served.tpot is not None]),
        "kept_ttft": share([served.kept_ttft for served in record.served]),
        "kept_tpot": share([served.metrics.kept_tpot for served in record.served]),
        "idle_share": idle_shares(record.steps),
        **_prediction_errors(record),
        "engine": None if record.stats is None else dataclasses.asdict(record.stats),
    }


def share(kept: List[bool | None]) -> float | None:
    """The share of promises that were kept, each True or False; None is no promise."""
    promised = [x for x in kept if x is not None]
    return sum(promised) / len(promised) if promised else None


def idle_shares(steps: List[StepMetrics]) -> list[float] | None:
    """The share of steps' seconds that each context rank waits for slower ones, by prediction; None: one rank."""
    steps = [step for step in steps if len(step.rank_seconds) > 1]
    if not steps:
        return None
    seconds = np.maximum([step.seconds for step in steps], 1e-12)
    shares: list[float] = np.average([step.idle_share for step in steps], axis=0, weights=seconds).tolist()
    return shares


def _prediction_errors(record: Record) -> dict[str, Any]:
    """|predicted / measured - 1| of the steps whose time is known: its mean, and weighted by their measured seconds."""
    known = [(step.predicted, step.seconds) for step in record.steps if step.is_exact and step.seconds > 0]
    if not known:
        return {"prediction_error": None, "prediction_error_by_time": None, "steps_measured": 0}
    predicted, measured = np.array(known).T
    errors = np.abs(predicted / measured - 1)
    return {
        "prediction_error": float(errors.mean()),
        "prediction_error_by_time": float(np.average(errors, weights=measured)),
        "steps_measured": len(known),
    }


def percentiles(values: List[float]) -> dict[str, float] | None:
    """The `PERCENTILES` of values, by name such as "p50"; None without values."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES).tolist()
    return {f"p{p}": value for p, value in zip(PERCENTILES, found, strict=True)}


def table(summary: dict[str, Any]) -> str:
    """Format a summary as a table."""
    prompt, cached = summary["prompt_tokens"], summary["cached_tokens"]
    rows = [
        ("requests", f"{summary['requests']:,} in {summary['seconds']:.2f} s"),
        ("prompt tokens", f"{prompt:,}, of which {cached:,} ({cached / max(prompt, 1):.1%}) found in the cache"),
        ("output tokens", f"{summary['output_tokens']:,}"),
        ("output tokens/s", f"{summary['output_tokens_per_second']:,.1f}"),
        ("all tokens/s", f"{summary['tokens_per_second']:,.1f}"),
    ]
    for name in ("ttft", "tpot"):
        found = summary[name]
        shown = "-" if found is None else "  ".join(f"{p} {1e3 * value:,.1f} ms" for p, value in found.items())
        rows.append((name.upper(), shown))
    kept = [f"{summary[key]:.1%} {name}" for key, name in _PROMISES if summary[key] is not None]
    rows.append(("promises", ", ".join(kept) or "-"))
    if summary["idle_share"] is not None:
        rows.append(("ranks wait", "  ".join(f"{share:.1%}" for share in summary["idle_share"])))
    if summary["prediction_error"] is not None:
        mean, by_time = summary["prediction_error"], summary["prediction_error_by_time"]
        shown = f"off by {mean:.1%} in the mean, {by_time:.1%} weighted by time"
        rows.append(("predictions", f"{shown}, of {summary['steps_measured']:,} steps whose time is known"))
    if summary["engine"] is not None:
        engine = summary["engine"]
        counts = ("steps", "preemptions", "pages_evicted", "pages_cached")
        rows.append(("engine", "  ".join(f"{engine[name]:,} {name.replace('_', ' ')}" for name in counts)))
    if summary["failed"]:
        rows.insert(1, ("failed requests", f"{summary['failed']:,}"))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def details(record: Record) -> dict[str, Any]:
    """Plain data of every request and step, and of running and waiting requests after each step; times in seconds."""
    requests = [
        {
            "due": served.due,
            "ttft": served.ttft,
            "tpot": served.tpot,
            "prompt_tokens": served.metrics.prompt_tokens,
            "cached_tokens": served.metrics.cached_tokens,
            "output_tokens": served.metrics.output_tokens,
            "preemptions": served.metrics.preemptions,
            "ttft_deadline": served.metrics.ttft_deadline,
            "tpot_target": served.metrics.tpot_target,
            "slack": served.metrics.slack,
            "longest_gap": served.metrics.longest_gap,
        }
        for served in record.served
    ]
    seconds, running, waiting = ([row[i] for row in record.timeline] for i in range(3))
    timeline = {"seconds": seconds, "running": running, "waiting": waiting}
    return {"requests": requests, "timeline": timeline, "steps": [step._asdict() for step in record.steps]}


def check_can_plot(path: Path) -> None:
    """Check that `plot` can write to a path; ValueError if not."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"must end in .png or .svg, got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("needs matplotlib, which is not installed: pip install 'longctx-jax[docs]'")


def plot(record: Record, path: Path) -> None:
    """Plot a record as PNG or SVG.

    The upper row shows cumulative distributions of TTFT and TPOT, and running and waiting requests over time. The lower
    row, if steps were recorded, shows prefill chunks over time, predicted over measured seconds of steps, and relative
    slack at admission and at the first token. With several context ranks a third row is the Gantt chart of their steps:
    when each of them computes, by prediction, and when it waits for slower ones.
    """
    from matplotlib.figure import Figure  # pyplot would need a display and keep global state

    rows = 2 if record.steps else 1
    num_ranks = max((len(step.rank_seconds) for step in record.steps), default=1)
    heights = [3.6] * rows + ([1.2 + 0.3 * num_ranks] if num_ranks > 1 else [])
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
    axes = [[figure.add_subplot(grid[row, column]) for column in range(3)] for row in range(rows)]
    _plot_requests(record, *axes[0])
    if record.steps:
        _plot_steps(record, *axes[1])
    if num_ranks > 1:
        plot_ranks(record.steps, figure.add_subplot(grid[rows, :]))
    for each in figure.axes:
        each.grid(alpha=0.3)
    summary = summarize(record)
    kept = [f"{summary[key]:.1%} {name}" for key, name in _PROMISES if summary[key] is not None]
    figure.suptitle(", ".join(kept))
    figure.savefig(path)


def _plot_requests(record: Record, ttft_axes: Any, tpot_axes: Any, time_axes: Any) -> None:
    tpots = [served.tpot for served in record.served if served.tpot is not None]
    for axes, name, values in ((ttft_axes, "TTFT", [s.ttft for s in record.served]), (tpot_axes, "TPOT", tpots)):
        if values:
            axes.ecdf(values)
        axes.set(title=name, xlabel="seconds", ylabel="share of requests")
    seconds, running, waiting = zip(*record.timeline, strict=True)
    time_axes.step(seconds, running, where="post", label="running")
    time_axes.step(seconds, waiting, where="post", label="waiting")
    time_axes.set(title="Requests", xlabel="seconds", ylabel="requests")
    time_axes.legend()


def _plot_steps(record: Record, chunk_axes: Any, step_axes: Any, slack_axes: Any) -> None:
    start = record.steps[0].finished - record.steps[0].seconds
    chunks = [(step.finished - start, count) for step in record.steps for _, count in step.chunks]
    if chunks:
        chunk_axes.plot(*zip(*chunks, strict=True), ".", markersize=3)
    chunk_axes.set(title="Chunks of prompts", xlabel="seconds", ylabel="tokens")
    steps = [step for step in record.steps if step.is_exact] or record.steps
    predicted, measured = ([getattr(step, name) for step in steps] for name in ("predicted", "seconds"))
    step_axes.plot(measured, predicted, ".", markersize=3)
    ends = min(*predicted, *measured), max(*predicted, *measured)
    step_axes.plot(ends, ends, color="grey", linewidth=1)
    step_axes.set(title="Steps", xlabel="seconds, measured", ylabel="seconds, predicted", xscale="log", yscale="log")
    metrics = [served.metrics for served in record.served]
    admitted = [(m.admitted - start, m.slack) for m in metrics if m.admitted is not None and m.slack is not None]
    first = [
        (m.first_token - start, 1 - (m.first_token - m.arrival) / m.ttft_deadline)
        for m in metrics
        if m.first_token is not None and m.ttft_deadline is not None
    ]
    for values, marker, label in ((admitted, "o", "at admission"), (first, "x", "with the first token")):
        if values:
            slack_axes.plot(*zip(*values, strict=True), marker, markersize=4, label=label)
    slack_axes.axhline(0, color="grey", linewidth=1)
    slack_axes.set(title="Relative slack", xlabel="seconds", ylabel="of the time to the deadline")
    slack_axes.legend()


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
        axes.broken_barh(busy, (rank - 0.4, 0.8), facecolor=f"C{rank % 10}", **edge)
    labels = [f"rank {rank}, {share:.0%} idle" for rank, share in enumerate(idle_shares(steps) or [])]
    axes.set(title="Ranks: compute, and wait (grey)", xlabel="seconds")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
