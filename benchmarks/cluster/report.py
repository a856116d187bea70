"""Tables in markdown."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_FIGURES = ("ttft", "ttft_p50", "ttft_p90", "ttft_p99", "tpot")


def tables(found: Mapping[str, Any]) -> str:
    """All that was measured."""
    told = [
        f"{found['requests']} requests in {found['seconds']:g} s; "
        f"{found['reusable']:.1%} of their prompts' tokens are in earlier prompts.\n"
    ]
    if "policies" in found:
        told += [_policies(found["policies"]), "", _parts(found["policies"]), ""]
        if any("simulated" in run for runs in found["policies"].values() for run in runs):
            told += [_simulated(found["policies"]), ""]
    for part in ("failures", "router"):
        if part in found:
            told += [_events(part, found[part]), ""]
    if "cost" in found:
        heads = ("router", "by itself, ms a second", "request, ms", "prompt of 2,000 tokens", "stream of 100 tokens")
        rows = [[arm, *(f"{1000 * seconds:.1f}" for seconds in cost.values())] for arm, cost in found["cost"].items()]
        told += [_table(heads, rows), ""]
    return "\n".join(told)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _median(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def _policies(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    heads = ("router", "TTFT mean, s", "P50", "P90", "P99", "TPOT mean", "hit rate", "router's CPU, s", "others, cores")
    rows = []
    for arm, runs in arms.items():
        if runs:
            seconds = [f"{_median(runs, name):.3f}" for name in _FIGURES]
            cpu = statistics.median(run["cpu"][arm] for run in runs)
            more = [f"{_median(runs, 'hit_rate'):.1%}", f"{cpu:.1f}", f"{_median(runs, 'others'):.2f}"]
            rows.append([arm, *seconds, *more])
    return _table(heads, rows)


def _parts(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    heads = ("router", "TTFT mean, ms", "queue", "prefill", "decode instance", "router, clients")
    rows = []
    for arm, runs in arms.items():
        if runs:
            parts = [statistics.median(run["parts"][name] for run in runs) for name in runs[0]["parts"]]
            rows.append([arm, *(f"{1000 * seconds:.0f}" for seconds in (_median(runs, "ttft"), *parts))])
    return _table(heads, rows)


def _simulated(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    heads = ("policy", "TTFT mean measured, s", "simulated", "error", "P50", "P90", "P99", "correlation", "hit rate")
    rows = []
    for arm, runs in arms.items():
        each = [run["simulated"] for run in runs if "simulated" in run]
        if each:
            means = [f"{_median(each, name):.3f}" for name in ("measured", "simulated")]
            errors = [f"{_median(each, name):+.1%}" for name in ("error", "error_p50", "error_p90", "error_p99")]
            more = [f"{_median(each, 'correlation'):.3f}", f"{_median(each, 'hit_rate'):.1%}"]
            rows.append([arm, *means, *errors, *more])
    return _table(heads, rows)


def _events(part: str, found: Mapping[str, Any]) -> str:
    events = "; ".join(
        f"{event['at']:.1f} s {event['who']} {event['what']}"
        + (f" ({event['requests']} requests there)" if "requests" in event else "")
        for event in found["events"]
    )
    wrong = [f"\n- WRONG: {sentence}" for sentence in found["wrong"]]
    return (
        f"{part}: {events}. {found['answered']} requests answered, {len(wrong)} wrong; "
        f"{found['retried']} were asked again by their clients; TTFT mean {found['ttft']:.3f} s, "
        f"P99 {found['ttft_p99']:.3f} s, longest gap in a stream {found['longest_gap']:.2f} s." + "".join(wrong)
    )
