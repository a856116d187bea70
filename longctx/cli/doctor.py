"""`longctx doctor`: check the files of a checkpoint."""

import argparse

from longctx.cli.terminal import FAILED, Console
from longctx.models import resolve_model, verify


def run(options: argparse.Namespace) -> int:
    console = Console(options.quiet)
    model = resolve_model(options.model, options.quiet)
    with console.bar(desc="reading", unit="tensor", leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        problems = verify(model, progress)
    for problem in problems:
        print(problem.encode("utf-8", "backslashreplace").decode())  # names of files may hold anything
    console.note(f"{len(problems) or 'no'} problem{'s' * (len(problems) != 1)} in {model}")
    return FAILED if problems else 0
