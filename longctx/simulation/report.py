"""What a served workload came to: figures, a table of them, JSON and plots."""

import dataclasses
import importlib.util
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

import numpy as np

from longctx.simulation.replay import Record

PERCENTILES = (50, 90, 99)


def summarize(record: Record) -> dict[str, Any]:
    """Figures of a record: counts of tokens, tokens per second, percentiles of TTFT and TPOT in seconds."""
    metrics = [served.metrics for served in record.served]
    output_tokens = sum(m.output_tokens for m in metrics)
    prompt_tokens = sum(m.prompt_tokens for m in metrics)
    return {
        "requests": len(metrics),
        "seconds": record.seconds,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(m.cached_tokens for m in metrics),
        "output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / record.seconds,
        "tokens_per_second": (prompt_tokens + output_tokens) / record.seconds,
        "ttft": percentiles([served.ttft for served in record.served]),
        "tpot": percentiles([served.tpot for served in record.served if served.tpot is not None]),
        "engine": None if record.stats is None else dataclasses.asdict(record.stats),
    }


def percentiles(values: List[float]) -> dict[str, float] | None:
    """Of `PERCENTILES`; None without values."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES).tolist()
    return {f"p{p}": value for p, value in zip(PERCENTILES, found, strict=True)}


def table(summary: dict[str, Any]) -> str:
    """A summary as lines of text."""
    prompt, cached = summary["prompt_tokens"], summary["cached_tokens"]
    rows = [
        ("requests", f"{summary['requests']:,} in {summary['seconds']:.2f} s"),
        ("prompt tokens", f"{prompt:,}, of which {cached:,} ({cached / prompt:.1%}) found in the cache"),
        ("output tokens", f"{summary['output_tokens']:,}"),
        ("output tokens/s", f"{summary['output_tokens_per_second']:,.1f}"),
        ("all tokens/s", f"{summary['tokens_per_second']:,.1f}"),
    ]
    for name in ("ttft", "tpot"):
        found = summary[name]
        told = "-" if found is None else "  ".join(f"{p} {1e3 * value:,.1f} ms" for p, value in found.items())
        rows.append((name.upper(), told))
    if summary["engine"] is not None:
        engine = summary["engine"]
        counts = ("steps", "preemptions", "pages_evicted", "pages_cached")
        rows.append(("engine", "  ".join(f"{engine[name]:,} {name.replace('_', ' ')}" for name in counts)))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def details(record: Record) -> dict[str, Any]:
    """Every request, and running and waiting requests after every step, for JSON; times in seconds."""
    requests = [
        {
            "due": served.due,
            "ttft": served.ttft,
            "tpot": served.tpot,
            "prompt_tokens": served.metrics.prompt_tokens,
            "cached_tokens": served.metrics.cached_tokens,
            "output_tokens": served.metrics.output_tokens,
            "preemptions": served.metrics.preemptions,
        }
        for served in record.served
    ]
    seconds, running, waiting = (list(x) for x in zip(*record.timeline, strict=True))
    return {"requests": requests, "timeline": {"seconds": seconds, "running": running, "waiting": waiting}}


def check_can_plot(path: Path) -> None:
    """Raises ValueError if `plot` could not write there."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"must end in .png or .svg, got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("needs matplotlib, which is not installed: pip install 'longctx-jax[docs]'")


def plot(record: Record, path: Path) -> None:
    """TTFT and TPOT as cumulative distributions, and running and waiting requests over time, as PNG or SVG."""
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    ttft_axes, tpot_axes, time_axes = figure.subplots(1, 3)
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
    for axes in (ttft_axes, tpot_axes, time_axes):
        axes.grid(alpha=0.3)
    figure.savefig(path)
