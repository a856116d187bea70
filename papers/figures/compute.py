"""Figures computed in processes, a module's in one. Apart from `__main__`, which spawned processes do not import."""

import multiprocessing
import sys
import time
import traceback
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from papers.figures.figure import Inputs
from papers.figures.registry import Registered, in_words, seconds_of
from papers.figures.results import remove_result, write_figure

_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left{postfix}"
_INTERVAL = 0.2  # seconds between looks at what is finished


class Task(NamedTuple):
    """The figures of a module, which one process computes."""

    figures: list[Registered]
    inputs: Inputs
    out: Path
    png: bool

    @property
    def seconds(self) -> float:
        """Seconds of a processor that it should take."""
        return seconds_of(self.figures)


class Done(NamedTuple):
    """A computed figure: the seconds that it took, and its error, if it has one."""

    name: str
    seconds: float
    error: str | None


_finished: "SimpleQueue[Registered] | None" = None


def _report_to(finished: "SimpleQueue[Registered]") -> None:
    """Let the process that starts this one know of each figure that is finished."""
    global _finished
    _finished = finished


def estimate(tasks: list[Task], jobs: int) -> str:
    """Say about how long tasks take: the seconds of a processor, and in processes at least those of the longest."""
    alone = sum(task.seconds for task in tasks)
    least = max(max(task.seconds for task in tasks), alone / jobs)
    count = sum(len(task.figures) for task in tasks)
    beside = f", {in_words(least)} or more in {min(jobs, len(tasks))} processes" if min(jobs, len(tasks)) > 1 else ""
    return f"{count} figure{'s' * (count > 1)}: about {in_words(alone)} of a processor{beside}"


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
        if _finished is not None:
            _finished.put(figure)
    return done


def compute_all(tasks: list[Task], jobs: int) -> list[Done]:
    """Compute tasks in processes, with a progress bar of the seconds that figures should take, and what is left."""
    context = multiprocessing.get_context("spawn")
    finished: SimpleQueue[Registered] = context.SimpleQueue()
    total = 1e-6 + sum(task.seconds for task in tasks)  # a sum of its parts may be larger by rounding
    shares = {task.figures[0].path: task.seconds / sum(each.seconds for each in task.figures) for task in tasks}
    with (
        context.Pool(min(jobs, len(tasks)), _report_to, (finished,)) as pool,
        tqdm(total=total, desc="figures", bar_format=_BAR, file=sys.stderr, disable=None) as bar,
    ):
        found = pool.map_async(compute, tasks, chunksize=1)
        while not found.ready() or not finished.empty():
            found.wait(_INTERVAL)
            while not finished.empty():
                figure = finished.get()
                bar.set_postfix_str(figure.name, refresh=False)
                bar.update(figure.seconds * shares[figure.path])
    return sorted((each for done in found.get() for each in done), key=lambda each: -each.seconds)
