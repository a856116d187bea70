"""CPU time of a token by how it is sampled: `python -m benchmarks.sampling FILE.gguf [--tokens 64] [--rounds 5]`.

An engine serves one request at a time, of a short prompt, and of every row of the table in turns. Times are user and
system time of the whole process, all threads, in milliseconds a token, medians of the rounds after the first: other
processes on the machine disturb them less than the time that passes.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from longctx.models import load_checkpoint, load_tokenizer
from longctx.serving import Engine, EngineConfig, SamplingParams

ROWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature=1": {"temperature": 1.0},
    "temperature=1, min_p=0.05": {"temperature": 1.0, "min_p": 0.05},
    "temperature=1, top_k=40": {"temperature": 1.0, "top_k": 40},
    "temperature=1, top_p=0.95": {"temperature": 1.0, "top_p": 0.95},
    "temperature=1, presence_penalty=0.5": {"temperature": 1.0, "presence_penalty": 0.5},
    "greedy, logprobs=5": {"logprobs": 5},
}
PROMPT = "The three most famous rivers of the world are"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="checkpoint of a model with its tokenizer")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="that a request generates")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each row, after the first")
    options = parser.parse_args()
    model, params = load_checkpoint(options.file)
    prompt = load_tokenizer(options.file).encode(PROMPT)
    length = len(prompt) + options.tokens
    config = EngineConfig(max_running=1, max_length=length, token_budget=16, buckets=(1, 16), num_pages=64)
    engine = Engine(model, params, config)
    engine.warm_up()
    times: dict[str, list[float]] = {name: [] for name in ROWS}
    for _ in range(1 + options.rounds):
        for name, row in ROWS.items():
            sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True, seed=0, **row)
            start = time.process_time()
            engine.generate([prompt], sampling)
            times[name].append(1e3 * (time.process_time() - start) / options.tokens)
    print("| sampling | CPU, ms a token | more than greedy |\n|---|---|---|")
    medians = {name: statistics.median(measured[1:]) for name, measured in times.items()}
    for name, median in medians.items():
        print(f"| {name} | {median:.1f} | {median - medians['greedy']:.1f} |")


if __name__ == "__main__":
    main()
