"""Rotary angles, against arbitrary precision."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.models.rope import apply_rope, rope_cos_sin, rope_table
from longctx.models.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling

ROPES = [
    RopeConfig(500000.0),
    RopeConfig(500000.0, LinearScaling(4.0)),
    RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    RopeConfig(1000000.0, YarnScaling(4.0, 32768)),
]
HEAD_DIM = 64


def exact_cos_sin(rope: RopeConfig, position: int) -> tuple[np.ndarray, np.ndarray]:
    with mpmath.workdps(50):
        frequencies = [mpmath.mpf(float(f)) for f in rope.inverse_frequencies(HEAD_DIM)]
        cos = [float(rope.attention_factor * mpmath.cos(position * f)) for f in frequencies]
        sin = [float(rope.attention_factor * mpmath.sin(position * f)) for f in frequencies]
    return np.array(cos), np.array(sin)


def assert_exact(rope: RopeConfig, positions: list[int]) -> None:
    table = rope_table(rope, HEAD_DIM)
    cos, sin = jax.jit(lambda p: rope_cos_sin(table, p))(np.array(positions, np.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    assert cos.shape == sin.shape == (len(positions), HEAD_DIM // 2)
    for i, position in enumerate(positions):
        exact_cos, exact_sin = exact_cos_sin(rope, position)
        np.testing.assert_allclose(cos[i], exact_cos, rtol=0, atol=1e-6)
        np.testing.assert_allclose(sin[i], exact_sin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rope", ROPES)
def test_angles_are_exact_at_ten_million(rope: RopeConfig) -> None:
    assert_exact(rope, [0, 1, 1_000_000, 9_999_999, 10_000_000, 2**31 - 1])


@given(rope=st.sampled_from(ROPES), positions=st.lists(st.integers(0, 2**31 - 1), min_size=6, max_size=6))
def test_angles_are_exact_anywhere(rope: RopeConfig, positions: list[int]) -> None:
    assert_exact(rope, positions)


def test_unscaled_frequencies_are_the_formula() -> None:
    with mpmath.workdps(50):
        exact = [float(mpmath.power(500000, mpmath.mpf(-2 * i) / HEAD_DIM)) for i in range(HEAD_DIM // 2)]
    np.testing.assert_allclose(RopeConfig(500000.0).inverse_frequencies(HEAD_DIM), exact, rtol=1e-14)


@given(shift=st.integers(0, 10_000_000), distance=st.integers(0, 1000))
def test_scores_depend_on_distance_only(shift: int, distance: int) -> None:
    """What rotary embedding is for; in plain float32 this fails from about position 100,000."""
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, HEAD_DIM)).astype(np.float32)
    table = rope_table(ROPES[0], HEAD_DIM)

    def score(q_position: int, k_position: int) -> float:
        rotated_q = apply_rope(jnp.asarray(q), *rope_cos_sin(table, jnp.array([q_position])))
        rotated_k = apply_rope(jnp.asarray(k), *rope_cos_sin(table, jnp.array([k_position])))
        return float((rotated_q * rotated_k).sum())

    assert score(shift + distance, shift) == pytest.approx(score(distance, 0), abs=5e-5)


def test_apply_rope_keeps_dtype_and_pairs_halves() -> None:
    x = jnp.arange(8, dtype=jnp.bfloat16).reshape(1, 1, 8)
    quarter_turn = jnp.zeros((1, 4)), jnp.ones((1, 4))
    rotated = apply_rope(x, *quarter_turn)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated[0, 0].astype(float), [-4, -5, -6, -7, 0, 1, 2, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"theta": 1.0}, "theta"),
        ({"theta": float("nan")}, "theta"),
        ({"scaling": LinearScaling(0.0)}, "factor"),
        ({"scaling": Llama3Scaling(8.0, 4.0, 4.0, 8192)}, "low_freq_factor"),
    ],
)
def test_bad_rope_config(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig(**arguments)
