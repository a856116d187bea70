"""What the host does in a step: `python -m benchmarks.host_overhead [--only ROW ...]`, as one table in markdown.

Scheduler, batch assembly and the handling of results are the ones that serve (`benchmarks.host_cases`); only the
device's step is left out. Pages are of 64 tokens. Times are of the thread's own, in microseconds a step, medians; all
cases of a row take turns. p10 is the least disturbed: who shares the machine also shares its caches.

`decode`: 128 decodes on one rank. Every request really has its pages (156,250 entries at 10M tokens), their keys and
reference counts, distinct from those of all others; prompts are zeros that nobody looks at. `mixed`: 127 decodes, and
the rows that are left of 512 for a chunk of the last one's prompt. Of the others only planning is measured.
`ranked-decodes`: 256 decodes over 8 context ranks. `ranked-prompts`: rows shared out among 256 prompts over 8 ranks, in
one step, where most fit (of 14 tokens) and where few do (of 600). `arrivals`: the step that admits 256 prompts of 14
tokens. `waiting`: 128 decodes, free slots, 2,900 who wait for memory. `prefix`: one waits for memory whose prefix is
found, of so many tokens.
"""

import argparse
import resource
import sys
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.host_cases import (
    Case,
    Parts,
    RankedArrivals,
    RankedPrompts,
    RunningHost,
    long_prefix,
    many_waiting,
    ranked_decodes,
)

# Steps of a round, and what makes the cases of a row, by a label each: of contexts, and how many steps they must last.
ROWS: dict[str, tuple[int, Callable[[Sequence[int], int], dict[str, Case]]]] = {
    "decode": (50, lambda contexts, steps: {f"{n:,}": RunningHost(n, steps, False) for n in contexts}),
    "mixed": (50, lambda contexts, steps: {f"{n:,}": RunningHost(n, steps, True) for n in contexts}),
    "ranked-decodes": (50, lambda _, steps: {"1,000": ranked_decodes(steps)}),
    "ranked-prompts": (2, lambda _, steps: {f"{n:,}": RankedPrompts(n) for n in (14, 600)}),
    "arrivals": (1, lambda _, steps: {"14": RankedArrivals()}),
    "waiting": (20, lambda _, steps: {"1,000": many_waiting(steps)}),
    "prefix": (2, lambda _, steps: {f"{n:,}": long_prefix(n, steps) for n in (10**6, 10**7)}),
}


def measure(name: str, contexts: Sequence[int], rounds: int) -> None:
    """Prints the lines of a row."""
    steps, make = ROWS[name]
    cases = make(contexts, (rounds + 1) * steps)
    times: dict[str, list[Parts]] = {label: [] for label in cases}
    for index in range(rounds + 1):
        for label, case in cases.items():
            parts = [case.step() for _ in range(steps)]
            times[label] += parts if index else []  # the first warms up
    first = np.median([part.planning for part in next(iter(times.values()))])
    for label, parts in times.items():
        medians = np.median(parts, 0)
        both = [part.planning for part in parts]
        told = [f"{x:,.0f}" if np.isfinite(x) else "-" for x in medians]
        low, middle, high = np.percentile(both, (10, 50, 99))
        planning = f"{middle:,.0f} | {low:,.0f} | {high:,.0f} | {middle / first:.2f}x"
        case = cases[label]
        sent = f"{max(case.bytes_sent):,}" if isinstance(case, RunningHost) else "-"
        print(f"| {name} | {label} | {told[0]} | {told[1]} | {planning} | {told[2]} | {sent} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="of 1 to 50 steps, of each case")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1_000, 100_000, 1_000_000, 10_000_000], help="of decode and mixed"
    )
    parser.add_argument("--only", choices=ROWS, nargs="+", default=list(ROWS), help="some rows")
    options = parser.parse_args()
    print("| step | tokens | scheduler | assembly | both, median | p10 | p99 | ratio | results | bytes sent |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in options.only:
        measure(name, options.contexts, options.rounds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{options.rounds} rounds, peak memory {peak:.1f} GiB", file=sys.stderr)


if __name__ == "__main__":
    main()
