"""Bad input to `attention` raises an error that names the argument."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longctx.kernels import attention, plan_attention

Q, K = jnp.ones((6, 4, 8)), jnp.ones((6, 2, 8))
SIX = jnp.arange(6)


@dataclasses.dataclass
class Slope:
    """A function that has no hash."""

    slope: float

    def __call__(self, head: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        return self.slope * (j - i)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, "q must be a jax.Array or numpy.ndarray, got list"),
        ({"q": jnp.ones((6, 8))}, ValueError, "q must have a shape"),
        ({"v": jnp.ones((2, 8))}, ValueError, "v must have a shape"),
        ({"q": jnp.ones((6, 4, 8), int)}, TypeError, "q must be floating point, got int32"),
        ({"k": K.astype(jnp.bfloat16)}, TypeError, "one dtype, got float32 and k of bfloat16"),
        ({"v": jnp.ones((5, 2, 8))}, ValueError, "k and v must have one shape"),
        ({"q": jnp.ones((6, 3, 8))}, ValueError, "multiple of k's heads"),
        ({"q": jnp.ones((6, 0, 8))}, ValueError, "multiple of k's heads"),
        ({"q": jnp.ones((6, 4, 7))}, ValueError, "head size of q, 7, got 8"),
        ({"q": jnp.ones((2, 6, 4, 8))}, ValueError, "batch dimensions of q"),
        ({"q": jnp.ones((5, 4, 8))}, ValueError, "q_positions must be given when causal and T != S"),
        ({"q_positions": SIX.astype(float)}, TypeError, "q_positions must be integers, got float32"),
        (
            {"q_positions": SIX, "kv_positions": jnp.arange(5)},
            ValueError,
            r"kv_positions must have the shape \(6,\), got \(5,\)",
        ),
        (
            {name: x[None] for name, x in (("q", Q), ("k", K), ("v", K))} | {"q_positions": jnp.arange(5)},
            ValueError,
            r"q_positions must have the shape \(6,\) or \(1, 6\), got \(5,\)",
        ),
        ({"q_positions": jnp.zeros((2, 6), int)}, ValueError, r"q_positions must have the shape \(6,\)"),
        ({"q_first": SIX[1:]}, ValueError, r"q_first must have the shape \(6,\), got \(5,\)"),
        ({"q_first": SIX.astype(float)}, TypeError, "q_first must be integers, got float32"),
        ({"q_last": SIX[None]}, ValueError, r"q_last must have the shape \(6,\), got \(1, 6\)"),
        ({"q_last": np.full(6, 2**31)}, ValueError, "q_last must fit into int32"),
        ({"q_segment_ids": SIX}, ValueError, "q_segment_ids and kv_segment_ids must be given both or neither"),
        ({"q_segment_ids": SIX, "kv_segment_ids": SIX > 2}, TypeError, "kv_segment_ids must be integers, got bool"),
        ({"kv_positions": SIX + 100}, ValueError, "q_positions must be given when causal and kv_positions are"),
        ({"q_positions": np.full(6, 2**31)}, ValueError, "q_positions must fit into int32, got values from 2147483648"),
        ({"q_positions": np.full(6, 2**32 - 1, np.uint32)}, ValueError, "q_positions must fit into int32"),
        ({"q_positions": [2**40] * 6}, ValueError, "q_positions must fit into int32"),
        ({"scale": jnp.float32(1)}, ValueError, "scale must be a finite number"),
        ({"v": np.zeros((6, 2, 0), np.float32)}, ValueError, r"v must have a head size over 0, got \(6, 2, 0\)"),
        ({"implementation": []}, ValueError, "implementation must be None, one of"),
        ({"implementation": ["xla", "fast"]}, ValueError, "implementation must be None, one of"),
        ({"implementation": {"xla", "reference"}}, ValueError, "implementation must be None, one of"),
        ({"implementation": [["xla"]]}, ValueError, "implementation must be None, one of"),
        ({"implementation": 3}, ValueError, "implementation must be None, one of"),
        (
            {"bias": np.zeros((3, 3), np.float32)},
            ValueError,
            r"bias must have a shape that broadcasts to \(.*, got \(3, 3",
        ),
        ({"bias": np.zeros((1, 1), int)}, TypeError, "bias must be floating point"),
        ({"bias": lambda head, i, j: jnp.zeros((6, 6))}, ValueError, "bias must return an array that broadcasts to"),
        ({"bias": lambda head, i, j: np.zeros((4, 1, 1))}, ValueError, "bias must return an array that broadcasts to"),
        ({"bias": lambda head, i, j: None}, ValueError, "bias must return an array that broadcasts to .* got None"),
        (
            {"bias": lambda head, i, j: (i - j) * 1j},
            TypeError,
            "bias must return real numbers or booleans",
        ),
        ({"bias": Slope(1.0)}, TypeError, "bias must be a hashable function"),
        (
            {"is_causal": True},
            TypeError,
            "has no is_causal: give causal instead, or call longctx.dot_product_attention",
        ),
        ({"mask": None}, TypeError, "has no mask: give positions and segments, or bias of booleans, instead"),
        (
            {"implementation": "fast"},
            ValueError,
            r"implementation must be None, one of \['mosaic_gpu', 'reference', 'triton', 'xla'\], or a sequence",
        ),
        ({"scale": float("nan")}, ValueError, "scale must be a finite number, got nan"),
        ({"out_dtype": jnp.int32}, TypeError, "out_dtype must be a floating-point type, got int32"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(**({"q": Q, "k": K, "v": K} | arguments))


def test_unequal_lengths_need_no_positions_without_causality() -> None:
    out, _ = attention(Q[:5], K, K, causal=False)
    assert out.shape == (5, 4, 8)


def test_refusal_is_the_same_under_jit() -> None:
    with pytest.raises(ValueError, match="multiple of k's heads"):
        jax.jit(attention)(jnp.ones((6, 3, 8)), K, K)


PLAN = plan_attention(Q, K, implementation="xla")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q_positions": SIX}, ValueError, "q_positions must not be given with a plan, which holds those"),
        ({"kv_segment_ids": SIX, "q_segment_ids": SIX}, ValueError, "q_segment_ids must not be given with a plan"),
        ({"kv_positions": SIX}, ValueError, "kv_positions must not be given with a plan"),
        (
            {"causal": False},
            ValueError,
            r"plan must be for q and k of .*, causal=False, .*, got one for .*, causal=True",
        ),
        ({"implementation": "reference"}, ValueError, "the implementation reference, got one for .* and xla"),
        (
            {"q": Q[:5]},
            ValueError,
            r"plan must be for q and k of \(5, 4, 8\) and \(6, 2, 8\), .* got one for \(6, 4, 8\)",
        ),
        ({"k": K[:5], "v": K[:5]}, ValueError, r"plan must be for q and k of \(6, 4, 8\) and \(5, 2, 8\)"),
        ({"q": [1.0]}, TypeError, "q must be a jax.Array or numpy.ndarray, got list"),
        ({"plan": 3}, TypeError, "plan must be what plan_attention returns, got int"),
    ],
)
def test_wrong_plans_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(**({"q": Q, "k": K, "v": K, "plan": PLAN} | arguments))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": jnp.ones((5, 4, 8))}, ValueError, "q_positions must be given when causal and T != S"),
        ({"k": 3}, TypeError, "k must be a jax.Array or numpy.ndarray, got int"),
        ({"q": jax.ShapeDtypeStruct((6, 3, 8), jnp.float32)}, ValueError, "multiple of k's heads"),
        ({"q_positions": jnp.zeros((2, 6), int)}, ValueError, r"q_positions must have the shape \(6,\)"),
        ({"implementation": "mosaic_gpu"}, NotImplementedError, "implementation 'mosaic_gpu' needs"),
    ],
)
def test_wrong_arguments_of_a_plan_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_attention(**({"q": Q, "k": K} | arguments))
