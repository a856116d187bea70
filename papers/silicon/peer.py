"""AIConfigurator's predictions of the same runs: `python -m papers.silicon.peer RUNS.csv OUT.csv`.

It runs by the Python of an environment that has `aiconfigurator` 0.12, and imports nothing of `longctx`.
"""

import csv
import sys
import warnings
from pathlib import Path
from typing import Any

MODELS = {"meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B"}  # those whose sizes are in the package
COLUMNS = ("id", "ttft_ms", "tpot_ms")


def main(arguments: list[str]) -> int:
    """Write the predicted TTFT and TPOT of each run, empty where it predicts none. Exit status: 0, or 2 for usage."""
    if len(arguments) != 2:
        print("usage: python -m papers.silicon.peer RUNS.csv OUT.csv", file=sys.stderr)
        return 2
    from aiconfigurator.cli.api import cli_estimate

    warnings.simplefilter("ignore")
    source, target = map(Path, arguments)
    with source.open(newline="") as runs, target.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(COLUMNS)
        for row in csv.DictReader(runs):
            try:
                found = cli_estimate(**_arguments(row))
            except Exception as error:  # whatever it can't predict
                print(f"{row['id']}: {error}", file=sys.stderr)
                writer.writerow([row["id"], "", ""])
            else:
                writer.writerow([row["id"], found.ttft, found.tpot])
            out.flush()
    return 0


def _arguments(row: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of `cli_estimate` for a row: its newest tables of the engine, as there are few versions."""
    return {
        "model_path": MODELS.get(row["model_path"], row["model_path"]),
        "system_name": row["system"],
        "backend_name": row["backend"],
        "isl": int(row["isl"]),
        "osl": int(row["osl"]),
        "batch_size": int(row["batch_size"]),
        "tp_size": int(row["tp_size"]),
        "gemm_quant_mode": row["gemm_quant_mode"] or None,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
