"""Bad input to the exchanges raises an error that names the argument, while tracing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from longctx.parallel import (
    all_gather_kv,
    helix_attention,
    kvp_attention,
    make_mesh,
    ring_pass_kv,
    ring_pass_q,
    ulysses_attention,
)

EXCHANGES = [ring_pass_kv, ring_pass_q, all_gather_kv, kvp_attention, helix_attention, ulysses_attention]
Q, K, TOKENS = jnp.ones((8, 4, 8)), jnp.ones((8, 2, 8)), jnp.arange(8)


def trace(compute, *arrays: jax.Array, replicated: tuple[int, ...] = (), **static: Any) -> None:  # type: ignore[no-untyped-def]
    """Nothing is computed: the error comes before."""
    in_specs = tuple(P() if i in replicated else P("context") for i in range(len(arrays)))
    call = functools.partial(compute, **static)
    mapped = jax.shard_map(call, mesh=make_mesh(context=2), in_specs=in_specs, out_specs=P("context"))
    jax.eval_shape(mapped, *arrays)


def inputs(compute) -> dict[str, Any]:  # type: ignore[no-untyped-def]
    return {"replicated": (0, 3)} if compute in (kvp_attention, helix_attention) else {}


@pytest.mark.parametrize("compute", EXCHANGES)
@pytest.mark.parametrize(
    ("arrays", "static", "error", "message"),
    [
        ((Q, K, K, TOKENS, TOKENS), {"axis_name": "seq"}, ValueError, "axis_name must be a mesh axis .* got 'seq'"),
        ((Q, K, K, TOKENS, TOKENS), {"axis_name": ("context",)}, ValueError, "axis_name must be a mesh axis"),
        ((Q, K, K), {}, ValueError, "q_positions must be given when causal: a rank can't tell"),
        ((Q, K, K, TOKENS), {}, ValueError, "kv_positions must be given when causal"),
        ((Q, K, K, TOKENS, jnp.arange(6)), {}, ValueError, r"kv_positions must have the shape \(4,\)"),
        (
            (Q, K, K),
            {"causal": False, "q_first": TOKENS},
            ValueError,
            "kv_positions must be given with q_first and q_l",
        ),
        ((Q, K, K, TOKENS, TOKENS), {"q_last": jnp.arange(7)}, ValueError, "q_last must have the shape"),
        ((Q, K, K[:6], TOKENS, TOKENS), {}, ValueError, "k and v must have one shape"),
        ((Q, K, K, TOKENS, TOKENS), {"implementation": "cuda"}, ValueError, "implementation must be None, one of"),
        ((Q, K, K, TOKENS, TOKENS), {"scale": float("nan")}, ValueError, "scale must be a finite number"),
        ((Q, K, K, TOKENS, TOKENS), {"out_dtype": jnp.int8}, TypeError, "out_dtype must be a floating-point type"),
        ((Q, K, K, TOKENS, TOKENS, TOKENS), {}, ValueError, "must be given both or neither"),
    ],
)
def test_wrong_arguments_of_every_exchange(compute, arrays, static, error, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        trace(compute, *arrays, **inputs(compute), **static)


@pytest.mark.parametrize("compute", EXCHANGES)
def test_keys_that_are_the_same_on_all_ranks_would_count_twice(compute) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"k must be a shard of its own on each rank.* would count 2 times"):
        trace(compute, Q, K, K, TOKENS, TOKENS, replicated=(0, 1, 2, 3, 4))


def test_kvp_needs_the_same_queries_everywhere() -> None:
    with pytest.raises(ValueError, match="q must be replicated over 'context', but its type says that it varies"):
        trace(kvp_attention, Q, K, K, TOKENS, TOKENS)


def test_helix_needs_the_same_queries_everywhere_and_ranks_that_divide_the_heads() -> None:
    with pytest.raises(ValueError, match="q must be replicated over 'context', but its type says that it varies"):
        trace(helix_attention, Q, K, K, TOKENS, TOKENS)
    with pytest.raises(ValueError, match="the 2 ranks of axis_name 'context' must divide q's 3 heads"):
        trace(helix_attention, Q[:, :3], K[:, :1], K[:, :1], TOKENS, TOKENS, replicated=(0, 3))


@pytest.mark.parametrize(
    ("static", "error", "message"),
    [
        ({"merge": "psum"}, ValueError, "merge must be 'auto', 'gather' or 'all_to_all', got 'psum'"),
        ({"group_ids": np.zeros(8)}, TypeError, "group_ids must be integers, got float64"),
        ({"group_ids": np.zeros(5, int)}, ValueError, r"group_ids must have the shape \(8,\) or \(2, 8\)"),
        ({"group_ids": np.full(8, 2**40)}, ValueError, "group_ids must fit into int32"),
    ],
)
def test_wrong_arguments_of_kvp(static: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trace(kvp_attention, Q, K, K, TOKENS, TOKENS, replicated=(0, 3), **static)


@pytest.mark.parametrize(
    ("heads", "static", "message"),
    [
        (3, {}, "the 2 ranks of axis_name 'context' must divide q's 3 heads"),
        (4, {"ring_axis": "host"}, "ring_axis must be a mesh axis of the jax.shard_map .* got 'host'"),
        (4, {"ring_axis": "context"}, "ring_axis must be another mesh axis than axis_name, got 'context'"),
        (4, {"ring_axis": "stage"}, "k must be a shard of its own on each rank.* replicated over 'stage'"),
    ],
)
def test_wrong_arguments_of_ulysses(heads: int, static: dict[str, Any], message: str) -> None:
    q, mesh = jnp.ones((8, heads, 8)), make_mesh(stage=2, context=2)
    mapped = jax.shard_map(
        functools.partial(ulysses_attention, **static), mesh=mesh, in_specs=P("context"), out_specs=P("context")
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, q, q, q, TOKENS, TOKENS)


def test_decode_needs_a_sequence_for_each_row() -> None:
    with pytest.raises(ValueError, match=r"decode takes q .* without batch dimensions and q_segment_ids"):
        trace(ring_pass_q, Q, K, K, TOKENS, TOKENS, decode=True)


def test_outside_of_shard_map() -> None:
    with pytest.raises(ValueError, match=r"axis_name must be a mesh axis of the jax.shard_map"):
        ring_pass_kv(Q, K, K, TOKENS, TOKENS)
