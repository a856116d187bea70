"""Which prompts are prefilled together, on how many instances each: LoongServe's dynamic program."""

import math
from collections.abc import Callable
from typing import NamedTuple


class Group(NamedTuple):
    """Consecutive prompts, from `first` to before `stop`, that are prefilled in one batch on `degree` instances."""

    first: int
    stop: int
    degree: int


def plan_groups(
    seconds: Callable[[int, int, int], float], num_prompts: int, num_instances: int, max_degree: int
) -> list[Group] | None:
    """Divide prompts, in their order, and instances into groups, so that the sum of the prompts' seconds is least.

    Args:
      seconds: of a batch of the prompts from `first` to before `stop` on `degree` instances; infinite: they don't fit.

    Returns:
      The groups, in the prompts' order; they may leave instances over. None: the prompts don't fit.

    Source: LoongServe's batching of prefills (Wu et al., SOSP 2024), which minimises the summed input latency so.
    """
    # best[n][k]: the least sum of the first n prompts on k instances, and the last group.
    best: list[list[tuple[float, Group | None]]] = [[(0.0, None)] * (num_instances + 1)]
    for stop in range(1, num_prompts + 1):
        row: list[tuple[float, Group | None]] = [(math.inf, None)]
        for instances in range(1, num_instances + 1):
            least, chosen = row[-1]  # one instance less
            for degree in range(1, min(instances, max_degree) + 1):
                for first in range(stop):
                    before = best[first][instances - degree][0]
                    if before < least:
                        total = before + (stop - first) * seconds(first, stop, degree)
                        if total < least:
                            least, chosen = total, Group(first, stop, degree)
            row.append((least, chosen))
        best.append(row)
    groups, stop, left = [], num_prompts, num_instances
    while stop:
        group = best[stop][left][1]
        if group is None:
            return None
        groups.append(group)
        stop = group.first
        # The group may have been chosen with fewer instances, of which the rest of the sum was computed.
        left = next(k for k in range(group.degree, left + 1) if best[group.stop][k] == best[group.stop][left])
        left -= group.degree
    return groups[::-1]
