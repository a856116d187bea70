"""Requests that share what they begin with: `python -m benchmarks.common_prefix`.

`completions`: one prompt, n completions of it. `burst`: requests that arrive together, whose prompts begin with the
same tokens. `spaced`: the same requests at a rate. The built-in model, everything compiled before; prompts are made
anew in each round. Times are from the arrival of each request; cached is the share of prompt tokens found in the cache.
"""

import argparse
import time
from statistics import median

import numpy as np

from longctx.models import load_checkpoint
from longctx.models.builtin import TINY
from longctx.serving import Engine, EngineConfig, Output, Request, SamplingParams


def make_prompts(count: int, prefix: int, own: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    common = rng.integers(256, size=prefix).tolist()
    return [common + rng.integers(256, size=own).tolist() for _ in range(count)]


def serve_at_rate(engine: Engine, requests: list[Request], rate: float) -> list[Output]:
    """Each request when it is due."""
    outputs: list[Output] = []
    start, submitted = time.monotonic(), 0
    while submitted < len(requests) or engine.has_work:
        while submitted < len(requests) and time.monotonic() - start >= submitted / rate:
            engine.submit(requests[submitted])
            submitted += 1
        if engine.has_work:
            outputs += [event.output for event in engine.step() if event.output is not None]
        else:
            time.sleep(0.001)
    return outputs


def row(name: str, rounds: list[tuple[float, list[Output]]]) -> str:
    ttfts = [[output.metrics.ttft or 0.0 for output in outputs] for _, outputs in rounds]
    metrics = [output.metrics for _, outputs in rounds for output in outputs]
    cached = sum(m.cached_tokens for m in metrics) / sum(m.prompt_tokens for m in metrics)
    first, middle, last = (median(f(x) for x in ttfts) for f in (min, median, max))
    seconds = median(seconds for seconds, _ in rounds)
    return f"| {name} | {first:.3f} | {middle:.3f} | {last:.3f} | {seconds:.3f} | {cached:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefix", type=int, default=2048)
    options = parser.parse_args()
    model, params = load_checkpoint(TINY)
    length = options.prefix + 256
    config = EngineConfig(
        max_running=16, token_budget=512, buckets=(16, 128, 512), max_length=length, num_pages=16 * length // 64
    )
    engine = Engine(model, params, config)
    engine.warm_up()
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    print("| requests | TTFT of the first, s | median | last | all done, s | cached |")
    print("|---|---|---|---|---|---|")
    for n, prompt_tokens in ((4, 100), (8, 1000), (8, options.prefix)):
        params_of_n = SamplingParams(max_tokens=16, temperature=1.0, n=n, seed=0, ignore_eos=True)
        rounds = []
        for seed in range(options.rounds):
            (prompt,) = make_prompts(1, 0, prompt_tokens, seed)
            start = time.monotonic()
            outputs = engine.generate([Request(prompt, params_of_n)])
            rounds.append((time.monotonic() - start, outputs))
        print(row(f"{n} completions of {prompt_tokens:,} tokens", rounds), flush=True)
    for name, rate in (("burst", float("inf")), ("2 a second", 2.0)):
        rounds = []
        for seed in range(options.rounds if name == "burst" else 1):
            prompts = make_prompts(12, options.prefix, 64, 1000 + seed + 100 * (name != "burst"))
            start = time.monotonic()
            outputs = serve_at_rate(engine, [Request(prompt, sampling) for prompt in prompts], rate)
            rounds.append((time.monotonic() - start, outputs))
        print(row(f"12 with {options.prefix:,} common tokens, {name}", rounds), flush=True)


if __name__ == "__main__":
    main()
