"""Compute the papers' figures, and write files and pages: `python -m papers.figures --out DIR`."""

import argparse
import os
import sys
from itertools import groupby
from pathlib import Path

from longctx import plotting
from papers.figures.compute import Task, compute_all, estimate
from papers.figures.figure import Inputs
from papers.figures.pages import count, write_pages
from papers.figures.registry import PAPERS, Registered, registered
from papers.figures.results import Result, read_result


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 1 if a figure had an error, 2 if an argument is wrong."""
    options = _parse(arguments)
    try:
        inputs = Inputs(options.seed, options.data, options.quick)
        figures = registered(options.only)
        if options.jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {options.jobs}")
        options.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    if not plotting.can_draw():
        print("figures: nothing is drawn: matplotlib is not installed", file=sys.stderr)
    modules = [list(group) for _, group in groupby(sorted(figures, key=_module), key=_module)]
    tasks = [Task(group, inputs, options.out, options.png) for group in modules]
    if tasks and not options.quick:
        print(estimate(tasks, options.jobs), file=sys.stderr)
    done = compute_all(tasks, options.jobs) if tasks else []
    results: dict[str, list[Result]] = {paper: [] for paper in PAPERS}
    for figure in registered():
        result = read_result(figure, options.out)
        if result is not None:
            results[figure.paper].append(result)
    write_pages(results, options.out)
    for each in done:
        if each.error is not None:
            print(f"figures: {each.name} failed:\n{each.error}", file=sys.stderr)
    print("the longest: " + ", ".join(f"{each.name} {each.seconds:.1f} s" for each in done[:5]), file=sys.stderr)
    statements = [(r.name, s) for found in results.values() for r in found for s in r.statements]
    for name, statement in statements:
        if not statement.is_near and not statement.why:
            print(f"figures: {name} does not say why it differs: {statement.text}", file=sys.stderr)
    print(count([statement for _, statement in statements]))
    return 1 if any(each.error for each in done) else 0


def _module(figure: Registered) -> tuple[str, str]:
    return figure.paper, figure.module


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m papers.figures", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder to write into")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of workloads and measured times")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="a figure, module or paper; repeat it for more; others stay",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--quick", action="store_true", help="tiny workloads, to try the programs; values mean nothing")
    parser.add_argument("--png", action="store_true", help="PNG beside SVG")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
