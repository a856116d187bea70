"""Figures computed in processes, a module's in one. Apart from `__main__`, which spawned processes do not import."""

import multiprocessing
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from papers.figures.figure import Inputs
from papers.figures.registry import Registered
from papers.figures.results import remove_result, write_figure


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
            write_figure(figure, figure.compute(task.inputs), task.out, task.inputs.data is not None, task.png)
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
