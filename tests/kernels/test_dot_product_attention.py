"""`dot_product_attention` beside `jax.nn`'s, and the arrays and functions of bias that `attention` takes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from longctx import attention, context_parallel_attention, dot_product_attention, make_mesh

B, T, S, N, K, H = 2, 37, 61, 4, 2, 8
RNG = np.random.default_rng(0)
SLOPES = np.float32(2) ** -np.arange(1, 9)


def random(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


LENGTHS = {"query_seq_lengths": np.array([20, T], np.int32), "key_value_seq_lengths": np.array([S, 1], np.int32)}
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "window": {"local_window_size": 5},
    "two sides": {"local_window_size": (7, 2)},
    "causal window": {"local_window_size": (7, 2), "is_causal": True},
    "lengths": LENGTHS,
    "query lengths": {"query_seq_lengths": np.array([0, 5], np.int32), "is_causal": True},
    "bias": {"bias": random(B, N, T, S)},
    "bias of heads": {"bias": random(1, N, 1, S), "is_causal": True},
    "mask": {"mask": RNG.random((B, 1, T, S)) < 0.8},
    "mask of keys": {"mask": RNG.random((1, 1, 1, S)) < 0.8, "local_window_size": (30, 30)},
    "everything": {"bias": random(B, 1, T, S), "mask": RNG.random((1, N, T, S)) < 0.8, "is_causal": True} | LENGTHS,
}


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_jax_nn(case: str) -> None:
    """But for rows that see no key, which are 0 and not the mean of all values."""
    named = dict(CASES[case])
    arrays = [random(B, T, N, H), random(B, S, K, H), random(B, S, K, H), named.pop("bias", None)]
    weights = random(B, T, N, H)
    seen = jnp.ones((B, T, N), bool)

    def results(function: Any) -> Any:
        def weighted(*arrays: Any) -> Any:
            out, lse = function(*arrays, return_residual=True, **named)
            return jnp.sum(jnp.where(seen[..., None], out, 0) * weights), (out, lse)

        argnums = tuple(n for n, x in enumerate(arrays) if x is not None)
        return jax.jit(jax.value_and_grad(weighted, argnums, has_aux=True))(*arrays)

    (_, (_, lse)), _ = results(jax.nn.dot_product_attention)
    seen = lse > -1e30
    (want, (want_out, want_lse)), want_gradients = results(jax.nn.dot_product_attention)
    (got, (out, lse)), gradients = results(dot_product_attention)
    assert float(got) == pytest.approx(float(want), rel=1e-4, abs=1e-4)
    np.testing.assert_allclose(out[seen], want_out[seen], atol=1e-5)
    np.testing.assert_allclose(lse[seen], want_lse[seen], atol=1e-5)
    assert not np.asarray(out[~seen]).any()
    for one, other in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_without_a_batch_shapes_and_dtypes_are_those_of_jax_nn(dtype: Any) -> None:
    q, k, v, bias = (x.astype(dtype) for x in (random(T, N, H), random(S, K, H), random(S, K, H), random(1, N, T, S)))
    for residual in (False, True):
        got, want = (
            function(q, k, v, bias, return_residual=residual)
            for function in (dot_product_attention, jax.nn.dot_product_attention)
        )
        found, expected = (jax.tree.map(lambda x: (x.shape, x.dtype), each) for each in (got, want))
        assert found == expected
    np.testing.assert_allclose(*(x[0].astype(np.float32) for x in (got, want)), atol=0.02)


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        ({"mask": np.zeros((T, S), np.float32)}, TypeError, "mask must be boolean, got float32: numbers"),
        ({"mask": np.ones((3, S), bool)}, ValueError, r"mask must have a shape that broadcasts to"),
        ({"mask": np.ones((3, S), bool), "bias": np.zeros((T, S))}, ValueError, "mask must have a shape"),
        ({"bias": np.ones((T, S), bool)}, TypeError, "bias must be floating point, got bool"),
        ({"query_seq_lengths": np.array([1, 2, 3])}, ValueError, r"query_seq_lengths must have the shape \(2,\)"),
        ({"implementation": "cudnn"}, ValueError, "implementation must be None, one of"),
        ({"local_window_size": -1}, ValueError, "^local_window_size must be"),
    ],
)
def test_refuses(named: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dot_product_attention(random(B, T, N, H), random(B, S, K, H), random(B, S, K, H), **named)


def alibi(head: jax.Array, q_position: jax.Array, kv_position: jax.Array) -> jax.Array:
    return -jnp.asarray(SLOPES)[head] * jnp.abs(q_position - kv_position)


def loss(function: Any) -> Any:
    return lambda *arrays: jnp.sum(jnp.sin(function(*arrays)))


QKV = random(2, 40, 8, 16), random(2, 40, 2, 16), random(2, 40, 2, 16)
POSITIONS = np.arange(40)
ARRAY = jnp.asarray(-SLOPES[:, None, None] * np.abs(POSITIONS[:, None] - POSITIONS))


def dense(bias: jax.Array, *qkv: jax.Array) -> jax.Array:
    return attention(*qkv, bias=bias, implementation="reference")[0]


def test_a_bias_is_added_to_scores() -> None:
    """The dense implementation, which other tests compare with, against NumPy."""
    q, k, v = (np.asarray(x, np.float64) for x in QKV)
    scores = np.einsum("btkgh,bskh->bkgts", q.reshape(2, 40, 2, 4, 16), k) / 4
    scores += np.asarray(ARRAY, np.float64).reshape(1, 2, 4, 40, 40)
    scores[..., POSITIONS[:, None] < POSITIONS] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("bkgts,bskh->btkgh", weights / weights.sum(-1, keepdims=True), v).reshape(q.shape)
    for bias in (ARRAY, alibi):
        np.testing.assert_allclose(dense(bias, *QKV), want, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("bias", ["array", "function"])
def test_bias_of_sharded_arrays(kind: AxisType, bias: str) -> None:
    """Each device has some heads, whose numbers a function gets, and the gradient of an array is whole."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind, kind))
    want = jax.grad(loss(dense), (0, 1, 2, 3))(ARRAY, *QKV)
    with jax.set_mesh(mesh):
        specs = P("tensor"), P("data", None, "tensor"), P("data"), P("data")
        arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((ARRAY, *QKV), specs, strict=True)]
        if bias == "array":
            got = jax.jit(jax.grad(loss(lambda bias, *qkv: attention(*qkv, bias=bias)[0]), (0, 1, 2, 3)))(*arrays)
        else:
            got = (None, *jax.jit(jax.grad(loss(lambda *qkv: attention(*qkv, bias=alibi)[0]), (0, 1, 2)))(*arrays[1:]))
    for one, other in zip(got, want, strict=True):
        if one is not None:
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-4)


def test_vmap_of_a_bias_and_of_its_gradient() -> None:
    q, k, v = QKV
    biases = jnp.stack([ARRAY, 2 * ARRAY])
    got = jax.vmap(lambda q, k, v, bias: attention(q, k, v, bias=bias)[0])(q, k, v, biases)
    want = jnp.stack([dense(bias, *(x[n] for x in QKV)) for n, bias in enumerate(biases)])
    np.testing.assert_allclose(got, want, atol=1e-5)
    gradient = jax.grad(loss(lambda bias: jax.vmap(lambda *qkv: attention(*qkv, bias=bias)[0])(q, k, v)))(ARRAY)
    np.testing.assert_allclose(gradient, jax.grad(loss(dense))(ARRAY, *QKV), atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "method"),
    [
        ({"context": 2, "tensor": 4}, "pass_kv"),
        ({"context": 3, "tensor": 2}, "pass_q"),
        ({"context": 4}, "kvp"),
        ({"context": 2, "tensor": 2, "data": 2}, "pass_kv"),
        ({"context": 2, "data": 2}, "ulysses"),
    ],
)
def test_a_function_knows_its_heads_and_positions_on_each_rank(sizes: dict[str, int], method: Any) -> None:
    mesh = make_mesh(**sizes)
    got = context_parallel_attention(*QKV, mesh=mesh, method=method, bias=alibi)
    np.testing.assert_allclose(got, dense(ARRAY, *QKV), atol=1e-5)
    with pytest.raises(NotImplementedError, match="bias must be a function of heads and positions where keys are"):
        context_parallel_attention(*QKV, mesh=mesh, method=method, bias=ARRAY)  # type: ignore[arg-type]


def test_a_function_of_booleans_says_what_is_seen() -> None:
    window, _ = attention(*QKV, window=(3, 0))
    for implementation in ("xla", "reference"):
        got, _ = attention(*QKV, bias=lambda head, i, j: i - j <= 3, implementation=implementation)  # type: ignore[arg-type]
        np.testing.assert_allclose(got, window, atol=1e-5)


def test_a_function_that_holds_traced_arrays_is_refused() -> None:
    def of_slope(slope: float) -> jax.Array:
        return jnp.sum(attention(*QKV, bias=lambda head, i, j: slope * (i - j) + 0 * head)[0])

    with pytest.raises(TypeError, match="bias must be a function that holds no traced arrays"):
        jax.grad(of_slope)(1.0)


def test_the_first_implementation_that_supports_the_case_is_taken() -> None:
    out, _ = attention(*QKV, implementation=["mosaic_gpu", "xla"])
    np.testing.assert_array_equal(out, attention(*QKV, implementation="xla")[0])
