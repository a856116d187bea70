"""Needle in a haystack: RULER's tasks of lm-eval, through `longctx serve` and through transformers.

    python -m benchmarks.needle FILE.gguf --evaluator PYTHON [--lengths 4096 8192 16384 32768] [--samples 2]

The evaluator is EleutherAI's lm-eval (its tasks `niah_single_1` and `niah_multikey_2` need no download), in an
environment of its own, whose Python `--evaluator` names; `make needle` installs it. It makes the prompts, asks the
server as any client does, and scores the answers. Then it does the same with transformers, on the same weights and
prompts, which it reads in parts of 1,024 tokens. Exit status 1: a score differs.
"""

import argparse
import itertools
import json
import operator
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import transformers

from benchmarks.server_process import Process, serve_command
from longctx.models import load_checkpoint, save_checkpoint
from longctx.models.checkpoint import read_model
from longctx.models.gguf_tokenizer import read_gguf_tokenizer

TASKS = ("niah_single_1", "niah_multikey_2")
LENGTHS = (4096, 8192, 16384, 32768)
# A needle has 7 digits. The prompts leave room for 128 tokens, of which the beginning of the answer takes some 20.
ANSWER = 32
PART = 1024  # tokens at once in transformers, which else takes 32K x 32K scores a head in every layer


def convert(file: Path, directory: Path) -> None:
    """Write the weights and the tokenizer of a GGUF file as transformers reads them."""
    if (directory / "tokenizer.json").exists():
        return
    save_checkpoint(directory, *load_checkpoint(file))
    tokenizer, _, special_tokens, _ = read_gguf_tokenizer(file)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens).save_pretrained(directory)


def evaluate(
    python: Path, out: Path, tasks: list[str], length: int, samples: int, model: Mapping[str, object]
) -> dict[str, tuple[float, list[str]]]:
    """Run lm-eval on prompts of up to `length` tokens; the score of each task, 0 to 1, and the answers."""
    arguments = dict(model)
    name = str(arguments.pop("name"))
    nltk = out / "nltk"  # lm-eval looks for a model of sentences, which these tasks do not use
    (nltk / "tokenizers" / "punkt_tab").mkdir(parents=True, exist_ok=True)
    results = out / f"{name}-{length}"
    shutil.rmtree(results, ignore_errors=True)
    command = [
        *(str(python), "-m", "lm_eval", "--model", name, "--tasks", ",".join(tasks), "--limit", str(samples)),
        *("--model_args", ",".join(f"{key}={value}" for key, value in arguments.items()), "--batch_size", "1"),
        *("--metadata", json.dumps({"max_seq_lengths": [length], "tokenizer": str(arguments["tokenizer"])})),
        *("--output_path", str(results), "--log_samples", "--gen_kwargs", f"max_gen_toks={ANSWER}"),
        *((f"prefill_chunk_size={PART}", "--device", "cpu") if name == "hf" else ()),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    with (out / f"{name}-{length}.log").open("wb") as log:
        environment = os.environ | offline | {"NLTK_DATA": str(nltk)}
        subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
    (file,) = results.rglob("results_*.json")
    found = json.loads(file.read_text())["results"]
    scores = {}
    for task in tasks:
        (file,) = results.rglob(f"samples_{task}_*.jsonl")
        answers = [json.loads(line)["resps"][0][0] for line in file.read_text().splitlines()]
        scores[task] = found[task][f"{length},none"], answers
    return scores


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--evaluator", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--out", type=Path, default=Path("build/needle"))
    args = parser.parse_args()

    jax.config.update("jax_platforms", "cpu")
    out = args.out.resolve()
    directory = out / args.file.stem
    convert(args.file, directory)
    longest = read_model(args.file)[0].config.max_positions
    lengths = [length for length in args.lengths if length <= longest]
    shared = {"tokenizer": directory, "max_length": longest, "add_bos_token": True}
    peer = {"name": "hf", "pretrained": directory, "dtype": "float32", **shared}
    sizes = {"max-length": max(lengths), "max-running": 1, "token-budget": 512, "buckets": "8,512"}
    flags = [str(word) for name, value in sizes.items() for word in (f"--{name}", value)]
    name = ("--served-model-name", args.file.name)  # by which the evaluator asks for it
    server = Process("longctx serve", serve_command("--model", str(args.file), *name, *flags), out / "serve.log")
    different = 0
    print("tokens  task             longctx  transformers  equal answers  seconds: longctx, transformers")
    server.start()
    try:
        server.wait_until_ready(3600)
        for length in lengths:
            ours = {"name": "local-completions", "model": args.file.name, "tokenized_requests": True, **shared}
            ours |= {"base_url": f"{server.url}/v1/completions", "tokenizer_backend": "huggingface", "timeout": 3600}
            times, scores = [time.monotonic()], []
            for model in (ours, peer):
                scores.append(evaluate(args.evaluator, out, args.tasks, length, args.samples, model))
                times.append(time.monotonic())
            for task in args.tasks:
                (mine, answers), (theirs, others) = (score[task] for score in scores)
                different += mine != theirs
                equal = f"{sum(map(operator.eq, answers, others))} of {len(others)}"
                seconds = ", ".join(f"{after - before:.0f}" for before, after in itertools.pairwise(times))
                print(f"{length:6}  {task:15}  {mine:7.2f}  {theirs:12.2f}  {equal:>13}  {seconds}", flush=True)
    finally:
        server.stop()
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
