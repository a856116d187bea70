"""Drawing tokens: what may be drawn, how often, and from which seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.models.sampling import GREEDY, Sampling, keep_top_k, keep_top_p

LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))


def _kept(logits: jax.Array) -> list[int]:
    return np.flatnonzero(np.isfinite(logits)).tolist()


def test_greedy_takes_the_likeliest() -> None:
    assert int(GREEDY.draw(LOGITS, jnp.int32(0))) == 1


@pytest.mark.parametrize(("k", "kept"), [(None, [0, 1, 2, 3]), (1, [1]), (2, [1, 3]), (9, [0, 1, 2, 3])])
def test_top_k(k: int | None, kept: list[int]) -> None:
    assert _kept(keep_top_k(LOGITS, k)) == kept


@pytest.mark.parametrize(
    ("p", "kept"), [(1.0, [0, 1, 2, 3]), (0.01, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 2, 3])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, kept: list[int]) -> None:
    assert _kept(keep_top_p(LOGITS, p)) == kept


@given(st.floats(0.2, 3.0), st.integers(0, 2**31 - 1))
def test_frequencies_follow_the_temperature(temperature: float, seed: int) -> None:
    sampling = Sampling(temperature=temperature, top_k=3, seed=seed)
    tokens = np.asarray(jax.vmap(lambda position: sampling.draw(LOGITS, position))(jnp.arange(4000)))
    want = np.array(jax.nn.softmax(keep_top_k(LOGITS / temperature, 3)))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 4000, want, atol=0.05)
    assert not (tokens == 0).any()


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    def draw(seed: int) -> list[int]:
        return [int(Sampling(1.0, seed=seed).draw(LOGITS, jnp.int32(i))) for i in range(30)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len(set(draw(1))) > 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0 and finite, got -1.0"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"top_k": 0}, "top_k must be an integer of at least 1 or None, got 0"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"seed": 2**64}, "seed must be an integer from 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0"),
    ],
)
def test_refuses(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**values)  # type: ignore[arg-type]
