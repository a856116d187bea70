"""Compute the papers' figures, and write files and pages: `python -m longctx.simulation.figures --out DIR`."""

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from longctx.simulation.figures import style
from longctx.simulation.figures.figure import Inputs
from longctx.simulation.figures.pages import count, write_pages
from longctx.simulation.figures.registry import PAPERS, Registered, registered
from longctx.simulation.figures.results import Result, read_result, remove_result, write_figure


class Task(NamedTuple):
    """The figures of a module, which one process computes."""

    figures: list[Registered]
    inputs: Inputs
    out: Path
    png: bool


class Done(NamedTuple):
    """A computed figure: the seconds that it took, and its error, if it has one."""

    name: str
    seconds: float
    error: str | None


def compute(task: Task) -> list[Done]:
    """Compute figures and write their files; an error of one is kept, and leaves the others."""
    done = []
    for figure in task.figures:
        start, error = time.perf_counter(), None
        remove_result(figure, task.out)  # an earlier one is not to stand for one that failed
        try:
            write_figure(figure.compute(task.inputs), task.out, task.inputs.data is not None, task.png)
        except Exception:
            error = traceback.format_exc()
        done.append(Done(figure.name, time.perf_counter() - start, error))
    return done


def compute_all(tasks: list[Task], jobs: int) -> list[Done]:
    """Compute tasks in processes, with a progress bar of figures."""
    done: list[Done] = []
    total = sum(len(task.figures) for task in tasks)
    with (
        multiprocessing.get_context("spawn").Pool(min(jobs, len(tasks))) as pool,
        tqdm(total=total, desc="figures", unit="figure", file=sys.stderr, disable=None) as bar,
    ):
        for each in pool.imap_unordered(compute, tasks):
            done += each
            bar.update(len(each))
    return sorted(done, key=lambda each: -each.seconds)


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
    if not style.can_draw():
        print("figures: nothing is drawn: it needs matplotlib: pip install 'longctx-jax[docs]'", file=sys.stderr)
    modules = [list(group) for _, group in groupby(figures, key=lambda figure: (figure.paper, figure.module))]
    tasks = [Task(group, inputs, options.out, options.png) for group in modules]
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


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m longctx.simulation.figures", description=__doc__)
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
