"""Summaries, tables and plain data of what was served, by an engine or in virtual time."""

import dataclasses
from collections import Counter
from collections.abc import Sequence as List
from typing import Any

import numpy as np

from longctx.serving.engine.metrics import StepMetrics
from longctx.simulation import utilization
from longctx.simulation.capacity import in_time, latency
from longctx.simulation.deployment import ClusterDeployment, Deployment
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


def summarize_deployment(record: Record, deployment: Deployment | ClusterDeployment) -> dict[str, Any]:
    """Summarize a run in virtual time as plain data: `summarize`, and further keys.

    `ttft`: of requests too that had not ended when the window closed; one without a first token counts with the seconds
    that it has waited. `e2e`: percentiles of seconds from when a request was due to its last token. `in_time`: share of
    requests that kept all they were promised; open ones whose first token was late, or is overdue, did not. `open`:
    requests that had not ended. `usage`: of the devices, see `usage`.

    Of a cluster also: `tbt`: percentiles of the mean of the longest tenth of a request's gaps. `goodput`: requests that
    completed within both SLOs, and their share of all that came. `rejected`: how many, by stage and by what forbade
    them. `predicted_ttft`: percentiles of what was predicted, and the error of the mean. `loads`: mean and largest of
    both pools. `moved`: bytes and seconds waited for, by kind.
    """
    kept = [in_time(served) for served in record.served]
    waited = [record.seconds - each.due if each.ttft is None else each.ttft for each in record.open]
    deadlines = [each.metrics.ttft_deadline for each in record.open]
    late = [False for ttft, most in zip(waited, deadlines, strict=True) if most is not None and ttft > most]
    summary = summarize(record) | {
        "prediction_error": None,  # a batch takes what is predicted, by construction
        "e2e": percentiles([value for served in record.served if (value := latency(served, "e2e")) is not None]),
        "ttft": percentiles([*(served.ttft for served in record.served), *waited]),
        "in_time": share([*kept, *late]),
        "open": len(record.open),
        "usage": usage(record, deployment),
    }
    if isinstance(deployment, ClusterDeployment):
        summary |= _conducted(record, deployment.config.ttft, deployment.config.tpot)
    return summary


def _conducted(record: Record, ttft: float, tpot: float) -> dict[str, Any]:
    """Summarize what a conductor decided, with the SLOs in seconds."""
    came = len(record.served) + len(record.rejected) + len(record.open)
    good = len(record.goodput(ttft, tpot))
    predicted = [each.assignment.ttft for each in record.placed]
    real = float(np.mean([each.ttft for each in record.served])) if record.served else 0.0
    moved = {kind: [each for each in record.moved if each.kind == kind] for kind in ("prefix", "pages")}
    return {
        "mean_ttft": real,
        "tbt": percentiles([each.tbt for each in record.placed if each.tbt is not None]),
        "goodput": {"requests": good, "share": good / max(1, came), "per_second": good / max(record.seconds, 1e-9)},
        "rejected": {
            "requests": len(record.rejected),
            "stages": dict(Counter(each.stage for each in record.rejected)),
            "bounds": dict(Counter(each.bound for each in record.rejected)),
        },
        "deferred": record.num_deferred,
        "reassigned": record.num_reassigned,
        "predicted_ttft": percentiles(predicted),
        "predicted_ttft_error": float(np.mean(predicted)) / real - 1 if real else None,
        "loads": {
            name: {"mean": float(np.mean(values)), "most": max(values)}
            for name in ("prefill", "decode")
            if (values := [getattr(each, name) for each in record.loads])
        },
        "moved": {
            kind: {
                "count": len(own),
                "bytes": sum(each.num_bytes for each in own),
                "exposed": float(np.mean([each.exposed for each in own])),
            }
            for kind, own in moved.items()
            if own
        },
    }


def usage(record: Record, deployment: Deployment | ClusterDeployment) -> dict[str, float]:
    """Compute the utilisation of the devices.

    `devices`: of all instances. `gpu_seconds`: of all devices, busy or not. `busy`: share of the seconds in which
    instances computed. `mfu`, `mbu`: shares of the data sheet's FLOP/s and memory bandwidth, over all seconds;
    `busy_mfu`, `busy_mbu`: while instances were busy. Causal pairs count once.
    """
    model, device, plan = deployment.model, deployment.topology.device, deployment.plan
    totals = record.totals
    found: dict[str, float] = {"devices": deployment.num_devices, "gpu_seconds": 0.0, "busy": 0.0}
    found |= {"mfu": 0.0, "mbu": 0.0, "busy_mfu": 0.0, "busy_mbu": 0.0}
    if record.seconds <= 0 or totals.busy <= 0:
        return found
    devices, seconds = deployment.num_devices, record.seconds
    found["gpu_seconds"] = utilization.gpu_seconds(seconds, devices)
    busy = sum(instance.totals.busy * instance.num_devices for instance in record.instances) / (seconds * devices)
    found["busy"] = busy
    found["mfu"] = utilization.mfu(model, totals, device, devices, seconds)
    # All bytes over the bandwidth of all devices.
    found["mbu"] = utilization.mbu(model, totals, device, plan, seconds * deployment.num_instances, deployment.kv_dtype)
    return found | {"busy_mfu": found["mfu"] / busy, "busy_mbu": found["mbu"] / busy}


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
    """Format what `summarize` or `summarize_deployment` returned as a table."""
    prompt, cached = summary["prompt_tokens"], summary["cached_tokens"]
    rows = [
        ("requests", f"{summary['requests']:,} in {summary['seconds']:.2f} s"),
        ("prompt tokens", f"{prompt:,}, of which {cached:,} ({cached / max(prompt, 1):.1%}) found in the cache"),
        ("output tokens", f"{summary['output_tokens']:,}"),
        ("output tokens/s", f"{summary['output_tokens_per_second']:,.1f}"),
        ("all tokens/s", f"{summary['tokens_per_second']:,.1f}"),
    ]
    rows += [(name.upper(), _milliseconds(summary[name])) for name in ("ttft", "tpot")]
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
    if "errors" in summary:
        rows += _http_rows(summary)
    if "usage" in summary:
        rows += _simulated_rows(summary)
    if "goodput" in summary:
        rows += _conducted_rows(summary)
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def _http_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [_end_to_end(summary["e2e"])]
    if summary["errors"]:
        rows.append(("errors", ", ".join(f"{count:,} {kind}" for kind, count in summary["errors"].items())))
    if summary["first_error"]:
        rows.append(("first error", summary["first_error"]))
    if summary["not_sent"]:
        rows.append(("not sent", f"{summary['not_sent']:,}, which follow requests that failed"))
    if summary["without_usage"]:
        rows.append(("without usage", f"{summary['without_usage']:,} answers, whose tokens are counted by chunks"))
    if summary["without_cached"]:
        rows.append(("cache unknown", f"{summary['without_cached']:,} answers do not say what was found in the cache"))
    return rows


def _end_to_end(ends: dict[str, float] | None) -> tuple[str, str]:
    return "end to end", "-" if ends is None else "  ".join(f"{p} {x:,.2f} s" for p, x in ends.items())


def _simulated_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    used = summary["usage"]
    rows = [
        _end_to_end(summary["e2e"]),
        ("SLO", "-" if summary["in_time"] is None else f"{summary['in_time']:.1%} of requests kept all promises"),
        ("devices", f"{used['devices']:,}, busy {used['busy']:.1%}; {used['gpu_seconds']:,.0f} GPU-seconds"),
        ("MFU", f"{used['mfu']:.1%}, while busy {used['busy_mfu']:.1%}"),
        ("MBU", f"{used['mbu']:.1%}, while busy {used['busy_mbu']:.1%}"),
    ]
    if summary["open"]:
        rows.insert(0, ("open requests", f"{summary['open']:,} had not ended when the window closed"))
    return rows


def _conducted_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    good, rejected, error = summary["goodput"], summary["rejected"], summary["predicted_ttft_error"]
    off = "" if error is None else f", mean off by {error:+.1%}"
    rows = [
        ("TBT", f"{_milliseconds(summary['tbt'])}, of the longest tenth of gaps"),
        (
            "goodput",
            f"{good['requests']:,} ({good['share']:.1%}) completed within the SLOs, {good['per_second']:.2f}/s",
        ),
        ("rejected", f"{rejected['requests']:,}" + "".join(f", {n:,} by {x}" for x, n in rejected["bounds"].items())),
        ("TTFT predicted", _milliseconds(summary["predicted_ttft"]) + off),
    ]
    if summary["loads"]:
        shown = (f"{name} {x['mean']:.2f}, at most {x['most']:.2f}" for name, x in summary["loads"].items())
        rows.append(("load", "; ".join(shown)))
    for kind, moved in summary["moved"].items():
        waited = f"waited for {1e3 * moved['exposed']:.2f} ms on average"
        rows.append((f"moved {kind}", f"{moved['count']:,}, {moved['bytes'] / 1e9:,.1f} GB, {waited}"))
    return rows + [(name, f"{summary[name]:,}") for name in ("deferred", "reassigned") if summary[name]]


def _milliseconds(found: dict[str, float] | None) -> str:
    return "-" if found is None else "  ".join(f"{name} {1e3 * value:,.1f} ms" for name, value in found.items())


def details(record: Record) -> dict[str, Any]:
    """Plain data of all that a record has: requests, steps, running and waiting requests after each of them.

    Of a cluster also rejections, transfers, loads and changes of roles, and where each request was served. Times are
    seconds.
    """
    requests: list[dict[str, Any]] = [
        {
            "number": served.number,
            "due": served.due,
            "ttft": served.ttft,
            "tpot": served.tpot,
            "prompt_tokens": served.metrics.prompt_tokens,
            "cached_tokens": served.metrics.cached_tokens,
            "loaded_tokens": served.metrics.loaded_tokens,
            "output_tokens": served.metrics.output_tokens,
            "preemptions": served.metrics.preemptions,
            "ttft_deadline": served.metrics.ttft_deadline,
            "tpot_target": served.metrics.tpot_target,
            "slack": served.metrics.slack,
            "longest_gap": served.metrics.longest_gap,
        }
        for served in record.served
    ]
    for request, placed in zip(requests, record.placed, strict=False):
        assignment, transfer = placed.assignment._asdict(), placed.assignment.transfer
        assignment["transfer"] = None if transfer is None else transfer._asdict()
        request |= {"tbt": placed.tbt, "assigned": placed.num_assigned, "assignment": assignment}
    seconds, running, waiting = ([row[i] for row in record.timeline] for i in range(3))
    return {
        "requests": requests,
        "open": [{"number": each.number, "due": each.due, "ttft": each.ttft} for each in record.open],
        "timeline": {"seconds": seconds, "running": running, "waiting": waiting},
        "steps": [step._asdict() for step in record.steps],
    } | {name: [each._asdict() for each in getattr(record, name)] for name in ("rejected", "moved", "loads", "roles")}
