"""Grids of settings, each point of which is computed in a process of its own."""

import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_POINTS = 10_000


def parse_grid(text: str, known: Mapping[str, Callable[[str], Any]]) -> dict[str, list[Any]]:
    """Parse `NAME=VALUE,VALUE,NAME=VALUE`: a comma comes between values, and between names.

    Args:
      known: names, and what makes their values from text; it raises ValueError for what is none.

    Raises:
      ValueError: the text has another form, a name is unknown or comes twice, a value is none, or there are too many.
    """
    grid: dict[str, list[Any]] = {}
    name = ""
    for part in text.split(","):
        before, equals, value = part.strip().partition("=")
        if equals:
            name = before.strip().replace("-", "_")
            if name not in known:
                raise ValueError(f"must name {', '.join(known)}, got {before.strip()!r}")
            if name in grid:
                raise ValueError(f"has {name} twice")
            grid[name] = []
        elif name:
            value = part.strip()
        else:
            raise ValueError(f"must be NAME=VALUE,VALUE,NAME=VALUE, got {text!r}")
        try:
            grid[name].append(known[name](value.strip()))
        except ValueError:
            raise ValueError(f"has {value.strip()!r} for {name}") from None
    size = 1
    for values in grid.values():
        size *= len(values)
    if size > MAX_POINTS:
        raise ValueError(f"has {size:,} points, more than {MAX_POINTS:,}")
    return grid


def points(grid: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Every combination of values, the last name's changing first."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def run_in_processes(function: Callable[[Any], Any], arguments: list[Any], jobs: int) -> Iterator[tuple[int, Any]]:
    """Call a function with each argument, in processes: yield (index of the argument, result) as these come.

    Args:
      function: of a module, with one argument; both it and its results are pickled. With one job it runs here.
      jobs: processes.
    """
    if jobs <= 1 or len(arguments) <= 1:
        yield from ((index, function(argument)) for index, argument in enumerate(arguments))
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(arguments))) as pool:
        yield from pool.imap_unordered(_call, [(function, index, argument) for index, argument in enumerate(arguments)])


def _call(task: tuple[Callable[[Any], Any], int, Any]) -> tuple[int, Any]:
    function, index, argument = task
    return index, function(argument)
