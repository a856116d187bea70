"""Evaluate how many pass keys a byte-level model finds exactly, by the length of the document.

    python examples/evaluate_tiny.py                                        # the built-in model
    python examples/evaluate_tiny.py --model DIR --tokens 2048 32768 --questions 200

A document is prefilled once, and its questions are answered from its keys and values: each question attends to
the document and to itself, and the two states are merged. An answer is right if greedy decoding would give it: every
digit, and the end of the sequence after them, is the most probable token.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import longctx.models
from longctx.kernels import attention, merge_state
from longctx.models import ByteTokenizer, Llama, load_checkpoint, passkey

FACTS = 8  # per document
QUESTION_TOKENS = 64  # room for a question and its answer
FIRST_SEED = 10_000


def exact_match(model: Llama, params: Any, num_tokens: int, num_questions: int, progress: bool = False) -> float:
    """The share of right answers to `num_questions` questions about documents of `num_tokens` tokens."""
    seeds = FIRST_SEED + np.arange(-(-num_questions // FACTS))
    right = []
    for seed in tqdm(seeds, desc=f"{num_tokens} tokens", disable=not progress, leave=False):
        document = passkey.make_document(num_tokens, FACTS, int(seed))
        right += answers_right(model, params, document)[: num_questions - len(right)]
    return float(np.mean(right))


def answers_right(model: Llama, params: Any, document: passkey.Document) -> list[bool]:
    """For every fact of the document, whether the model answers its question exactly."""
    tokenizer = ByteTokenizer()
    text = np.array(tokenizer.encode(document.text))
    questions = np.zeros((len(document.facts), QUESTION_TOKENS), int)
    is_answer = np.zeros(questions.shape, bool)
    for row, (name, key) in enumerate(document.facts.items()):
        question = tokenizer.encode(passkey.prompt("", passkey.question(name)), add_special_tokens=False)
        tokens = [*question, *tokenizer.encode(key, add_special_tokens=False), *tokenizer.eos_ids]
        questions[row, : len(tokens)] = tokens
        is_answer[row, len(question) : len(tokens)] = True
    predicted = np.asarray(_predict(model, params, text, questions))[:, :-1]
    return list(np.all((predicted == questions[:, 1:]) | ~is_answer[:, 1:], axis=1))


@functools.partial(jax.jit, static_argnums=0)
def _predict(model: Llama, params: Any, text: jax.Array, questions: jax.Array) -> jax.Array:
    """The most probable next token of every token of `questions` `[B, T]`, each directly after `text` `[S]`."""
    positions = len(text) + jnp.broadcast_to(jnp.arange(questions.shape[1]), questions.shape)

    def read(cache: Any, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        keys, values = cache
        return attention(q, k, v)[0], (keys.at[layer].set(k), values.at[layer].set(v))

    def answer(cache: Any, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        keys, values = cache
        flat = q.reshape(-1, *q.shape[2:])
        text_out, text_lse = attention(flat, keys[layer], values[layer], causal=False)
        own, own_lse = attention(q, k, v)
        out, _ = merge_state(text_out.reshape(q.shape), text_lse.reshape(own_lse.shape), own, own_lse)
        return out, cache

    config = model.config
    empty = jnp.zeros((config.num_layers, len(text), config.num_kv_heads, config.head_dim))
    _, cache = model.forward(params, text, jnp.arange(len(text)), read, (empty, empty))
    hidden, _ = model.forward(params, questions, positions, answer, cache)
    return model.logits(params, hidden).argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    built_in = Path(longctx.models.__file__).with_name("tiny")
    parser.add_argument("--model", type=Path, default=built_in, help="a checkpoint (default: built in)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--questions", type=int, default=200)
    args = parser.parse_args()

    model, params = load_checkpoint(args.model)
    for num_tokens in args.tokens:
        share = exact_match(model, params, num_tokens, args.questions, progress=True)
        print(f"{num_tokens:>7} tokens: {share:.1%} of {args.questions} questions exactly right")


if __name__ == "__main__":
    main()
