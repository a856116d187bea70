"""Traced 64-bit integers, whose values are not known: positions and segments stay exact, and nothing wraps."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longctx.kernels import attention, paged_attention, plan_attention, write_pages
from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.triton import adapter as triton

Q, K, V = (jax.random.normal(jax.random.key(heads), (40, heads, 8)) for heads in (4, 2, 1))
V = jnp.concatenate([V, -V], 1)
KEYS = np.arange(40) // 3, np.arange(40) % 3 - 1
STARTS = st.sampled_from([0, 2**31 - 20, 2**32, -(2**40), 2**62])


NAMES = "q_positions", "kv_positions", "q_segment_ids", "kv_segment_ids"


def attend(implementation: str, with_plan: bool, masks: Any) -> Any:
    def loss(q: Any, k: Any, v: Any) -> Any:
        plan = plan_attention(q, k, *masks, implementation=implementation) if with_plan else None
        out, lse = attention(
            q,
            k,
            v,
            **({} if with_plan else dict(zip(NAMES, masks, strict=True))),
            implementation=implementation,
            plan=plan,
        )
        return jnp.sum(jnp.sin(out)), (out, lse)

    return jax.grad(loss, (0, 1, 2), has_aux=True)(Q, K, V)


attend_under_jit = jax.jit(attend, static_argnums=(0, 1))


@pytest.mark.parametrize(
    "implementation", ["xla", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reference", "triton"))]
)
@given(st.booleans(), STARTS, STARTS, st.sampled_from([1, 2**32 + 1]))
@example(False, 2**32, 0, 1)  # all keys that are not padding are seen by queries of their segment
@settings(max_examples=6)
def test_masks_are_those_of_the_whole_numbers(
    implementation: str, with_plan: bool, q_start: int, kv_start: int, apart: int
) -> None:
    """Values and gradients are those with positions of the same order, and segments that are equal where these are."""
    positions, segments = KEYS
    with jax.enable_x64(True), triton.interpreted():
        wide = [positions + q_start, positions + kv_start, *[np.where(segments < 0, segments, segments * apart)] * 2]
        got = attend_under_jit(implementation, with_plan, tuple(map(jnp.asarray, wide)))
    order = np.unique([*wide[0], *wide[1]], return_inverse=True)[1].reshape(2, -1)
    with triton.interpreted():
        want = attend(implementation, False, (*order, segments, segments))
    chex.assert_trees_all_close(got, want, atol=1e-5)


def test_what_the_types_can_not_hold_is_refused() -> None:
    def call(masks: Any) -> Any:
        return attention(Q, K, V, q_positions=masks[0], kv_positions=masks[1])

    for wide, x64 in ((jnp.uint32, False), (jnp.uint64, True)):
        with (
            jax.enable_x64(x64),
            pytest.raises(TypeError, match=f"kv_positions must be int32 or int64 .* {jnp.dtype(wide)}"),
        ):
            jax.eval_shape(call, (np.arange(40, dtype=np.int32), jnp.arange(40, dtype=wide)))
    half = [jnp.zeros((40, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)]
    with jax.enable_x64(True), adapter.interpreted(), pytest.raises(TypeError, match=r"must be int32 .*mosaic_gpu"):
        jax.eval_shape(
            lambda p: attention(*half, q_positions=p, kv_positions=p, implementation="mosaic_gpu"), jnp.arange(40)
        )


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_metadata_of_pages_saturate(implementation: str) -> None:
    """A row after all keys sees them; a page number or a sequence beyond int32 is none."""
    k_pages, v_pages = (x.reshape(5, 8, 2, 8) for x in (K, V))
    call = {
        "page_table": np.array([[3, 1, 2**32], [2, 2**40 + 1, 0]]),
        "page_index": np.array([[0, 1, 2**32], [0, 2**33 + 1, 2**62]]),
        "kv_lengths": np.array([13, 5]),
        "q_positions": np.array([2**32, 12, 2**40 + 1, 3]),
        "q_sequence": np.array([0, 0, 1, 2**32]),
    }
    near = {name: np.minimum(x, 2**20) for name, x in call.items()}
    near["q_sequence"] = np.array([0, 0, 1, -1])
    want = paged_attention(Q[:4], k_pages, v_pages, **near, implementation=implementation)
    with jax.enable_x64(True):
        run = jax.jit(lambda call: paged_attention(Q[:4], k_pages, v_pages, **call, implementation=implementation))
        chex.assert_trees_all_close(run({name: jnp.asarray(x) for name, x in call.items()}), want, atol=1e-6)


def test_slots_beyond_int32_are_dropped() -> None:
    pages, rows = jnp.zeros((5, 8, 2, 8)), jnp.ones((4, 2, 8))
    page, offset = np.array([0, 2**32, 1, 2**32 + 1]), np.array([2**32, 0, 1, 2**33])
    with jax.enable_x64(True):
        written, _ = jax.jit(lambda *at: write_pages(pages, pages, rows, rows, *at))(
            jnp.asarray(page), jnp.asarray(offset)
        )
    chex.assert_trees_all_equal(written, pages.at[1, 1].set(1))
