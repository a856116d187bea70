"""The error of FP8 pages with a real model: `python -m benchmarks.fp8_pages FILE.gguf [--tokens 2048] [--text FILE]`.

With `--order`, the difference between prefills in chunks of 512 and of 128 rows: what the order of sums does.

Logits of every token of a text, from a prefill in chunks over pages, as an engine does it. Against the same weights in
float32 with pages in float32: root mean square of the difference of the logits (less their mean) over that of the
logits, how often the best token is the same, the divergence of the distributions, and the perplexity of the text.
"""

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from longctx.kernels import paged_attention
from longctx.models import Llama, load_checkpoint, load_tokenizer
from longctx.models.validation import FP8_KV
from longctx.serving.runner.paged_cache import NewKeys, PagedCache

PAGE_SIZE, CHUNK = 64, 512
CASES = (("float32", None), ("float32", FP8_KV), ("bfloat16", None), ("bfloat16", FP8_KV))


def logits_by_chunk(
    file: str, tokens: np.ndarray, dtype: str, kv_dtype: str | None, rows: int = CHUNK
) -> Iterator[np.ndarray]:
    """Logits `[CHUNK, vocab]` of each part of a text, prefilled in chunks of `rows`."""
    model, params = load_checkpoint(file, dtype=dtype)
    num_pages = -(-len(tokens) // PAGE_SIZE)
    shapes = PagedCache.abstract(model.config, num_pages, PAGE_SIZE, kv_dtype or dtype)
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    run = functools.partial(_run_chunk, model, num_pages)
    for start in range(0, len(tokens), CHUNK):
        parts = []
        for first in range(start, start + CHUNK, rows):
            logits, cache = run(params, cache, tokens[first : first + rows], np.int32(first))
            parts.append(np.asarray(logits, np.float64))
        yield np.concatenate(parts)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _run_chunk(
    model: Llama, num_pages: int, params: Any, cache: PagedCache, tokens: Array, first: Array
) -> tuple[Array, PagedCache]:
    positions = first + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    table = jnp.arange(num_pages, dtype=jnp.int32)[None]

    def attend(cache: PagedCache, layer: Array, q: Array, k: Array, v: Array) -> tuple[Array, PagedCache]:
        new = NewKeys.of(cache, k, v, layer * num_pages + positions // PAGE_SIZE, positions % PAGE_SIZE)
        cache = new.write(cache, new.kv, 0)
        metadata = (table, None, positions[-1:] + 1, positions, jnp.zeros_like(positions), layer * num_pages)
        out, _ = paged_attention(q, cache.k, cache.v, *metadata, **cache.scales)
        return out, cache

    hidden, cache = model.forward(params, tokens, positions, attend, cache)
    return model.logits(params, hidden), cache


def compare(want: np.ndarray, got: np.ndarray) -> dict[str, float]:
    """Sums over the rows `[rows, vocab]` of two logits."""
    centred = want - want.mean(-1, keepdims=True)
    p, q = log_softmax(want), log_softmax(got)
    return {
        "square": float(np.square(got - got.mean(-1, keepdims=True) - centred).sum()),
        "of": float(np.square(centred).sum()),
        "same": float((want.argmax(-1) == got.argmax(-1)).sum()),
        "divergence": float((np.exp(p) * (p - q)).sum()),
    }


def print_order(file: str, tokens: np.ndarray) -> None:
    print("| weights | pages | difference of logits | same best token |")
    print("|---|---|---|---|")
    for dtype, kv_dtype in CASES:
        total = dict.fromkeys(("square", "of", "same", "divergence"), 0.0)
        both = (logits_by_chunk(file, tokens, dtype, kv_dtype, rows) for rows in (CHUNK, 128))
        for one, other in zip(*both, strict=True):
            for name, value in compare(one, other).items():
                total[name] += value
        error, same = np.sqrt(total["square"] / total["of"]), total["same"] / len(tokens)
        print(f"| {dtype} | {kv_dtype or dtype} | {error:.4%} | {same:.1%} |", flush=True)


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def print_errors(file: str, tokens: np.ndarray) -> None:
    print("| weights | pages | difference of logits | same best token | divergence, nats | perplexity |")
    print("|---|---|---|---|---|---|")
    runs = zip(*(logits_by_chunk(file, tokens, *case) for case in CASES), strict=True)
    totals: list[dict[str, float]] = [{} for _ in CASES]
    for number, chunks in enumerate(runs):
        targets = tokens[number * CHUNK + 1 : (number + 1) * CHUNK + 1]
        for total, logits in zip(totals, chunks, strict=True):
            chosen = np.take_along_axis(log_softmax(logits)[: len(targets)], targets[:, None], 1)
            for name, value in (compare(chunks[0], logits) | {"loss": float(-chosen.sum())}).items():
                total[name] = total.get(name, 0.0) + value
    for (dtype, kv_dtype), total in zip(CASES, totals, strict=True):
        error, same = np.sqrt(total["square"] / total["of"]), total["same"] / len(tokens)
        divergence, perplexity = total["divergence"] / len(tokens), np.exp(total["loss"] / (len(tokens) - 1))
        pages = kv_dtype or dtype
        print(f"| {dtype} | {pages} | {error:.2%} | {same:.1%} | {divergence:.5f} | {perplexity:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--text", type=Path, nargs="+", default=sorted(Path("docs").glob("*.md")))
    parser.add_argument("--order", action="store_true")
    options = parser.parse_args()
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in options.text)
    tokens = np.array(load_tokenizer(options.file).encode(text), np.int32)[: options.tokens // CHUNK * CHUNK]
    print(f"{len(tokens)} tokens of {', '.join(path.name for path in options.text)}\n")
    (print_order if options.order else print_errors)(options.file, tokens)


if __name__ == "__main__":
    main()
