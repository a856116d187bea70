"""The results of a sweep: a table, a CSV file, and one HTML page that needs nothing else."""

import csv
from collections.abc import Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

from longctx.plotting import can_draw
from longctx.simulation.reports import html_page
from longctx.simulation.reports.deployment_plots import write_sweep_drawing

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


def sweep_table(rows: List[Mapping[str, Any]], names: List[str]) -> str:
    """A table of text: what was swept, and what was found or why nothing was; times in seconds.

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
    sections = [html_page.Section("Points, times in seconds", html_page.table(columns, shown))]
    if can_draw() and any("summary" in row for row in rows):
        sections.append(html_page.Section("Drawings", html_page.svg(write_sweep_drawing(rows, names, folder))))
    title = f"Sweep of {', '.join(names)}, in virtual time"
    (folder / "report.html").write_text(html_page.page(title, sections), encoding="utf-8")


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
