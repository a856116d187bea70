"""Compiled programs of `attention`: memory linear in the lengths, no copies, and use inside `shard_map`."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from longctx.kernels import attention

pytestmark = pytest.mark.usefixtures("users_fusions")
MIB = 2**20
LONG = 131072


def _loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.sum(attention(q, k, v)[0])


def _temp_bytes(length: int) -> int:
    x = jax.ShapeDtypeStruct((length, 2, 64), jnp.float32)
    compiled = jax.jit(jax.value_and_grad(_loss, (0, 1, 2))).lower(x, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_of_forward_and_backward_is_linear() -> None:
    """Inputs, gradients and temporaries of 131072 tokens stay below 2 GiB; dense scores would take 128 GiB."""
    short, long = (_temp_bytes(length) for length in (LONG // 2, LONG))
    assert long < 2.05 * short
    arrays = 6 * LONG * 2 * 64 * 4
    assert long + arrays < 2048 * MIB


def test_memory_is_linear_at_a_million_tokens() -> None:
    """Eight query heads a KV head make 8,192 x 4,096 pairs of blocks, which must not be compared all at once."""

    def forward(q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attention(
            q, k, k, **dict.fromkeys(("q_positions", "kv_positions", "q_segment_ids", "kv_segment_ids"), positions)
        )

    def temp_bytes(length: int) -> int:
        q, k = (jax.ShapeDtypeStruct((length, heads, 4), jnp.float32) for heads in (8, 1))
        positions = jax.ShapeDtypeStruct((length,), jnp.int32)
        return jax.jit(forward).lower(q, k, positions).compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(1 << 20) < 2.1 * temp_bytes(1 << 19)


@pytest.mark.slow
def test_peak_memory_of_a_real_run_at_131072_tokens() -> None:
    """The process's own peak, JAX and all, over a forward and backward pass."""
    program = f"""
import resource, jax, jax.numpy as jnp
from longctx.kernels import attention
q, k, v = jax.random.normal(jax.random.key(0), (3, {LONG}, 2, 64))
loss = lambda q, k, v: jnp.sum(attention(q, k, v)[0] ** 2)
value, grads = jax.block_until_ready(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v))
assert all(bool(jnp.isfinite(x).all()) for x in (value, *grads))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    peak = int(result.stdout) / 1024
    print(f"peak {peak:.0f} MiB")
    assert peak < 2048


def test_work_follows_what_is_visible() -> None:
    """Keys after the last visible one are never read: NaNs there change nothing, in any block after it."""
    q, k = jnp.ones((1, 4, 8)), jnp.ones((5000, 2, 8)).at[1024:].set(jnp.nan)
    out, lse = attention(q, k, k, q_positions=jnp.array([1000]))
    assert bool(jnp.isfinite(out).all())
    np.testing.assert_allclose(lse, np.log(1001) + 8**0.5, rtol=1e-6)


@pytest.mark.parametrize("half", [64, 256, 750])
def test_no_tile_has_both_parts_of_a_zigzag_shard(half: int) -> None:
    """Rank 0 of 2 has the first and the last quarter: NaNs among the last keys change nothing for the first queries."""
    positions = jnp.append(jnp.arange(half), 3 * half + jnp.arange(half))
    q = jnp.ones((2 * half, 1, 8))
    v = q.at[half:].set(jnp.nan)
    out, _ = attention(q, q, v, q_positions=positions, kv_positions=positions, implementation="xla")
    np.testing.assert_allclose(out[:half], 1, rtol=1e-6)


@pytest.mark.parametrize("limit", ["q_first", "q_last"])
def test_keys_outside_of_the_limits_of_queries_are_not_read(limit: str) -> None:
    """Chunks, of which a limit on one side is enough to leave out the others: NaNs there change nothing."""
    chunk, positions = 1024, jnp.arange(2048)
    q, is_read = jnp.ones((2048, 1, 8)), positions < chunk if limit == "q_last" else positions >= chunk
    v = jnp.where(is_read[:, None, None], q, jnp.nan)
    limits = {"q_first": positions // chunk * chunk, "q_last": positions // chunk * chunk + chunk - 1}
    out, _ = attention(q, q, v, **{limit: limits[limit]}, causal=limit == "q_first", implementation="xla")
    np.testing.assert_allclose(out[is_read], 1, rtol=1e-6)


@pytest.mark.slow
def test_inside_shard_map_with_operands_that_vary_differently() -> None:
    """`check_vma=True`; the gradient of what was replicated is summed over the mesh."""
    mesh = jax.make_mesh((4, 2), ("context", "data"), axis_types=(AxisType.Auto,) * 2)
    P = PartitionSpec
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 64, heads, 8)) for key, heads in zip(keys, (4, 2, 2), strict=True))
    k = k[:1]  # the same for both sequences
    positions = jnp.arange(64)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, q_positions: jax.Array) -> jax.Array:
        k = jnp.broadcast_to(k, v.shape)
        return attention(q, k, v, q_positions=q_positions, kv_positions=jnp.arange(64))[0]

    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("data", "context"), P(), P("data"), P("context")),
        out_specs=P("data", "context"),
        check_vma=True,
    )

    def loss(f):  # type: ignore[no-untyped-def]
        return lambda q, k, v: jnp.sum(jnp.sin(f(q, k, v, positions)))

    np.testing.assert_allclose(sharded(q, k, v, positions), local(q, k, v, positions), atol=1e-5)
    got, want = (jax.jit(jax.grad(loss(f), (0, 1, 2)))(q, k, v) for f in (sharded, local))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
