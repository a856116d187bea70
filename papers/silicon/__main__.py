"""Predict measured runs of engines, and write the page of errors: `python -m papers.silicon --data DIR`."""

import argparse
import sys
from pathlib import Path

from papers.silicon.engines import ENGINES, engine_name, predict_all
from papers.silicon.fit import fit_engine
from papers.silicon.report import write_page
from papers.silicon.runs import read_predictions, read_runs, write_predictions

RUNS = Path("h100_measured/end_to_end.csv")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 if an argument is wrong."""
    options = _parse(arguments)
    try:
        runs = read_runs(options.data / RUNS)
        peer = read_predictions(options.peer) if options.peer else {}
    except (OSError, ValueError) as error:
        print(f"silicon: {error}", file=sys.stderr)
        return 2
    if options.jobs < 1:
        print(f"silicon: --jobs must be at least 1, got {options.jobs}", file=sys.stderr)
        return 2
    if options.fit:
        for name, engine in ENGINES.items():
            fitted = [run for run in runs if engine_name(run) == name and run.is_fitted]
            print(name, fit_engine(fitted, options.jobs, engine.overheads))
        return 0
    file = options.predictions
    known = read_predictions(file) if file and file.is_file() else {}
    left = [run for run in runs if run.name not in known]
    for index, times in predict_all(left, jobs=options.jobs):
        known[left[index].name] = times
        if file:
            write_predictions(file, known)
    print(write_page(runs, known, peer, options.out))
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m papers.silicon", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help=f"folder that has {RUNS}")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder to write into")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes")
    parser.add_argument(
        "--fit", action="store_true", help="print overheads fitted on half of the runs, and write nothing"
    )
    parser.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="CSV of predictions, which is kept up to date; runs in it are not simulated again",
    )
    parser.add_argument("--peer", type=Path, metavar="FILE", help="AIConfigurator's, of `papers.silicon.peer`")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
