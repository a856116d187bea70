"""`longctx doctor`: check this machine, or the files of a checkpoint."""

import argparse
import json
import os
import signal
import subprocess
import sys

from longctx.cli import doctor_system
from longctx.cli.doctor_report import MAX_CHARACTERS, Report
from longctx.cli.terminal import FAILED, Console

SECONDS = 180.0
"""Within which JAX has to answer; eight GPUs take some 20."""

_SHOW = "see all of it by python -c 'import jax; print(jax.devices())', and install jax and its plugin anew"
_XLA_FLAGS = "correct XLA_FLAGS, or unset it; this version of jaxlib may lack a flag that another has"
_PROGRAM = "import sys; sys.path[:] = {path!r}; from longctx.cli.doctor_probe import main; main()"


def run(options: argparse.Namespace) -> int:
    return _check_machine(options) if options.model is None else _check_checkpoint(options)


def _check_machine(options: argparse.Namespace) -> int:
    report = Report()
    doctor_system.examine(report)
    ask_jax(report, Console(options.quiet))
    doctor_system.examine_extras(report)  # last of what is found, as it is long
    _print(report.to_json() if options.json else report.to_text())
    return FAILED if report.problems else 0


def ask_jax(report: Report, console: Console, seconds: float = SECONDS) -> None:
    """Add devices, links and choices to a report, or the problem that prevents it.

    JAX is asked in a process of its own: a broken plugin may end a process, or never answer.
    """
    environment = dict(os.environ)
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others may use the GPUs
    program = [sys.executable, "-c", _PROGRAM.format(path=sys.path)]
    console.note("asking JAX for its devices")
    try:
        done = subprocess.run(program, capture_output=True, env=environment, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        report.problem(f"JAX does not answer within {seconds:g} s", "end other programs on the GPUs, check the driver")
        return
    except OSError as error:
        report.problem(f"{sys.executable} can't be run again: {error}", "check this Python")
        return
    try:
        report.add(json.loads(done.stdout.decode("utf-8", "replace").splitlines()[-1]))
    except (IndexError, KeyError, TypeError, ValueError):
        ending = _ending(done)
        remedy = _XLA_FLAGS if "XLA_FLAGS" in ending and os.environ.get("XLA_FLAGS") else _SHOW
        report.problem(f"JAX can't be loaded: {ending}", remedy)


def _ending(done: "subprocess.CompletedProcess[bytes]") -> str:
    """Describe how a process ended, and its last line."""
    status = done.returncode
    if status >= 0:
        how = f"exit status {status}"
    else:
        try:
            how = signal.Signals(-status).name
        except ValueError:
            how = f"signal {-status}"
    lines = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    return f"{how}: {lines[-1][:MAX_CHARACTERS]}" if lines else how


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
