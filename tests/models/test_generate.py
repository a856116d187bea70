"""Generation: the same tokens however the prompt is cut, a cache updated in place, few compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longctx.models import Llama, LlamaConfig
from longctx.models import generate as module
from longctx.models.generate import Context, generate
from longctx.models.kv_cache import KVCache
from longctx.models.params import arrange_for_cpu
from longctx.models.sampling import Sampling

CONFIG = LlamaConfig(
    vocab_size=90,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=256,
)
MODEL = Llama(CONFIG)
PARAMS = MODEL.init(jax.random.key(0), initializer_range=0.4)
PROMPT = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 41)


@pytest.fixture(scope="module")
def greedy() -> list[int]:
    """Twelve greedy tokens from full forward passes over a padded sequence, with no cache."""
    tokens = np.zeros(64, np.int32)
    tokens[: len(PROMPT)] = PROMPT
    for length in range(len(PROMPT), len(PROMPT) + 12):
        tokens[length] = MODEL(PARAMS, tokens)[length - 1].argmax()
    answer = tokens[len(PROMPT) : len(PROMPT) + 12].tolist()
    assert len(set(answer)) > 4
    return answer


@pytest.mark.parametrize("chunk_size", [64, 16, 7, 1])
def test_chunks_do_not_matter(chunk_size: int, greedy: list[int]) -> None:
    assert list(generate(MODEL, PARAMS, PROMPT, 12, chunk_size=chunk_size)) == greedy


def test_prompt_may_be_read_in_parts_and_rewound(greedy: list[int]) -> None:
    context = Context(MODEL, PARAMS, 64, chunk_size=16)
    seen: list[int] = []
    context.read(PROMPT[:20], progress=seen.append)
    assert seen == [16, 4]
    context.read(PROMPT[20:])
    assert list(context.write(12)) == greedy
    assert context.length == len(PROMPT) + 12
    context.rewind(30)
    context.read(PROMPT[30:])
    assert list(context.write(12)) == greedy


def test_stops_before_a_stop_token(greedy: list[int]) -> None:
    first = greedy.index(greedy[5])
    assert list(generate(MODEL, PARAMS, PROMPT, 12, stop_ids=[greedy[5]])) == greedy[:first]


def test_what_was_yielded_is_read(greedy: list[int]) -> None:
    """Also when the reader of the tokens stops early."""
    context = Context(MODEL, PARAMS, 64, chunk_size=16)
    context.read(PROMPT)
    writing = context.write(12)
    assert [next(writing), next(writing)] == greedy[:2]
    writing.close()
    assert context.length == len(PROMPT) + 2
    assert list(context.write(4)) == greedy[2:6]


def test_an_older_writing_ends_with_an_error() -> None:
    context = Context(MODEL, PARAMS, 64, chunk_size=16)
    context.read(PROMPT)
    old = context.write(4)
    next(old)
    context.rewind(5)
    with pytest.raises(RuntimeError, match="since this writing began"):
        next(old)


def test_seeds_share_one_program() -> None:
    module._draw.clear_cache()
    for seed in range(3):
        list(generate(MODEL, PARAMS, PROMPT, 2, Sampling(temperature=1.0, seed=seed)))
    assert module._draw._cache_size() == 1


def test_weights_on_cpu_are_views() -> None:
    """Neither layout takes memory of its own, and both compute the same."""
    for dtype in (jnp.float32, jnp.bfloat16):
        params = MODEL.init(jax.random.key(0), dtype, initializer_range=0.4)
        arranged = arrange_for_cpu(params)
        stack = params["layers"]["w_up"]
        first = arranged["layers"]["w_up"] if dtype == jnp.bfloat16 else arranged["layers"][0]["w_up"]
        assert first.unsafe_buffer_pointer() == stack.unsafe_buffer_pointer()
        tokens = jnp.asarray(PROMPT)
        np.testing.assert_allclose(
            MODEL(arranged, tokens), MODEL(params, tokens), atol=1e-5 if dtype == jnp.float32 else 0.2
        )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cache_is_updated_in_place(dtype: object) -> None:
    """The compiled step aliases the whole cache and makes no copy of it, nor of a layer."""
    capacity = 1 << 17
    cache = jax.eval_shape(lambda: KVCache.empty(CONFIG, capacity, dtype))
    cache_bytes = sum(x.size * x.dtype.itemsize for x in cache)
    params = MODEL.abstract_params(dtype)
    tokens, scalar = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    memory = module._step.lower(MODEL, params, cache, tokens, scalar, scalar).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / CONFIG.num_layers / 4


def test_compilations_do_not_grow_with_the_prompt() -> None:
    """One program a bucket (16, 4 and 1 tokens), whatever the lengths."""
    module._step.clear_cache()
    context = Context(MODEL, PARAMS, 200, chunk_size=16)
    for length in (41, 1, 16, 3, 17, 5, 30):
        context.read(PROMPT[:length])
        list(context.write(2))
    assert module._step._cache_size() == 3


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "message"),
    [
        ([], 4, ValueError, "at least one token"),
        ([1.5, 2.0], 4, TypeError, "tokens` must be integers"),
        ([90], 4, ValueError, "tokens` from 90 to 90: outside the vocabulary"),
        ([-1], 4, ValueError, "outside the vocabulary"),
        ([1] * 257, 4, ValueError, "257 is more than the model's context of 256"),
        ([1] * 254, 4, ValueError, r"prompt and max_tokens make 254 \+ 4 tokens"),
        ([[1, 2]], 4, ValueError, r"one sequence \[T\]"),
        ([1], 0, ValueError, "max_tokens must be at least 1"),
    ],
)
def test_refuses(prompt: list, max_tokens: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        generate(MODEL, PARAMS, np.array(prompt) if prompt else prompt, max_tokens)


def test_context_refuses() -> None:
    with pytest.raises(ValueError, match="capacity must be 1 to the model's context of 256"):
        Context(MODEL, PARAMS, 300)
    with pytest.raises(ValueError, match="chunk_size must be positive"):
        Context(MODEL, PARAMS, 30, chunk_size=0)
    context = Context(MODEL, PARAMS, 30, chunk_size=16)
    with pytest.raises(ValueError, match="nothing has been read"):
        context.write(1)
    with pytest.raises(ValueError, match="41 more tokens after 0 don't fit"):
        context.read(PROMPT)
    context.read(PROMPT[:29])
    with pytest.raises(ValueError, match="2 more tokens after 29 don't fit"):
        context.write(2)
    with pytest.raises(ValueError, match="length must be 0 to 29"):
        context.rewind(30)
