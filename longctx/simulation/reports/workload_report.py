"""The files of a simulated workload: one HTML page that needs nothing else, and CSV files as Vidur writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longctx.simulation.record import Record
from longctx.simulation.reports import html_page
from longctx.simulation.reports.request_metrics import write_request_metrics


def write_report(contents: Mapping[str, Any], record: Record, summary: str, drawing: str | None, folder: Path) -> None:
    """Write `report.html`, `request_metrics.csv` and `summary.json` into a folder.

    Args:
      contents: settings, and the `summary` of the record.
      summary: the same as text, as the command line prints it.
      drawing: an SVG; None: there is none.

    Raises:
      OSError: a file can't be written.
    """
    write_request_metrics(record, folder / "request_metrics.csv")
    (folder / "summary.json").write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    sections = [html_page.Section("Summary", html_page.text(summary))]
    if drawing is not None:
        sections.append(html_page.Section("Drawings", html_page.svg(drawing)))
    slowest = sorted(record.served, key=lambda each: -each.ttft)[:20]
    columns = (
        "request",
        "due",
        "TTFT",
        "TPOT",
        "prompt tokens",
        "from the cache",
        "output tokens",
        "preemptions",
        "in time",
    )
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
    sections.append(html_page.Section("Requests with the longest TTFT, seconds", html_page.table(columns, rows)))
    settings = {name: value for name, value in contents.items() if name != "summary"}
    sections.append(html_page.Section("Settings", html_page.text(json.dumps(settings, indent=1))))
    title = f"{contents['model']}, {contents['workload']}, in virtual time"
    (folder / "report.html").write_text(html_page.page(title, sections), encoding="utf-8")
