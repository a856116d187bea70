"""A small model and what it answers, computed densely: no cache, no batch, no chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, SamplingParams
from longctx.serving.sampling import IN_OUTPUT, IN_PROMPT, Controls, draw

VOCAB, LENGTH = 50, 176
EOS = 7
MODEL = Llama(
    LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=256,
        eos_ids=(EOS,),
    )
)
PARAMS = MODEL.init(jax.random.key(0), initializer_range=0.4)


def make_engine(params: dict = PARAMS, **options: object) -> Engine:
    """All with the same shapes, so that all share their programs."""
    shapes = {"page_size": 8, "num_pages": 24, "max_running": 6, "token_budget": 32, "buckets": (8, 32)}
    return Engine(MODEL, params, EngineConfig(**(shapes | options)))  # type: ignore[arg-type]


@functools.cache
def logits_after(tokens: tuple[int, ...]) -> np.ndarray:
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(MODEL(PARAMS, padded))[len(tokens) - 1]


@jax.jit
def _draw(logits: jax.Array, seen: jax.Array, controls: jax.Array, position: jax.Array) -> jax.Array:
    return draw(logits[None], seen[None], Controls.unpack(controls[None]), position[None], 1, jnp.array(False)).tokens[
        0
    ]


def continuation(prompt: list[int], params: SamplingParams, sample: int = 0, eos: int | None = EOS) -> list[int]:
    """What one sequence by itself would get."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + params.max_tokens:
        seen = np.zeros(VOCAB, np.uint8)
        seen[prompt] = IN_PROMPT
        seen[tokens[len(prompt) :]] |= IN_OUTPUT
        controls = Controls.row(params, params.seed or 0, sample)
        tokens.append(int(_draw(logits_after(tuple(tokens)), seen, controls, np.int32(len(tokens)))))
        if tokens[-1] == eos and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


def agrees(tokens: list[int], prompt: list[int], params: SamplingParams, sample: int = 0) -> bool:
    """Equal, or the two best logits at the first difference are closer than 1e-4."""
    expected = continuation(prompt, params, sample)
    if tokens == expected:
        return True
    at = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b)
    second, best = np.sort(logits_after((*prompt, *expected[:at])))[-2:]
    return bool(best - second < 1e-4)
