"""`longctx replay`: replay what an engine recorded."""

import argparse
import dataclasses
import json
from typing import Any

from longctx.cli.commands import CHANGES
from longctx.cli.flags import naming, refuse
from longctx.cli.terminal import FAILED, Console, report_error
from longctx.serving.config import EngineConfig
from longctx.serving.recording.log import RecordedLog
from longctx.serving.scheduler.slo import Slo
from longctx.simulation.incident.alternative import Alternative
from longctx.simulation.incident.baseline import Baseline
from longctx.simulation.incident.compare import compare, comparison_table, describe_difference
from longctx.simulation.incident.explain import Span, explain
from longctx.simulation.incident.replayer import Differs, Replayer

_SLO = ("ttft_factor", "ttft_least", "tpot", "tpot_factor", "step_seconds")


def run(options: argparse.Namespace) -> int:
    if options.explain is not None:
        refuse(options, (*CHANGES, "slo"), "contradicts --explain")
    with naming({"key_file": "--record-key-file"}):
        log = RecordedLog(options.log, options.record_key_file)
    try:
        found = _replay(log, options) if options.explain is None else _explain(log, options.explain)
    except Differs as difference:
        return report_error(f"{log.directory}: {difference}", FAILED)
    if log.torn_bytes:
        Console(options.quiet).note(f"cut      {log.torn_bytes:,} bytes of an unfinished record at the end of the log")
    if options.json is not None:
        options.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return 0


def _replay(log: RecordedLog, options: argparse.Namespace) -> dict[str, Any]:
    baseline = Baseline(Replayer(log))
    baseline.run()
    found: dict[str, Any] = {
        "log": str(log.directory),
        "steps": len(baseline.decisions_until),
        "decisions": len(baseline.decisions),
        "completions": len(baseline.outputs),
        "end": baseline.replayer.end,
        "torn_bytes": log.torn_bytes,
    }
    counts = ", ".join(f"{found[name]:,} {name}" for name in ("steps", "decisions", "completions"))
    print(f"replayed {counts}: every decision is the same\nthe log  {found['end']}")
    header = log.header
    config, num_pages = _changed(log, options)
    if config != header.config or num_pages != header.num_pages:
        alternative = Alternative(log, baseline, config, num_pages)
        alternative.run()
        difference = alternative.difference
        print(describe_difference(log, baseline, alternative))
        found["first_difference"] = None
        if difference is not None:
            control = Alternative(log, baseline, header.config, header.num_pages, predicts_from=difference.number)
            control.run()
            comparison = compare(baseline, control, alternative)
            print(comparison_table(comparison))
            found |= {"comparison": comparison, "first_difference": difference.step}
        found["step_time_error"] = baseline.times.error
    return found


def _changed(log: RecordedLog, options: argparse.Namespace) -> tuple[EngineConfig, int]:
    """The settings to replay under."""
    config = log.header.config
    changes = {name: getattr(options, name) for name in CHANGES if getattr(options, name) is not None}
    num_pages = changes.pop("num_pages", log.header.num_pages)
    if num_pages < 1:
        raise ValueError(f"--num-pages must be at least 1, got {num_pages}")
    if options.slo is not None:
        changes["slo"] = _slo(config.slo, options.slo)
    if "token_budget" in changes:
        changes["buckets"] = None
    return dataclasses.replace(config, **changes), num_pages


def _slo(slo: Slo, text: str) -> Slo:
    changes: dict[str, float | None] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            changes[name] = None if (name, value) == ("tpot", "none") else float(value)
        except ValueError:
            raise ValueError(f"--slo must be NAME=X[,NAME=X], got {text!r}") from None
        if name not in _SLO:
            raise ValueError(f"--slo must name {', '.join(_SLO)}, got {name!r}")
    try:
        return dataclasses.replace(slo, **changes)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"--slo: {error}") from None


def _explain(log: RecordedLog, request_id: str) -> dict[str, Any]:
    spans = explain(log, request_id)
    for span in spans:
        print(_line(span))
    return {"log": str(log.directory), "request": request_id, "spans": [span._asdict() for span in spans]}


def _line(span: Span) -> str:
    steps = f"step {span.first}" if span.first == span.last else f"steps {span.first} to {span.last}"
    return f"{span.start:+10.3f} s  for {span.seconds:8.3f} s  {steps:<22} {span.cause}"
