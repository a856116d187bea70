"""Throughput of a batch in which half of the requests have a grammar: `python -m benchmarks.grammars --model PATH`.

The same prompts, lengths and temperatures in turns, as a table in markdown: without masks; half of them with a grammar
that never ends (a JSON array of strings); half with `min_tokens`, whose masks need no tokens, so that what the first
token of a step waits for is left out; and all with a grammar. `first mask`: seconds of the first request with a grammar
in a process, which builds the table of the vocabulary; `compile`: of another grammar.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

from longctx.models import load_checkpoint, load_tokenizer
from longctx.models.builtin import TINY
from longctx.serving import Engine, EngineConfig, SamplingParams
from longctx.serving.request.grammar import from_json_schema

STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 1000}
OTHER = {"type": "object", "properties": dict.fromkeys("abcdefgh", STRINGS), "required": list("abcdefgh")}
CASES = ("none", "half, a grammar", "half, min_tokens", "all, a grammar")


def sampling(case: str, number: int, tokens: int) -> SamplingParams:
    """Parameters of a request; every other one is masked in the cases of halves."""
    plain = SamplingParams(max_tokens=tokens, temperature=1.0, seed=number, ignore_eos=True)
    if case == "none" or (case.startswith("half") and number % 2):
        return plain
    if case.endswith("min_tokens"):
        return SamplingParams(max_tokens=tokens, temperature=1.0, seed=number, min_tokens=tokens)
    return SamplingParams(max_tokens=tokens, temperature=1.0, seed=number, grammar=from_json_schema(STRINGS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model, params = load_checkpoint(options.model)
    config = EngineConfig(
        max_length=1024, num_pages=1024, page_size=16, max_running=options.requests, token_budget=256, buckets=(16, 256)
    )
    engine = Engine(model, params, config, tokenizer=load_tokenizer(options.model))
    engine.warm_up()
    times = []
    for schema in (STRINGS, OTHER):
        start = time.perf_counter()
        engine.input_processor.grammars.matcher(from_json_schema(schema))
        times.append(time.perf_counter() - start)
    prompts = [[number + 1] * 32 for number in range(options.requests)]
    found: dict[str, list[float]] = {case: [] for case in CASES}
    for number in range(-1, options.rounds):
        for case in CASES if number % 2 else CASES[::-1]:
            params_of = [sampling(case, each, options.tokens) for each in range(options.requests)]
            start = time.perf_counter()
            outputs = engine.generate(prompts, params_of)
            seconds = time.perf_counter() - start
            assert all(len(output.token_ids) == options.tokens for output in outputs)
            if number >= 0:
                found[case].append(options.requests * options.tokens / seconds)
    print(f"{options.model.name}, {options.requests} requests of {options.tokens} tokens, {options.rounds} rounds;")
    print(f"first mask {times[0]:.3f} s, compile {times[1]:.4f} s\n")
    print("| masks | tokens/s | of none, in pairs |\n|---|---|---|")
    for case in CASES:
        ratio = statistics.median(x / y for x, y in zip(found[case], found["none"], strict=True))
        print(f"| {case} | {statistics.median(found[case]):.0f} | {ratio:.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
