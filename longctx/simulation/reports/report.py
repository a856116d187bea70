"""Reports of a served workload: summary, table and JSON."""

import dataclasses
from collections.abc import Sequence as List
from typing import Any

import numpy as np

from longctx.serving.engine.metrics import StepMetrics
from longctx.simulation.record import Record

PERCENTILES = (50, 90, 99)
PROMISES = ("kept_ttft", "in time"), ("kept_tpot", "within their TPOT")


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
    kept = [f"{summary[key]:.1%} {name}" for key, name in PROMISES if summary[key] is not None]
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
