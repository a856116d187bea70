"""`longctx doctor`: check this machine, or the files of a checkpoint."""

import argparse
import json

from longctx.cli.doctor_report import Report
from longctx.cli.terminal import FAILED, Console


def run(options: argparse.Namespace) -> int:
    return _check_machine(options) if options.model is None else _check_checkpoint(options)


def _check_machine(options: argparse.Namespace) -> int:
    from longctx.cli import doctor_jax, doctor_system

    report = Report()
    doctor_system.examine(report)
    doctor_jax.examine(report, Console(options.quiet))
    doctor_system.examine_extras(report)  # last of what is found, as it is long
    _print(report.to_json() if options.json else report.to_text())
    return FAILED if report.problems else 0


def _check_checkpoint(options: argparse.Namespace) -> int:
    from longctx.models import resolve_model, verify

    console = Console(options.quiet)
    model = resolve_model(options.model, options.quiet)
    with console.progress("reading", "tensor", leave=False) as progress:
        problems = verify(model, progress)
    if options.json:
        _print(json.dumps({"model": str(model), "problems": problems}, indent=2))
    else:
        for problem in problems:
            _print(problem)
    console.note(f"{len(problems) or 'no'} problem{'s' * (len(problems) != 1)} in {model}")
    return FAILED if problems else 0


def _print(text: str) -> None:
    print(text.encode("utf-8", "backslashreplace").decode())  # names of files may hold anything
