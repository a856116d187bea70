"""What a simulated deployment was used for: summary and table of MFU, MBU, GPU-seconds, and requests in time."""

from typing import Any

from longctx.simulation import utilization
from longctx.simulation.deployment import Deployment
from longctx.simulation.record import Record
from longctx.simulation.reports.report import percentiles, share, summarize, table
from longctx.simulation.targets import in_time, latency


def summarize_deployment(record: Record, deployment: Deployment) -> dict[str, Any]:
    """Summarize what a deployment did, as plain data: `report.summarize`, and further keys.

    `ttft`: as `report.summarize` has it, and of requests that had not ended when the window closed too, which are those
    that wait longest: who had no first token then counts with the seconds so far, which is too little. `e2e`:
    percentiles of seconds from when a request was due to its last token. `in_time`: share of requests that kept all
    they were promised; open ones whose first token was late, or is overdue, did not. `open`: requests that had not
    ended. `usage`: of the devices, see `usage`.
    """
    kept = [in_time(served) for served in record.served]
    waited = [record.seconds - each.due if each.ttft is None else each.ttft for each in record.open]
    deadlines = [each.metrics.ttft_deadline for each in record.open]
    late = [False for ttft, most in zip(waited, deadlines, strict=True) if most is not None and ttft > most]
    return summarize(record) | {
        "prediction_error": None,  # a batch takes what is predicted, by construction
        "e2e": percentiles([value for served in record.served if (value := latency(served, "e2e")) is not None]),
        "ttft": percentiles([*(served.ttft for served in record.served), *waited]),
        "in_time": share([*kept, *late]),
        "open": len(record.open),
        "usage": usage(record, deployment),
    }


def usage(record: Record, deployment: Deployment) -> dict[str, float]:
    """What the devices did.

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
    found["mbu"] = utilization.mbu(
        model, totals, device, plan, seconds * deployment.instances, deployment.config.kv_dtype
    )
    return found | {"busy_mfu": found["mfu"] / busy, "busy_mbu": found["mbu"] / busy}


def deployment_table(summary: dict[str, Any]) -> str:
    """Format a summary of a deployment as a table."""
    used = summary["usage"]
    rows = [
        (
            "end to end",
            "-" if summary["e2e"] is None else "  ".join(f"{p} {x:,.2f} s" for p, x in summary["e2e"].items()),
        ),
        ("SLO", "-" if summary["in_time"] is None else f"{summary['in_time']:.1%} of requests kept all promises"),
        ("devices", f"{used['devices']:,}, busy {used['busy']:.1%}; {used['gpu_seconds']:,.0f} GPU-seconds"),
        ("MFU", f"{used['mfu']:.1%}, while busy {used['busy_mfu']:.1%}"),
        ("MBU", f"{used['mbu']:.1%}, while busy {used['busy_mbu']:.1%}"),
    ]
    if summary["open"]:
        rows.insert(0, ("open requests", f"{summary['open']:,} had not ended when the window closed"))
    width = max(len(line.partition("  ")[0]) for line in table(summary).splitlines()) + 2
    return "\n".join([table(summary), *(f"{name:<{max(width, 17)}}{value}" for name, value in rows)])
