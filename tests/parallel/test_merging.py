"""Groups of KVP, decode rows without a sequence, errors over 1 to 8 ranks, and gradients under `check_vma=False`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from longctx.kernels import attention
from longctx.parallel import (
    all_gather_kv,
    kvp_attention,
    make_mesh,
    ring_pass_kv,
    ring_pass_q,
    shard_positions,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)

RANKS, ROWS, KEYS = 4, 6, 10


@functools.cache
def grouped(merge: str, whole: bool):  # type: ignore[no-untyped-def]
    """Values and gradients, of a sum weighted by rank and row, where each rank has its own queries, keys and groups."""

    def local(q, k, v, groups, q_segments, kv_segments):  # type: ignore[no-untyped-def]
        out, lse = kvp_attention(
            *(q[0], k[0], v[0]),
            q_segment_ids=q_segments[0],
            kv_segment_ids=kv_segments[0],
            group_ids=groups if whole else groups[0],
            merge=merge,
            causal=False,
        )
        return out[None], lse[None]

    spec = P("context")
    specs = (spec, spec, spec, P() if whole else spec, spec, spec)
    mapped = jax.shard_map(local, mesh=make_mesh(context=RANKS), in_specs=specs, out_specs=spec)

    def loss(q, k, v, tokens, d_out, d_lse):  # type: ignore[no-untyped-def]
        out, lse = mapped(q, k, v, *tokens)
        seen = jnp.where(lse == -jnp.inf, 0, lse)
        return jnp.sum(out * d_out) + jnp.sum(seen * d_lse), (out, lse)

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


def oracle(arrays, groups, q_segments, kv_segments, d_out, d_lse):  # type: ignore[no-untyped-def]
    """Dense, by what a group means: a row's keys are those of all ranks that have it in the same group."""
    members = groups[:, None] == groups[None]  # [to, from, row]

    def loss(q, k, v):  # type: ignore[no-untyped-def]
        dense = functools.partial(attention, causal=False, implementation="reference")
        parts = [
            dense(q[r], k[r], v[r], q_segment_ids=q_segments[r], kv_segment_ids=kv_segments[r]) for r in range(RANKS)
        ]
        outs, lses = (jnp.stack(x) for x in zip(*parts, strict=True))
        lses = jnp.where(members[..., None], lses[None], -jnp.inf)
        lse = jax.nn.logsumexp(lses, 1)
        safe = jnp.where(lse == -jnp.inf, 0, lse)
        out = jnp.sum(outs[None] * jnp.exp(lses - safe[:, None])[..., None], 1)
        return jnp.sum(out * d_out) + jnp.sum(safe * d_lse), (out, lse)

    return jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)


@pytest.mark.parametrize(
    ("merge", "whole"), [("all_to_all", True), pytest.param("gather", False, marks=pytest.mark.slow)]
)
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=2)
def test_rows_merge_within_their_group(merge: str, whole: bool, seed: int) -> None:
    """Any groups: none, some or all ranks of a row; 6 rows, which 4 ranks do not divide."""
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 3, (RANKS, ROWS))
    shared = {(group, row): rng.standard_normal((4, 8)) for group in range(3) for row in range(ROWS)}
    q = np.array([[shared[groups[rank, row], row] for row in range(ROWS)] for rank in range(RANKS)])
    k, v = rng.standard_normal((2, RANKS, KEYS, 2, 8))
    # All rows see all keys but the padding; one rank has nothing else.
    q_segments, kv_segments = np.zeros((RANKS, ROWS), int), np.where(rng.random((RANKS, KEYS)) < 0.2, -1, 0)
    kv_segments[rng.integers(RANKS)] = -1
    d_out, d_lse = rng.standard_normal(q.shape), rng.standard_normal(q.shape[:-1])

    with jax.enable_x64(True):
        want = jax.jit(oracle)([jnp.asarray(x) for x in (q, k, v)], groups, q_segments, kv_segments, d_out, d_lse)
    floats = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    tokens = tuple(jnp.asarray(x, jnp.int32) for x in (groups, q_segments, kv_segments))
    got = grouped(merge, whole)(*floats, tokens, jnp.asarray(d_out, jnp.float32), jnp.asarray(d_lse, jnp.float32))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=1e-5 * max(1, np.abs(b, where=np.isfinite(b), out=np.zeros_like(b)).max())
        )


def test_a_merge_is_rounded_once_also_with_sinks() -> None:
    """Sinks are added to float32, whichever collectives merge: they give the same to the bit, or one ulp of float32."""
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in np.random.default_rng(0).standard_normal((3, 64, 2, 16)))

    def merged(merge: str) -> jax.Array:
        local = lambda q, k, v: kvp_attention(q, k, v, causal=False, sinks=jnp.ones(2), merge=merge)[0]  # noqa: E731
        specs = P(), P("context"), P("context")
        return jax.jit(jax.shard_map(local, mesh=make_mesh(context=2), in_specs=specs, out_specs=P()))(q, k, v)

    gathered, exchanged = (np.asarray(merged(x), np.float32) for x in ("gather", "all_to_all"))
    assert np.mean(gathered != exchanged) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "compute", [ring_pass_kv, *(pytest.param(x, marks=pytest.mark.slow) for x in (ring_pass_q, all_gather_kv))]
)
def test_bf16_error_does_not_grow_with_the_ranks(compute) -> None:  # type: ignore[no-untyped-def]
    """Within 2.5x the error of one dense bf16 computation, plus 2e-3, for 1, 2 and 8 ranks."""
    length = 512
    exact = np.random.default_rng(0).standard_normal((3, length, 2, 16))
    rounded = jnp.asarray(exact, jnp.bfloat16)
    with jax.enable_x64(True):
        want = np.asarray(attention(*rounded.astype(jnp.float64), implementation="reference")[0])
    dense = attention(*rounded, implementation="reference")[0]
    bound = 2.5 * np.abs(np.asarray(dense, np.float64) - want).max() + 2e-3
    errors = []
    for ranks in (1, 2, 8):
        positions, _ = shard_positions(length, ranks)
        mesh = make_mesh(context=ranks)
        mapped = jax.shard_map(
            lambda q, k, v, p: compute(q, k, v, p, p)[0], mesh=mesh, in_specs=P("context"), out_specs=P("context")
        )
        q, k, v = (shard_sequence(x, ranks, axis=0) for x in rounded)
        out = unshard_sequence(jax.jit(mapped)(q, k, v, jnp.asarray(positions)), ranks, axis=0)
        assert out.dtype == jnp.bfloat16
        errors.append(np.abs(np.asarray(out, np.float64) - want).max())
    assert max(errors) <= bound, errors
    assert errors[-1] <= 1.2 * errors[0], errors


def test_gradients_of_copies_of_kv_heads_are_as_exact_as_those_of_one_device_in_bf16() -> None:
    """Of one KV head each of 8 ranks has a copy, whose gradients are summed in bf16."""
    rng, positions, mesh = np.random.default_rng(0), jnp.arange(256), make_mesh(context=8)
    arrays = [jnp.asarray(rng.standard_normal((256, heads, 16)), jnp.bfloat16) for heads in (8, 1, 1)]
    sharded = jax.shard_map(
        lambda q, k, v, p: ulysses_attention(q, k, v, p, p)[0], mesh=mesh, in_specs=P("context"), out_specs=P("context")
    )

    def gradients(compute, dtype):  # type: ignore[no-untyped-def]
        loss = lambda *x: jnp.sum(jnp.sin(3 * compute(*x).astype(jnp.float32)))  # noqa: E731
        return [np.asarray(x, np.float64) for x in jax.grad(loss, (0, 1, 2))(*(x.astype(dtype) for x in arrays))]

    exact = functools.partial(attention, implementation="reference")
    wants, denses = (gradients(lambda *x: exact(*x)[0], dtype) for dtype in (jnp.float32, jnp.bfloat16))
    gots = gradients(jax.jit(lambda *x: sharded(*x, positions)), jnp.bfloat16)
    for got, dense, want in zip(gots, denses, wants, strict=True):
        assert np.abs(got - want).max() <= 2.5 * np.abs(dense - want).max() + 2e-3


@pytest.mark.parametrize("decode", [True, False])
def test_a_decode_row_reads_its_own_sequence_alone(decode: bool) -> None:
    """Sequences 0 and 2 are asked for, two rows have none: 1, all NaN, is not read. As one block it would be."""
    ranks, keys = 2, 1024
    segments = np.tile(np.repeat(np.arange(3), keys), ranks)
    positions = np.tile(np.tile(np.arange(keys), 3), ranks)
    q = jnp.ones((4, 4, 8))
    kv = jnp.where((segments == 1)[:, None, None], jnp.nan, jnp.ones((len(segments), 2, 8)))
    mapped = jax.shard_map(
        functools.partial(ring_pass_q, decode=decode),
        mesh=make_mesh(context=ranks),
        in_specs=P("context"),
        out_specs=P("context"),
    )
    rows = np.array([0, 2, -1, -1])
    out, lse = jax.jit(mapped)(q, kv, kv, np.full(4, keys), positions, rows, segments)
    assert bool(jnp.isfinite(out[:2]).all()) == decode
    assert not out[2:].any()
    assert bool((lse[2:] == -jnp.inf).all())


@pytest.mark.slow
@pytest.mark.parametrize("compute", [ring_pass_kv, kvp_attention, ulysses_attention])
def test_gradients_without_type_checks(compute) -> None:  # type: ignore[no-untyped-def]
    """`check_vma=False` says nothing about what is replicated: gradients are right all the same."""
    replicates = compute is kvp_attention
    q, k, v = jax.random.normal(jax.random.key(0), (3, 24, 3, 8))
    positions = jnp.arange(24)
    q_spec = P() if replicates else P("context")

    def mapped(check_vma: bool):  # type: ignore[no-untyped-def]
        specs = (q_spec, P("context"), P("context"), q_spec, P("context"))
        return jax.shard_map(compute, mesh=make_mesh(context=3), in_specs=specs, out_specs=q_spec, check_vma=check_vma)

    def gradients(check_vma: bool):  # type: ignore[no-untyped-def]
        def loss(q, k, v):  # type: ignore[no-untyped-def]
            out, lse = mapped(check_vma)(q, k, v, positions, positions)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    for a, b in zip(gradients(False), gradients(True), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compute", [ulysses_attention, pytest.param(ring_pass_kv, marks=pytest.mark.slow)])
def test_one_batch_with_positions_for_all_and_segments_for_each(compute) -> None:  # type: ignore[no-untyped-def]
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 24, 3, 8))
    positions, segments = jnp.arange(24), jnp.array([[0] * 10 + [1] * 14, [0] * 24])
    P_row = P(None, "context")
    mapped = jax.shard_map(
        lambda q, k, v, p, s: compute(q, k, v, p, p, s, s)[0],
        mesh=make_mesh(context=3),
        in_specs=(P_row, P_row, P_row, P("context"), P_row),
        out_specs=P_row,
    )
    want = attention(
        q,
        k,
        v,
        q_positions=positions,
        kv_positions=positions,
        q_segment_ids=segments,
        kv_segment_ids=segments,
        implementation="reference",
    )[0]
    np.testing.assert_allclose(jax.jit(mapped)(q, k, v, positions, segments), want, rtol=0, atol=1e-5)
