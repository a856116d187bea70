"""The files of a simulated workload: one HTML page that needs nothing else, and CSV files as Vidur writes them."""

import json
from collections.abc import Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

from longctx.plotting import can_draw
from longctx.simulation.record import Record
from longctx.simulation.reports import html_page
from longctx.simulation.reports.deployment_plots import deployment_svg
from longctx.simulation.reports.request_metrics import write_request_metrics
from longctx.simulation.reports.stage_trace import StageTrace
from longctx.simulation.reports.usage import deployment_table


def write_report(contents: Mapping[str, Any], record: Record, traces: List[StageTrace], folder: Path) -> None:
    """Write `report.html`, `request_metrics.csv` and `summary.json` into a folder.

    Args:
      contents: settings, and the `summary` of the record.
      traces: of each instance.

    Raises:
      OSError: a file can't be written.
    """
    write_request_metrics(record, folder / "request_metrics.csv")
    (folder / "summary.json").write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    sections = [html_page.Section("Summary", html_page.text(deployment_table(contents["summary"])))]
    if can_draw():
        sections.append(html_page.Section("Drawings", html_page.svg(deployment_svg(record, traces))))
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
