"""`longctx replay`: replay what an engine recorded."""

import argparse
import dataclasses
import json
from typing import Any

from longctx.cli.commands import AXES, CHANGES
from longctx.cli.files import check_output
from longctx.cli.flags import flag, naming
from longctx.cli.terminal import FAILED, Console, report_error
from longctx.serving.config import EngineConfig
from longctx.serving.recording.reader import RecordedLog
from longctx.serving.scheduler.slo import Slo
from longctx.simulation.incident.alternative import Alternative
from longctx.simulation.incident.baseline import Baseline
from longctx.simulation.incident.compare import (
    accuracy_table,
    compare,
    comparison_table,
    describe_difference,
    simulate_incident,
)
from longctx.simulation.incident.explain import Explainer, Span
from longctx.simulation.incident.replayer import Differs, Replayer
from longctx.simulation.incident.text import describe_scheduler

_SLO = ("ttft_factor", "ttft_least", "tpot", "tpot_factor", "step_seconds")


def run(options: argparse.Namespace) -> int:
    _check(options)
    log = RecordedLog(options.log)
    console = Console(options.quiet)
    try:
        if options.model is not None:
            from longctx.cli.replay_model import replay_on_model

            return replay_on_model(log, options, console)
        found = _replay(log, options, console)
    except Differs as difference:
        return report_error(f"{log.directory}: {difference}", FAILED)
    if log.torn_bytes:
        console.note(f"cut      {log.torn_bytes:,} bytes of an unfinished record at the end of the log")
    if options.json is not None:
        options.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return 0


def _replay(log: RecordedLog, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    if options.until is not None:
        return _show_state(log, options.until)
    if options.explain is not None:
        return _explain(log, options.explain)
    baseline = Baseline(Replayer(log))
    baseline.run()
    found = _summarize(log, baseline)
    counts = ", ".join(f"{found[name]:,} {name}" for name in ("steps", "decisions", "completions"))
    print(f"replayed {counts}: every decision is the same\nthe log  {found['end']}")
    if options.accuracy:
        found["accuracy"] = simulate_incident(log, baseline)
        print(accuracy_table(found["accuracy"]))
        return found
    config, num_pages = _changed(log, options)
    if config != log.header.config or num_pages != log.header.num_pages:
        with naming((*CHANGES, "buckets")):
            alternative = Alternative(log, baseline, config, num_pages)
            alternative.run()
        difference = alternative.difference
        print(describe_difference(baseline, alternative, lambda **hooks: Replayer(log, **hooks)))
        found["first_difference"] = None
        if difference is not None:
            header = log.header
            control = Alternative(log, baseline, header.config, header.num_pages, predicts_from=difference.number)
            control.run()
            comparison = compare(baseline, control, alternative)
            print(comparison_table(comparison))
            found |= {"comparison": comparison, "first_difference": difference.step}
        found["step_time_error"] = baseline.times.error
    return found


def _summarize(log: RecordedLog, baseline: Baseline) -> dict[str, Any]:
    return {
        "log": str(log.directory),
        "steps": len(baseline.decisions_until),
        "decisions": len(baseline.decisions),
        "completions": len(baseline.outputs),
        "end": baseline.replayer.end,
        "torn_bytes": log.torn_bytes,
    }


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
    with naming((*CHANGES, "buckets")):
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


def _show_state(log: RecordedLog, until: int) -> dict[str, Any]:
    """Stop once a step is planned."""
    states: list[str] = []
    start: list[float] = []

    def look(batch: Any, now: float) -> None:
        if batch.index == until:
            states.append(describe_scheduler(replayer.engine.core.scheduler, batch, now, start[0]))

    replayer = Replayer(log, planned=look, begins=lambda now: start.append(now) if not start else None)
    for _ in replayer.run():
        if states:
            print(states[0])
            return {"log": str(log.directory), "step": until, "state": states[0]}
    raise ValueError(f"--until must be below {replayer.engine.core.scheduler.num_steps}, the log's steps, got {until}")


def _explain(log: RecordedLog, request: str) -> dict[str, Any]:
    request_id, slash, number = request.rpartition("/")
    if not (slash and number.isdecimal()):
        request_id, number = request, "0"
    explainer = Explainer(log, request_id, int(number))
    spans = explainer.run()
    sequence = explainer.sequence
    assert sequence is not None
    for span in spans:
        print(_line(span, sequence.arrival))
    return {
        "log": str(log.directory),
        "request": request,
        "arrival": sequence.arrival,
        "spans": [span._asdict() | {"cause": span.cause._asdict()} for span in spans],
    }


def _line(span: Span, arrival: float) -> str:
    steps = f"step {span.first}" if span.first == span.last else f"steps {span.first} to {span.last}"
    return f"{span.start - arrival:+10.3f} s  for {span.seconds:8.3f} s  {steps:<22} {span.cause.text}"


def _check(options: argparse.Namespace) -> None:
    if options.json is not None:
        check_output("--json", options.json)
    given = [name for name in AXES if getattr(options, name) is not None]
    if given and options.model is None:
        raise ValueError(f"{flag(given[0])} needs --model: tokens are computed on that plan")
    looks = [name for name in ("until", "explain", "model") if getattr(options, name) is not None]
    looks += ["accuracy"] * options.accuracy
    changes = [name for name in (*CHANGES, "slo") if getattr(options, name) is not None]
    if len(looks) + bool(changes) > 1:
        both = [*looks, *changes]
        raise ValueError(f"{flag(both[0])} and {flag(both[1])} can't be given together")
