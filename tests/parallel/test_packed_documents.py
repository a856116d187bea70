"""Packed documents by cumulative lengths, in zigzag over the ranks, as ring-flash-attention tests its rings."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from longctx.kernels import attention
from longctx.parallel import all_gather_kv, make_mesh, plan_varseq, ring_pass_kv, ring_pass_q


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("exchange", "ends", "heads", "size", "dtype", "ranks"),
    [
        slow(ring_pass_kv, [0, 128, 1248, 4240], 5, 128, "bfloat16", 8),
        slow(ring_pass_q, [0, 128, 1248, 4240], 5, 128, "bfloat16", 8),
        slow(all_gather_kv, [0, 128, 1248, 4240], 5, 128, "bfloat16", 8),
        slow(ring_pass_kv, [0, 128, 304, 880], 5, 64, "bfloat16", 8),
        slow(ring_pass_kv, [0, 1, 132, 301], 5, 64, "bfloat16", 8),
        (ring_pass_kv, [0, 10, 10, 40], 2, 16, "float32", 4),  # one of them is empty
    ],
)
def test_documents(exchange: Any, ends: list[int], heads: int, size: int, dtype: str, ranks: int) -> None:
    """Values and gradients are those of the documents one by one, in float32."""
    rng, lengths = np.random.default_rng(0), np.diff(ends)
    q, k, v, d_out = (jnp.asarray(rng.standard_normal((ends[-1], heads, size)), dtype) for _ in range(4))
    plan = plan_varseq(lengths.tolist(), None, ranks)
    tokens = [x.ravel() for x in (plan.q_positions, plan.kv_positions, plan.q_segment_ids, plan.kv_segment_ids)]
    rows, keys = plan.q_indices.ravel(), plan.kv_indices.ravel()
    place = np.argsort(np.where(rows < 0, rows.size, rows), kind="stable")[: ends[-1]]
    spec = P("context")

    @jax.jit
    @jax.shard_map(mesh=make_mesh(context=ranks), in_specs=(spec,) * 7, out_specs=(spec, spec))
    def shards(*arguments: Any) -> Any:
        return exchange(*arguments)

    def packed(q: Any, k: Any, v: Any) -> Any:
        out, lse = shards(q[rows], k[keys], v[keys], *tokens)
        return out[place], lse[place]

    def one_by_one(q: Any, k: Any, v: Any) -> Any:
        parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        states = [attention(q[x], k[x], v[x], implementation="reference") for x in parts]
        return tuple(map(jnp.concatenate, zip(*states, strict=True)))

    got, vjp = jax.vjp(packed, q, k, v)
    want, want_vjp = jax.vjp(one_by_one, *(x.astype(jnp.float32) for x in (q, k, v)))
    tolerance = 1e-2 if dtype == "bfloat16" else 1e-5
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=tolerance, rtol=tolerance)
    zeros = jnp.zeros_like(want[1])
    for a, b in zip(vjp((d_out, zeros)), want_vjp((d_out.astype(jnp.float32), zeros)), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=2 * tolerance, rtol=2 * tolerance)
