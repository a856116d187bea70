"""Predicted against measured batches of a real engine: `python -m benchmarks.engine_batches FILE...`.

The files are Vajra's batch summaries (columns `batch_num_prefill_tokens`, `batch_num_decode_tokens`,
`batch_size`, `batch_execution_time`), of an engine on two GPUs with tensor parallelism that replays a trace. They say
neither the model, nor the GPU, nor how long sequences are. So what is compared are the batches whose keys are known:
the chunks of the first prompt, and the decodes after it until another prompt comes. For each model and GPU there is a
line: which of them it can have been follows from no other source, and that line says little more than that the
predictor's proportions are an engine's.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

from longctx.models.config import LlamaConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor import Work
from longctx.simulation.hardware import predictor

MODELS = ("llama-3-8b", "llama-2-13b", "qwen3-32b", "llama-3-70b")
TOPOLOGIES = ("a100-nvlink", "h100-nvlink", "h200-nvlink")
COLUMNS = ("batch_num_prefill_tokens", "batch_num_decode_tokens", "batch_size", "batch_execution_time")


def read_batches(path: Path) -> list[tuple[int, int, int, float]]:
    """Prompts' tokens, decodes, sequences and seconds of each batch; ValueError if a column is missing."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or (missing := [name for name in COLUMNS if name not in rows[0]]):
        raise ValueError(
            f"{path} must have rows, with the columns {', '.join(COLUMNS)}" + (f": no {missing}" if rows else "")
        )
    return [
        (int(float(row[COLUMNS[0]])), int(float(row[COLUMNS[1]])), int(float(row[COLUMNS[2]])), float(row[COLUMNS[3]]))
        for row in rows
        if row[COLUMNS[3]]
    ]


def known_batches(
    batches: list[tuple[int, int, int, float]],
) -> tuple[list[tuple[Work, float]], list[tuple[Work, float]]]:
    """The first prompt's chunks, and the decodes after it, with the work of each and its seconds."""
    prompts, decodes, tokens, at = list[tuple[Work, float]](), list[tuple[Work, float]](), 0, 0
    while batches[at][0] and not batches[at][1] and batches[at][2] == 1:
        count, seconds = batches[at][0], batches[at][3]
        prompts.append((Work.of([(tokens, count, False)]), seconds))
        tokens, at = tokens + count, at + 1
    # The first prompt's rest may come with short ones, which make few keys.
    while batches[at][0] and not batches[at][1]:
        tokens, at = tokens + batches[at][0], at + 1
    while not batches[at][0]:
        count, seconds = batches[at][1], batches[at][3]
        tokens += count
        decodes.append((Work(count, count, tokens), seconds))
        at += 1
    return prompts, decodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--tensor", type=int, default=2, help="GPUs of the engine")
    options = parser.parse_args()
    for path in options.files:
        prompts, decodes = known_batches(read_batches(path))
        measured = [np.array([seconds for _, seconds in each]) for each in (prompts, decodes)]
        spans = [f"{1e3 * each.min():.1f} to {1e3 * each.max():.1f} ms" for each in measured]
        print(f"{path.name}: {len(prompts)} chunks, {spans[0]}; {len(decodes)} decodes, {spans[1]}")
        print(
            f"{'model':14}{'topology':14}{'chunks: bias':>14}{'error':>8}{'slope':>8}{'decodes: bias':>15}{'error':>8}"
        )
        for name in MODELS:
            for topology in TOPOLOGIES:
                found = predictor(
                    LlamaConfig.preset(name), topology, ParallelPlan(tensor=options.tensor), max_rows=1024
                )
                off = [
                    np.array([found.seconds(work) for work, _ in each]) / seconds - 1
                    for each, seconds in zip((prompts, decodes), measured, strict=True)
                ]
                grown = [found.seconds(prompts[i][0]) for i in (0, -1)]
                theirs = measured[0][-1] - measured[0][0]
                slope = (grown[1] - grown[0]) / theirs if len(prompts) > 3 else float("nan")
                print(
                    f"{name:14}{topology:14}{off[0].mean():14.0%}{np.abs(off[0]).mean():8.0%}{slope:8.2f}"
                    f"{off[1].mean():15.0%}{np.abs(off[1]).mean():8.0%}"
                )


if __name__ == "__main__":
    main()
