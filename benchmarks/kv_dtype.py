"""What FP8 pages cost in accuracy, and what they save: retrieval and log probabilities of the built-in model.

    python -m benchmarks.kv_dtype                                       # documents of 2,048, 8,192 and 32,768 tokens
    python -m benchmarks.kv_dtype --tokens 32768 --documents 4 --dtype float32
    python -m benchmarks.kv_dtype --bytes                               # bytes and tokens of known models, no engine

The same questions go to engines that differ in the dtype of the model and of its pages alone. Every engine reads a
document once, and its questions find its pages; so rows of the document attend to rounded keys, too. An answer is right
if greedy decoding gives the five digits of the pass key and then the end. Log probabilities of the whole vocabulary are
compared with those of the engine whose pages have the model's dtype, at each token up to the first that differs.
"""

import argparse
import dataclasses
from typing import NamedTuple

import numpy as np

from longctx.models import LlamaConfig, load_checkpoint, load_tokenizer, passkey
from longctx.models.builtin import TINY
from longctx.models.footprint import cache_bytes, weight_bytes
from longctx.models.validation import FP8_KV
from longctx.parallel.device_tables import DEVICES
from longctx.serving import Engine, EngineConfig, Output, ParallelPlan, SamplingParams
from longctx.simulation.utilization import max_tokens

FACTS = 8  # of a document, and questions about it
ANSWER = passkey.KEY_DIGITS + 1  # and the end
FIRST_SEED = 20_000
MODELS = ("llama-3-8b", "llama-3-70b")
PAGE_SIZE = 64


class Distance(NamedTuple):
    """Of two distributions over the vocabulary: KL divergence in nats, and the largest difference of logits."""

    divergence: float
    largest: float


def make_engine(dtype: str, kv_dtype: str | None, num_tokens: int) -> Engine:
    """An engine for the questions about one document at a time."""
    model, params = load_checkpoint(TINY, dtype=dtype)
    longest = num_tokens + 256
    config = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=-(-longest // PAGE_SIZE) + FACTS * 8,
        max_running=FACTS,
        max_length=longest,
        token_budget=1024,
        buckets=(FACTS, 1024),
        max_logprobs=model.config.vocab_size,
        kv_dtype=kv_dtype,
    )
    return Engine(model, params, config, tokenizer=load_tokenizer(TINY))


def ask(engine: Engine, document: passkey.Document) -> list[Output]:
    """Answers to all questions about a document, which the first one reads."""
    sampling = SamplingParams(max_tokens=ANSWER, logprobs=engine.config.max_logprobs)
    prompts = [passkey.prompt(document.text, passkey.question(name)) for name in document.facts]
    return engine.generate(prompts[:1], sampling) + engine.generate(prompts[1:], sampling)


def distances(output: Output, right: Output) -> list[Distance]:
    """At each token up to the first that differs."""
    found = []
    for token, other, one, two in zip(
        output.token_ids, right.token_ids, output.logprobs or (), right.logprobs or (), strict=False
    ):
        own, reference = dict(one.top), dict(two.top)
        names = sorted(reference)
        p, q = (np.array([each[name] for name in names], np.float64) for each in (reference, own))
        difference = (q - q.mean()) - (p - p.mean())  # of logits: a constant makes no difference
        found.append(Distance(float(np.sum(np.exp(p) * (p - q))), float(np.abs(difference).max())))
        if token != other:
            break
    return found


@dataclasses.dataclass
class Result:
    """Of one engine: answers, those that are right, those that are the reference's, and distances from it."""

    num_answers: int = 0
    num_right: int = 0
    num_same: int = 0
    far: list[Distance] = dataclasses.field(default_factory=list)

    def add(self, output: Output, key: str, reference: Output) -> None:
        self.num_answers += 1
        self.num_right += (output.text, output.finish_reason) == (key, "stop")
        self.num_same += output.token_ids == reference.token_ids
        self.far += distances(output, reference)

    def __str__(self) -> str:
        divergences, largest = zip(*self.far, strict=True)
        return (
            f"{self.num_right}/{self.num_answers} right, {self.num_same} the same; "
            f"KL {np.mean(divergences):.1e} (at most {max(divergences):.1e}), "
            f"logits {np.mean(largest):.2f} apart (at most {max(largest):.2f})"
        )


def measure(num_tokens: int, num_documents: int, dtype: str) -> None:
    """Print, after each document, how often both engines are right, and how far the one with FP8 pages is off."""
    engines = {kv_dtype: make_engine(dtype, kv_dtype, num_tokens) for kv_dtype in (None, FP8_KV)}
    results = {kv_dtype: Result() for kv_dtype in engines}
    for number in range(num_documents):
        document = passkey.make_document(num_tokens, FACTS, FIRST_SEED + number)
        answers = {}
        for kv_dtype, engine in engines.items():
            engine.core.pool.clear()
            answers[kv_dtype] = ask(engine, document)
            for output, key, reference in zip(answers[kv_dtype], document.facts.values(), answers[None], strict=True):
                results[kv_dtype].add(output, key, reference)
        plain = results[None]
        about = f"{num_tokens:,} tokens, {number + 1} documents, {dtype}"
        print(f"{about}: {plain.num_right}/{plain.num_answers} right; FP8 pages: {results[FP8_KV]}", flush=True)


def print_bytes() -> None:
    """Print the bytes of a token's keys and values, what an H100 has room for, and what a decode reads."""
    device = DEVICES["H100"]
    print(f"{'':16}{'bytes/token':>24}{'tokens on 8 H100':>26}{'GB read, 128k decode':>24}")
    for name in MODELS:
        model = dataclasses.replace(LlamaConfig.preset(name), max_positions=2**24)
        rows = []
        for kv_dtype in (None, FP8_KV):
            each = cache_bytes(model, 1, kv_dtype=kv_dtype)
            read = weight_bytes(model) + cache_bytes(model, 131_072, kv_dtype=kv_dtype)
            rows.append((each, max_tokens(model, ParallelPlan(tensor=8), device, kv_dtype=kv_dtype), read / 1e9))
        texts = [f"{a:,} -> {b:,}" for a, b in list(zip(*rows, strict=True))[:2]]
        print(f"{name:16}{texts[0]:>24}{texts[1]:>26}{rows[0][2]:>14.1f} -> {rows[1][2]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32_768], help="of a document")
    parser.add_argument("--documents", type=int, default=4, help=f"of each length, with {FACTS} questions each")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the model")
    parser.add_argument("--bytes", action="store_true", help="arithmetic alone")
    options = parser.parse_args()
    print_bytes()
    if not options.bytes:
        for num_tokens in options.tokens:
            measure(num_tokens, options.documents, options.dtype)


if __name__ == "__main__":
    main()
