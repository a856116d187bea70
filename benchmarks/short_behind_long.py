"""Short prompts among 5 % of long ones, in virtual time: `python -m benchmarks.short_behind_long [--data FOLDER]`.

Llama-3 8B on 16 A100 as Medha plans it (5.2), at 1.75 requests a second. Long prompts fill the memory, so the table
says what admission costs the short ones. Normalised TTFT is the time to the first token over that of the prompt alone.
Of requests without a first token in the window it counts how long they had waited when it closed.
"""

import argparse
from pathlib import Path

import numpy as np

from papers.figures.figure import Inputs
from papers.medha.runs import WINDOW, alone, serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="measured workloads; without, built-in mixes")
    parser.add_argument("--seconds", type=float, default=WINDOW, help="of the window")
    options = parser.parse_args()
    print("| normalised TTFT P50 / P90 | short: median TTFT | long: read | long: P99 waited | TPOT P50 |")
    print("|---|---|---|---|---|")
    found = serve(Inputs(0, options.data, False), "medha", "long", 1.75, options.seconds)
    p50, p90 = np.quantile(found.waited / alone(found.prompt), (0.5, 0.9))
    short, long = (np.quantile(found.waited[x], q) for x, q in ((~found.is_long, 0.5), (found.is_long, 0.99)))
    print(
        f"| {p50:.1f} / {p90:.1f} | {short:.3f} s | {found.long_ended} of {found.is_long.sum()} "
        f"| {long:,.0f} s | {1e3 * found.tpot_quantile(0.5):.1f} ms |"
    )


if __name__ == "__main__":
    main()
