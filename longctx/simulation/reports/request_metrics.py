"""Requests of a record as CSV, with the columns of Vidur's `request_metrics.csv`, so that its users' programs read it.

Source: microsoft/vidur, vidur/metrics/constants.py (names) and vidur/metrics/README.md (meanings).
"""

import csv
from pathlib import Path

from longctx.simulation.record import Record, Served

COLUMNS = (
    "Request Id",
    "request_e2e_time",
    "request_e2e_time_normalized",
    "request_scheduling_delay",
    "request_execution_plus_preemption_time",
    "request_execution_plus_preemption_time_normalized",
    "prefill_e2e_time",
    "prefill_time_execution_plus_preemption",
    "prefill_time_execution_plus_preemption_normalized",
    "decode_time_execution_plus_preemption_normalized",
    "request_inter_arrival_delay",
    "request_num_tokens",
    "request_num_prefill_tokens",
    "request_num_decode_tokens",
    "request_pd_ratio",
    "request_num_restarts",
    # Ours.
    "request_arrived_at",
    "request_cached_tokens",
    "request_in_ttft",
    "request_in_tpot",
    "instance",
)
"""Times are seconds; normalized ones are seconds a token: of the output, those of a prefill of the prompt."""


def write_request_metrics(record: Record, path: Path) -> None:
    """Write the requests that have ended, in the order in which they arrived.

    `decode_time_execution_plus_preemption_normalized` is the time from the first token to the last over the others than
    the first, which is TPOT; Vidur divides by all of them.

    Raises:
      OSError: the file can't be written.
    """
    served = sorted(record.served, key=lambda each: (each.due, each.number))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        before = None
        for each in served:
            row = _row(each, None if before is None else each.due - before)
            writer.writerow({name: _cell(value) for name, value in row.items()})
            before = each.due


def _row(served: Served, delay: float | None) -> dict[str, float | str | bool | None]:
    metrics = served.metrics
    assert metrics.admitted is not None
    assert metrics.finished is not None
    assert metrics.first_token is not None
    # A request that is due while a step runs comes after it: what it waits for that is scheduling, too.
    start = metrics.first_token - served.ttft
    whole, waited = metrics.finished - start, metrics.admitted - start
    prefill = metrics.first_token - metrics.admitted
    prompt, output = metrics.prompt_tokens, metrics.output_tokens
    return {
        "Request Id": served.number,
        "request_e2e_time": whole,
        "request_e2e_time_normalized": whole / output,
        "request_scheduling_delay": waited,
        "request_execution_plus_preemption_time": whole - waited,
        "request_execution_plus_preemption_time_normalized": (whole - waited) / output,
        "prefill_e2e_time": served.ttft,
        "prefill_time_execution_plus_preemption": prefill,
        "prefill_time_execution_plus_preemption_normalized": prefill / prompt,
        "decode_time_execution_plus_preemption_normalized": served.tpot,
        "request_inter_arrival_delay": delay,
        "request_num_tokens": prompt + output,
        "request_num_prefill_tokens": prompt,
        "request_num_decode_tokens": output,
        "request_pd_ratio": prompt / output,
        "request_num_restarts": metrics.preemptions,
        "request_arrived_at": served.due,
        "request_cached_tokens": metrics.cached_tokens,
        "request_in_ttft": served.kept_ttft,
        "request_in_tpot": metrics.kept_tpot,
        "instance": served.instance,
    }


def _cell(value: float | str | bool | None) -> str:
    if value is None:
        return ""
    return f"{value:.9g}" if isinstance(value, float) else str(value)
