"""The forward pass: shapes, masks, the cache protocol, sharding, bad input."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import count_compilations
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.kernels import attention
from longctx.models import Llama, LlamaConfig, RopeConfig, param_specs
from longctx.models.layer_stacks import stacks_of
from longctx.models.params import Params, abstract_params, stacking_on

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(1000.0),
    max_positions=4096,
)
MODEL = Llama(CONFIG)
TOKENS = np.random.default_rng(0).integers(CONFIG.vocab_size, size=(2, 12))


@functools.cache
def params() -> Params:
    return MODEL.init(jax.random.key(0), initializer_range=0.2)


def close(actual: Any, expected: Any, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("dtype", "tied"),
    [(jnp.float32, True), pytest.param(jnp.float32, False, marks=pytest.mark.slow), (jnp.bfloat16, False)],
)
def test_init_fills_abstract_params(dtype: Any, tied: bool) -> None:
    model = Llama(dataclasses.replace(CONFIG, tie_embeddings=tied, qkv_bias=True))
    weights = model.init(jax.random.key(0), dtype, initializer_range=0.5)
    abstract = model.abstract_params(dtype)
    assert jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights) == abstract
    assert ("lm_head" in weights) != tied
    assert float(weights["layers"]["wq"].astype(float).std()) == pytest.approx(0.5, rel=0.1)
    assert float(weights["layers"]["attn_norm"].min()) == 1.0
    logits = jax.eval_shape(model, weights, TOKENS)
    assert (logits.shape, logits.dtype) == ((2, 12, 64), jnp.float32)


def test_leading_dimensions_are_independent() -> None:
    batch = MODEL(params(), TOKENS)
    close(MODEL(params(), TOKENS[0]), batch[0])
    close(MODEL(params(), TOKENS[None]), batch[None])


def test_causal() -> None:
    changed = TOKENS.copy()
    changed[:, 8:] += 1
    changed %= CONFIG.vocab_size
    before, after = MODEL(params(), TOKENS), MODEL(params(), changed)
    close(before[:, :8], after[:, :8])
    assert np.abs(np.asarray(before[:, 8:] - after[:, 8:])).max() > 0.1


def test_packed_segments_are_separate_sequences() -> None:
    packed = np.concatenate([TOKENS[0, :5], TOKENS[1, :4], [0, 0, 0]])
    segments = np.array([0] * 5 + [1] * 4 + [-1] * 3)
    positions = np.array([*range(5), *range(4), 0, 0, 0])
    logits = MODEL(params(), packed, positions, segments)
    close(logits[:5], MODEL(params(), TOKENS[0, :5]))
    close(logits[5:9], MODEL(params(), TOKENS[1, :4]))
    assert np.isfinite(np.asarray(logits)).all()


def test_only_distances_matter() -> None:
    far = np.broadcast_to(np.arange(4000, 4012), TOKENS.shape)
    close(MODEL(params(), TOKENS, far), MODEL(params(), TOKENS), atol=1e-4)


def attend_to_cache(start: jax.Array, positions: jax.Array) -> Any:
    """A whole-context cache `[L, 2, B, S, K, H]`, written at `start`: the simplest that a model can have."""

    def attend(cache: jax.Array, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        cache = lax.dynamic_update_slice(cache, jnp.stack([k, v])[None], (layer, 0, 0, start, 0, 0))
        keys, values = lax.dynamic_index_in_dim(cache, layer, keepdims=False)
        slots = jnp.broadcast_to(jnp.arange(keys.shape[1])[None], keys.shape[:2])
        return attention(q, keys, values, q_positions=positions, kv_positions=slots)[0], cache

    return attend


@functools.partial(jax.jit, donate_argnums=3)
def step(weights: Params, tokens: jax.Array, start: jax.Array, cache: jax.Array) -> Any:
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1])[None], tokens.shape)
    hidden, cache = MODEL.forward(weights, tokens, positions, attend_to_cache(start, positions), cache)
    return MODEL.logits(weights, hidden), cache


def test_chunks_through_a_cache_equal_the_dense_pass() -> None:
    cache = jnp.zeros((3, 2, 2, 16, 2, 8))
    pieces = []
    for start in range(0, 12, 4):
        logits, cache = step(params(), TOKENS[:, start : start + 4], np.int32(start), cache)
        pieces.append(logits)
    close(jnp.concatenate(pieces, axis=1), MODEL(params(), TOKENS))


def test_the_cache_is_updated_in_place() -> None:
    cache = jax.ShapeDtypeStruct((3, 2, 1, 65536, 2, 8), jnp.float32)
    tokens, start = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    memory = step.lower(params(), tokens, start, cache).compile().memory_analysis()
    cache_bytes = np.prod(cache.shape) * 4
    assert memory.alias_size_in_bytes >= cache_bytes
    # One layer's keys and values may be sliced out for attention; the whole cache may not be copied.
    assert memory.temp_size_in_bytes < cache_bytes


@pytest.mark.parametrize(
    "family", [{"qkv_bias": True}, pytest.param({"qk_norm": True}, marks=pytest.mark.slow)], ids=str
)
def test_gradients_reach_every_parameter(family: dict[str, bool]) -> None:
    model = Llama(dataclasses.replace(CONFIG, **family))
    weights = model.init(jax.random.key(0), initializer_range=0.2)

    def loss(weights: Params) -> jax.Array:
        return jax.nn.logsumexp(model(weights, TOKENS), axis=-1).mean()

    for path, gradient in jax.tree.leaves_with_path(jax.grad(loss)(weights)):
        assert np.isfinite(gradient).all(), path
        # A bias on every key shifts all scores of a query alike, but for the rotation.
        assert np.abs(gradient).max() > 1e-7, path


def test_repeated_calls_compile_once() -> None:
    MODEL(params(), TOKENS)
    with count_compilations() as compiled:
        MODEL(params(), TOKENS + 0)
    assert compiled == []


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"stage": 3, "tensor": 2}, {"wk": P("stage", None, "tensor", None)}),
        ({"stage": 2, "tensor": 4}, {"wq": P("stage", None, "tensor", None), "wk": P("stage", None, None, None)}),
        ({"tensor": 8}, {"wq": P(None, None, None, None), "w_down": P(None, "tensor", None)}),
        ({"context": 8}, {"wq": P(None, None, None, None), "w_down": P(None, None, None)}),
    ],
)
def test_param_specs(shape: dict[str, int], expected: dict[str, P]) -> None:
    mesh = make_mesh(**shape)
    specs = param_specs(CONFIG, mesh)
    (layers,) = stacks_of(specs["layers"])
    for name, spec in expected.items():
        assert layers[name] == spec
    params = abstract_params(CONFIG, stacking=stacking_on(CONFIG, mesh))
    for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True):
        NamedSharding(mesh, spec).shard_shape(leaf.shape)  # raises where the shape does not divide


def make_mesh(**shape: int) -> Mesh:
    devices = jax.devices()[: math.prod(shape.values())]
    return jax.make_mesh(tuple(shape.values()), tuple(shape), (AxisType.Auto,) * len(shape), devices=devices)


def test_sharded_params_give_the_same_logits() -> None:
    mesh = make_mesh(tensor=2)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(CONFIG, mesh))
    close(MODEL(jax.device_put(params(), shardings), TOKENS), MODEL(params(), TOKENS))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tokens": TOKENS.astype(np.float32)}, TypeError, "`tokens`"),
        ({"tokens": ["text"]}, TypeError, "`tokens`"),
        ({"tokens": []}, ValueError, "at least one token"),
        ({"tokens": np.zeros((2, 0), np.int32)}, ValueError, "at least one token"),
        ({"tokens": np.zeros((0, 2), np.int32)}, ValueError, "at least one token"),
        ({"tokens": np.int32(3)}, ValueError, "at least one token"),
        ({"tokens": [0, 64]}, ValueError, "64: outside the vocabulary"),
        ({"tokens": jnp.array([-1, 3])}, ValueError, "-1 to 3: outside the vocabulary"),
        ({"tokens": np.zeros(4097, np.int32)}, ValueError, "context of 4096"),
        ({"positions": np.zeros(TOKENS.shape)}, TypeError, "`positions`"),
        ({"positions": np.zeros(12, np.int32)}, ValueError, "differ in shape"),
        ({"positions": np.full(TOKENS.shape, 4096)}, ValueError, "model's context"),
        ({"positions": np.full(TOKENS.shape, -1)}, ValueError, "model's context"),
        ({"segment_ids": np.zeros(TOKENS.shape)}, TypeError, "`segment_ids`"),
        ({"segment_ids": np.zeros((2, 11), np.int32)}, ValueError, "differ in shape"),
        ({"segment_ids": TOKENS, "attend": lambda *_: None}, ValueError, "`segment_ids` has no effect"),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MODEL(params(), **{"tokens": TOKENS, **arguments})
