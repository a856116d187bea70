"""Files of results: one HTML page that needs nothing else, of a simulated workload or of a sweep, and CSV files."""

import csv
import html
import itertools
import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

from longctx.simulation.record import Record, Served
from longctx.simulation.reports.plots import draw_sweep, write_drawings

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 76rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; }
.wide { overflow-x: auto; }
.drawing svg { display: block; width: 100%; min-width: 52rem; height: auto; background: #fff; border-radius: .4rem; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818; } pre { background: #242424; } th, td { border-color: #444; }
}
"""
_FOUND = (
    ("requests", "requests"),
    ("TTFT p50", "ttft.p50"),
    ("p90", "ttft.p90"),
    ("p99", "ttft.p99"),
    ("TPOT p50", "tpot.p50"),
    ("p99", "tpot.p99"),
    ("in time", "in_time"),
    ("tokens/s", "tokens_per_second"),
    ("MFU", "usage.mfu"),
    ("MBU", "usage.mbu"),
    ("GPU-seconds", "usage.gpu_seconds"),
)


def write_report(contents: Mapping[str, Any], record: Record, summary: str, drawing: str | None, folder: Path) -> None:
    """Write `report.html`, `request_metrics.csv` and `summary.json` into a folder; OSError if that can't be.

    Args:
      contents: settings, and the `summary` of the record.
      summary: the same as text, as the command line prints it.
      drawing: an SVG; None: there is none.
    """
    write_request_metrics(record, folder / "request_metrics.csv")
    (folder / "summary.json").write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    sections = [("Summary", _text(summary))]
    sections += _drawings(drawing)
    slowest = sorted(record.served, key=lambda each: -each.ttft)[:20]
    columns = ["request", "due", "TTFT", "TPOT", "prompt tokens", "from the cache", "output tokens"]
    columns += ["preemptions", "in time"]
    rows = [
        (
            each.number,
            f"{each.due:.2f}",
            f"{each.ttft:.3f}",
            "-" if each.tpot is None else f"{each.tpot:.4f}",
            f"{each.metrics.prompt_tokens:,}",
            f"{each.metrics.cached_tokens:,}",
            f"{each.metrics.output_tokens:,}",
            each.metrics.preemptions,
            {None: "-", True: "yes", False: "no"}[each.kept_ttft],
        )
        for each in slowest
    ]
    sections.append(("Requests with the longest TTFT, seconds", _html_table(columns, rows)))
    settings = {name: value for name, value in contents.items() if name != "summary"}
    sections.append(("Settings", _text(json.dumps(settings, indent=1))))
    title = f"{contents['model']}, {contents['workload']}, in virtual time"
    (folder / "report.html").write_text(_page(title, sections), encoding="utf-8")


def write_request_metrics(record: Record, path: Path) -> None:
    """Write the requests that have ended, in the order in which they arrived.

    `decode_time_execution_plus_preemption_normalized` is the time from the first token to the last over the others than
    the first, which is TPOT; Vidur divides by all of them.

    Raises:
      OSError: the file can't be written.
    """
    served = sorted(record.served, key=lambda each: (each.due, each.number))
    delays = [None, *(after.due - before.due for before, after in itertools.pairwise(served))]
    rows = [_row(each, delay) for each, delay in zip(served, delays, strict=False)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def _row(served: Served, delay: float | None) -> dict[str, float | str | bool | None]:
    """Return Vidur's columns, so that its users' programs read the file, and ours from `request_arrived_at` on.

    Times are seconds; normalized ones are seconds a token: of the output, those of a prefill of the prompt.
    Source: microsoft/vidur, vidur/metrics/constants.py.
    """
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


def sweep_table(rows: List[Mapping[str, Any]], names: List[str]) -> str:
    """Format what was swept, and what was found or why nothing was, as a table; times in seconds.

    Args:
      rows: values by name, and `summary` or `error`, of each point.
    """
    columns, cells = _cells(rows, names)
    widths = [max(len(row[at]) for row in (columns, *cells) if at < len(row)) for at in range(len(columns))]
    errors = [row.get("error") for row in rows]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(columns, widths, strict=True)).rstrip()]
    for row, error in zip(cells, errors, strict=True):
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip()
        lines.append(line if error is None else f"{line}  {error}")
    return "\n".join(lines)


def write_sweep(rows: List[Mapping[str, Any]], names: List[str], folder: Path) -> None:
    """Write `sweep.csv`, `report.html`, and the drawing as SVG and PNG, into a folder; OSError if that can't be."""
    with (folder / "sweep.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*names, *(path for _, path in _columns(rows)), "error"])
        for row in rows:
            values = [_find(row.get("summary"), path) for _, path in _columns(rows)]
            writer.writerow([*(row[name] for name in names), *values, row.get("error", "")])
    columns, cells = _cells(rows, names)
    shown = [(*line, row.get("error", "")) for line, row in zip(cells, rows, strict=True)]
    sections = [("Points, times in seconds", _html_table(columns, shown))]
    if any("summary" in row for row in rows):
        sections += _drawings(write_drawings(lambda: draw_sweep(rows, names), folder))
    title = f"Sweep of {', '.join(names)}, in virtual time"
    (folder / "report.html").write_text(_page(title, sections), encoding="utf-8")


def _columns(rows: List[Mapping[str, Any]]) -> list[tuple[str, str]]:
    has_capacity = any("capacity" in row.get("summary", {}) for row in rows)
    return [*([("capacity", "capacity")] if has_capacity else []), *_FOUND]


def _cells(rows: List[Mapping[str, Any]], names: List[str]) -> tuple[list[str], list[list[str]]]:
    """The head of a table, and its lines; those of errors end after what was swept."""
    columns = _columns(rows)
    cells = []
    for row in rows:
        line = [str(row[name]) for name in names]
        if "summary" in row:
            line += [_shown(path, _find(row["summary"], path)) for _, path in columns]
        cells.append(line)
    return [*names, *(name for name, _ in columns)], cells


def _find(summary: Mapping[str, Any] | None, path: str) -> Any:
    """A value by its path; None: there is none."""
    value: Any = summary
    for name in path.split("."):
        value = None if value is None else value.get(name)
    return value


def _shown(path: str, value: Any) -> str:
    if value is None:
        return "-"
    if path in ("in_time", "usage.mfu", "usage.mbu"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.3g}"


def _page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """Return a whole page of (title, HTML) sections."""
    parts = "\n".join(f"<h2>{html.escape(name)}</h2>\n{body}" for name, body in sections)
    head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
    head += f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n'
        f"<body>\n<h1>{html.escape(title)}</h1>\n{parts}\n</body>\n</html>\n"
    )


def _text(contents: str) -> str:
    return f"<pre>{html.escape(contents)}</pre>"


def _html_table(columns: List[str], rows: Iterable[List[object]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _drawings(svg: str | None) -> list[tuple[str, str]]:
    """Return a section with an SVG document, without XML's declaration and its document type; none without one."""
    if svg is None:
        return []
    return [("Drawings", f'<div class="wide drawing">\n{svg[svg.index("<svg") :].strip()}\n</div>')]
