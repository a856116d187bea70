"""A second question about a long document: `python -m benchmarks.prefix_cache`.

The built-in model reads a document and answers a question about it, then another one, whose prompt begins with the
same document. Rounds have documents of their own. TTFT is the engine's, everything compiled before.
"""

import argparse
import statistics

from longctx.models import load_checkpoint, load_tokenizer, passkey
from longctx.models.builtin import TINY
from longctx.serving import Engine, EngineConfig, Output, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=30_000, metavar="N", help="length of the document")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model, params = load_checkpoint(TINY)
    length = options.tokens + 128
    config = EngineConfig(
        max_running=1, token_budget=512, buckets=(1, 128, 512), max_length=length, num_pages=length // 64 + 8
    )
    engine = Engine(model, params, config, tokenizer=load_tokenizer(TINY))
    engine.warm_up()

    first, second, right = [], [], 0
    for seed in range(options.rounds):
        document = passkey.make_document(options.tokens, 2, seed)
        outputs: list[Output] = []
        for name, key in document.facts.items():
            prompt = passkey.prompt(document.text, passkey.question(name))
            outputs += engine.generate(prompt, SamplingParams(max_tokens=12))
            right += outputs[-1].text == key
        for output, times in zip(outputs, (first, second), strict=True):
            assert output.metrics.ttft is not None
            times.append(output.metrics.ttft)
    metrics = outputs[-1].metrics
    ratio = statistics.median(a / b for a, b in zip(first, second, strict=True))
    print("| prompt tokens | found in the cache | first TTFT, s | second TTFT, s | ratio | right answers |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {metrics.prompt_tokens:,} | {metrics.cached_tokens:,} | {statistics.median(first):.2f} "
        f"| {statistics.median(second):.3f} | {ratio:.0f}x | {right} of {2 * options.rounds} |"
    )


if __name__ == "__main__":
    main()
