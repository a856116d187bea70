"""`attention_fn` in `nnx.MultiHeadAttention` gives what `nnx.dot_product_attention` gives, or says why it can't."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hlo import collectives
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.kernels.attention.mask import Tokens, visible
from longctx.kernels.attention.rule import AttentionRule
from longctx.nnx import attention_fn
from longctx.nnx.attention_fn import tokens_of_mask
from longctx.parallel import make_mesh

BATCH, LENGTH, WIDTH = 2, 11, 16
X = jnp.asarray(np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH)), jnp.float32)


def layer(function: Any, kv_heads: int = 2) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(
        4, WIDTH, num_kv_heads=kv_heads, attention_fn=function, decode=False, rngs=nnx.Rngs(0)
    )


@nnx.jit(static_argnames=("is_causal", "decode"))
def run(module: nnx.MultiHeadAttention, x: jax.Array, mask: Any = None, is_causal: bool = False, decode: bool = False):  # type: ignore[no-untyped-def]
    return module(x, mask=mask, is_causal=is_causal, decode=decode)


@functools.cache
def dense(is_causal: bool, kv_heads: int = 2) -> np.ndarray:
    return np.asarray(run(layer(nnx.dot_product_attention, kv_heads), X, is_causal=is_causal))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, {}),
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, {"layout": "striped"}, marks=pytest.mark.slow),
        pytest.param(5, {"method": "pass_q"}, marks=pytest.mark.slow),
        pytest.param(8, {"layout": "contiguous", "method": "all_gather"}, marks=pytest.mark.slow),
        pytest.param(8, {"method": "kvp"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_equals_dense_attention_of_a_length_that_divides_nothing(ranks: int, options: Any, is_causal: bool) -> None:
    module = layer(attention_fn(make_mesh(context=ranks), **options))
    np.testing.assert_allclose(run(module, X, is_causal=is_causal), dense(is_causal), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_heads_are_sharded_over_tensor(kv_heads: int) -> None:
    module = layer(attention_fn(make_mesh(context=3, tensor=2)), kv_heads)
    np.testing.assert_allclose(run(module, X, is_causal=True), dense(True, kv_heads), atol=1e-5)


@pytest.mark.slow
def test_gradients_equal_those_of_dense_attention() -> None:
    def gradient(function: Any) -> Any:
        loss = lambda module: jnp.sum(jnp.sin(module(X, is_causal=True)))  # noqa: E731
        return nnx.jit(nnx.grad(loss))(layer(function))

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=2e-5),
        gradient(attention_fn(make_mesh(context=3))),
        gradient(nnx.dot_product_attention),
    )


def test_decode_equals_dense_attention() -> None:
    ours, theirs = layer(attention_fn(make_mesh(context=3))), layer(nnx.dot_product_attention)
    for module in (ours, theirs):
        module.init_cache((BATCH, LENGTH, WIDTH))
    for token in range(LENGTH):
        x = X[:, token : token + 1]
        np.testing.assert_allclose(run(ours, x, decode=True), run(theirs, x, decode=True), atol=1e-5)


def test_decode_sends_states_and_no_cached_key() -> None:
    def sent(slots: int) -> float:
        mesh = make_mesh(context=3)
        module = layer(attention_fn(mesh))
        module.init_cache((BATCH, slots, WIDTH))
        graph, state = nnx.split(module)
        for name in ("cached_key", "cached_value"):
            state[name][...] = jax.device_put(state[name][...], NamedSharding(mesh, P(None, "context")))
        step = jax.jit(lambda state, x: nnx.merge(graph, state)(x, decode=True))
        text = step.lower(state, X[:, :1]).compile().as_text()
        return sum(collective.sent for collective in collectives(text, 3))

    states = 2 * BATCH * 4 * (4 + 1) * 4  # to two ranks, out and lse of 4 heads
    assert sent(30) == sent(3000) < states + 100


@given(st.data())
def test_masks_are_honoured_exactly_where_tokens_can_say_them(data: st.DataObject) -> None:
    """A mask that positions and segments make is recognised; of any mask, it is known whether it is one."""
    queries, keys = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    integers = lambda count: st.lists(st.integers(-1, 3), min_size=count, max_size=count)  # noqa: E731
    own = Tokens(*(np.array([data.draw(integers(queries))]) for _ in range(2)))  # type: ignore[arg-type]
    others = Tokens(np.arange(keys)[None], np.array([data.draw(integers(keys))]))  # type: ignore[arg-type]
    rule = AttentionRule(causal=True, scale=1.0)
    made = np.asarray(visible(rule.visible(own), others))
    # One run of keys for each segment, as in packed sequences: else the first key doesn't tell segments apart.
    is_made = data.draw(st.booleans())
    mask = made if is_made else np.array(data.draw(st.lists(st.booleans(), min_size=made.size, max_size=made.size)))
    mask = mask.reshape(1, 1, queries, keys)
    tokens = tokens_of_mask(mask)
    queries_of_mask = Tokens(tokens.q_positions, tokens.q_segment_ids)
    again = visible(rule.visible(queries_of_mask), Tokens(tokens.kv_positions, tokens.kv_segment_ids))
    assert bool(tokens.is_exact) == np.array_equal(again, mask[:, 0])
    assert tokens.is_exact or not is_made


def packed_mask() -> tuple[jax.Array, np.ndarray]:
    segments = np.tile(np.repeat([0, 1, -1], [4, 5, 2]), (BATCH, 1))
    mask = nnx.combine_masks(
        nnx.make_causal_mask(segments),
        nnx.make_attention_mask(segments, segments, jnp.equal),
        nnx.make_attention_mask(segments >= 0, segments >= 0),
    )
    assert mask is not None
    return mask, segments >= 0


def test_masks_of_packed_sequences_are_honoured() -> None:
    mask, is_token = packed_mask()
    want = run(layer(nnx.dot_product_attention), X, mask)
    module = layer(attention_fn(make_mesh(context=3)))
    for got in (run(module, X, mask), module(X, mask=mask)):
        np.testing.assert_allclose(got[is_token], want[is_token], atol=1e-5)


def test_other_masks_are_refused_or_make_nan() -> None:
    module = layer(attention_fn(make_mesh(context=3)))
    window = jnp.tril(jnp.ones((LENGTH, LENGTH), bool)) & ~jnp.tril(jnp.ones((LENGTH, LENGTH), bool), -3)
    assert np.isnan(run(module, X, window[None, None])).all()
    with pytest.raises(ValueError, match="mask must be the same for all heads"):
        module(X, mask=window[None, None])
    heads = jnp.ones((1, 4, LENGTH, LENGTH), bool).at[0, 2, :, 3:].set(False)
    assert np.isnan(run(module, X, heads)).all()
    with pytest.raises(ValueError, match="mask must have a shape that broadcasts"):
        module(X, mask=jnp.ones((1, 1, LENGTH, LENGTH + 1), bool))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"bias": jnp.zeros(())}, "bias"),
        ({"dropout_rate": 0.1}, "dropout_rate"),
        ({"module": object()}, "module"),
        ({"precision": "BF16_BF16_F32_X3"}, "precision"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused_by_name(arguments: Any, name: str) -> None:
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(NotImplementedError, match=name):
        attention_fn(make_mesh(context=2))(q, q, q, **arguments)


@pytest.mark.parametrize(("batch", "length", "kv_length"), [(2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 3, 3)])
def test_nothing_to_attend_to_is_zero_with_a_mask_too(batch: int, length: int, kv_length: int) -> None:
    q, k = np.ones((batch, length, 2, 8), np.float32), np.ones((batch, kv_length, 2, 8), np.float32)
    attend = attention_fn(make_mesh(context=2))
    for mask in (None, np.ones((1, 1, length, kv_length), bool), np.ones((batch, 1, length, kv_length), bool)):
        out = attend(q, k, k, mask=mask, is_causal=True)
        assert out.shape == q.shape
        assert not out.any()


def test_wrong_types_are_refused_by_name() -> None:
    q = jnp.ones((1, 4, 2, 8))
    attend = attention_fn(make_mesh(context=2))
    with pytest.raises(TypeError, match="mask must hold booleans, or numbers"):
        attend(q, q, q, mask="causal")
    with pytest.raises(ValueError, match="q must have a shape"):
        attend(q[0, 0], q[0, 0], q[0, 0])


def test_a_mesh_must_be_given_or_set() -> None:
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=r"mesh must be given, or set by jax\.set_mesh"):
        attention_fn()(q, q, q)
    with jax.set_mesh(make_mesh(context=2)), pytest.raises(ValueError, match=r"must be that of jax\.set_mesh"):
        attention_fn(make_mesh(context=4))(q, q, q)
    with pytest.raises(ValueError, match=r"must be that of jax\.set_mesh"):
        attention_fn(make_mesh(context=2).abstract_mesh)(q, q, q)
