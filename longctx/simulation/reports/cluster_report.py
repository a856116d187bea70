"""Reports of simulated clusters: summary, table, JSON and drawing."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from longctx.plotting import drawing
from longctx.simulation.cluster.cluster_record import ClusterRecord
from longctx.simulation.reports.plots import thinned
from longctx.simulation.reports.report import percentiles, summarize, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def summarize_cluster(record: ClusterRecord, ttft: float, tpot: float) -> dict[str, Any]:
    """Summarize what came of a workload, as plain data: `report.summarize`, and further keys.

    `tbt`: percentiles of the mean of the longest tenth of a request's gaps. `goodput`: requests that completed within
    both SLOs, and their share of all that came. `rejected`: how many, by stage and by what forbade them. `open`: those
    that had not ended. `predicted_ttft`: percentiles of what was predicted, and the error
    of the mean. `loads`: mean and largest of both pools. `moved`: bytes and seconds waited for, by kind.

    Args:
      ttft, tpot: the SLOs, in seconds.
    """
    came = len(record.served) + len(record.rejected) + len(record.open)
    good = len(record.goodput(ttft, tpot))
    predicted = [each.assignment.ttft for each in record.placed]
    real = float(np.mean([each.ttft for each in record.served])) if record.served else 0.0
    return summarize(record) | {
        "prediction_error": None,  # a batch takes what is predicted, by construction
        "mean_ttft": real,
        "tbt": percentiles([each.tbt for each in record.placed if each.tbt is not None]),
        "goodput": {"requests": good, "share": good / max(1, came), "per_second": good / max(record.seconds, 1e-9)},
        "rejected": {
            "requests": len(record.rejected),
            "stages": dict(Counter(each.stage for each in record.rejected)),
            "bounds": dict(Counter(each.bound for each in record.rejected)),
        },
        "open": len(record.open),
        "deferred": record.num_deferred,
        "reassigned": record.num_reassigned,
        "predicted_ttft": percentiles(predicted),
        "predicted_ttft_error": float(np.mean(predicted)) / real - 1 if real else None,
        "loads": _loads(record),
        "moved": _moved(record),
    }


def cluster_table(summary: dict[str, Any]) -> str:
    """Format a summary of a cluster as a table."""

    def times(values: dict[str, float] | None) -> str:
        return "-" if values is None else "  ".join(f"{p} {1e3 * x:,.1f} ms" for p, x in values.items())

    good, rejected, error = summary["goodput"], summary["rejected"], summary["predicted_ttft_error"]
    rows = [
        ("TBT", f"{times(summary['tbt'])}, of the longest tenth of gaps"),
        (
            "goodput",
            f"{good['requests']:,} ({good['share']:.1%}) completed within the SLOs, {good['per_second']:.2f}/s",
        ),
        ("rejected", f"{rejected['requests']:,}" + "".join(f", {n:,} by {x}" for x, n in rejected["bounds"].items())),
        ("TTFT predicted", times(summary["predicted_ttft"]) + ("" if error is None else f", mean off by {error:+.1%}")),
    ]
    if summary["loads"] is not None:
        shown = (f"{name} {x['mean']:.2f}, at most {x['most']:.2f}" for name, x in summary["loads"].items())
        rows.append(("load", "; ".join(shown)))
    for kind, moved in summary["moved"].items():
        about = (
            f"{moved['count']:,}, {moved['bytes'] / 1e9:,.1f} GB, waited for {1e3 * moved['exposed']:.2f} ms on average"
        )
        rows.append((f"moved {kind}", about))
    for name in ("open", "deferred", "reassigned"):
        if summary[name]:
            rows.append((name, f"{summary[name]:,}"))
    return "\n".join([table(summary), *(f"{name:<17}{value}" for name, value in rows)])


def details(record: ClusterRecord) -> dict[str, Any]:
    """Every request, rejection, transfer, change of roles, and the loads, as plain data."""
    requests = []
    for served, placed in zip(record.served, record.placed, strict=True):
        metrics, assignment = served.metrics, placed.assignment._asdict()
        transfer = placed.assignment.transfer
        requests.append(
            {
                "number": served.number,
                "due": served.due,
                "ttft": served.ttft,
                "tpot": served.tpot,
                "tbt": placed.tbt,
                "prompt_tokens": metrics.prompt_tokens,
                "output_tokens": metrics.output_tokens,
                "cached_tokens": metrics.cached_tokens,
                "loaded_tokens": metrics.loaded_tokens,
                "assigned": placed.num_assigned,
                "assignment": assignment | {"transfer": None if transfer is None else transfer._asdict()},
            }
        )
    return {
        "requests": requests,
        "rejected": [each._asdict() for each in record.rejected],
        "open": [{"number": each.number, "due": each.due, "ttft": each.ttft} for each in record.open],
        "moved": [each._asdict() for each in record.moved],
        "loads": [each._asdict() for each in record.loads],
        "roles": [each._asdict() for each in record.roles],
    }


def draw_cluster(record: ClusterRecord, ttft: float, tpot: float) -> "Figure":
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


def _loads(record: ClusterRecord) -> dict[str, dict[str, float]] | None:
    if not record.loads:
        return None
    columns = {name: [getattr(each, name) for each in record.loads] for name in ("prefill", "decode")}
    return {name: {"mean": float(np.mean(x)), "most": max(x)} for name, x in columns.items()}


def _moved(record: ClusterRecord) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for kind in ("prefix", "pages"):
        own = [each for each in record.moved if each.kind == kind]
        if own:
            exposed = float(np.mean([each.exposed for each in own]))
            found[kind] = {"count": len(own), "bytes": sum(each.num_bytes for each in own), "exposed": exposed}
    return found
