"""What the thread of such a server's engine takes beside its steps: `python -m benchmarks.cluster.host FILE`."""

import argparse
import dataclasses
import json
from pathlib import Path

from benchmarks.cluster.arms import engine_config
from benchmarks.host_probe import measure_host
from longctx.models import load_checkpoint
from longctx.models.builtin import TINY
from longctx.serving import Engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="where it is written, as JSON")
    options = parser.parse_args()
    model, params = load_checkpoint(TINY)
    times = measure_host(Engine(model, params, engine_config()))
    # On one core a batch is computed while it is submitted: that is in the times of steps.
    times = dataclasses.replace(times, batch=0.0, shares_cores=True)
    options.file.write_text(json.dumps(dataclasses.asdict(times)) + "\n")


if __name__ == "__main__":
    main()
