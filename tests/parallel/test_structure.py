"""Compiled programs of the exchanges on CPU devices: messages and their bytes, as the docstrings say.

Overlap is asserted for H100 (`tests/aot`): CPU permutes are synchronous.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from hlo import collectives
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.parallel import (
    Hardware,
    ModelShape,
    all_gather_kv,
    helix_attention,
    kvp_attention,
    layout_hops,
    make_mesh,
    ring_pass_kv,
    ring_pass_q,
    ulysses_attention,
)
from longctx.parallel.context_parallel import METHODS
from longctx.parallel.cost import predict_times

pytestmark = pytest.mark.usefixtures("users_fusions")
# Of one rank: tokens, cached and new ones, query heads, KV heads and head size.
T, S, HEADS, KV_HEADS, SIZE = 64, 192, 8, 2, 16
KV_BYTES = S * (2 * KV_HEADS * SIZE * 4 + 8)
Q_BYTES = T * (HEADS * SIZE * 4 + 8)
STATE_BYTES = T * HEADS * (SIZE + 1) * 4

KVP = {merge: functools.partial(kvp_attention, merge=merge) for merge in ("gather", "all_to_all")}


@functools.cache
def compiled(
    compute: Callable[..., object],
    ranks: int,
    backward: bool = False,
    kv_length: int = S,
    replicated: bool = False,
    by_heads: bool = False,
):  # type: ignore[no-untyped-def]
    """The program of out and lse, or of the three gradients."""
    mesh = make_mesh(context=ranks)
    q_spec, q_ranks = (P(), 1) if replicated else (P("context"), ranks)
    specs = (q_spec, P("context"), P("context"), q_spec, P("context"), q_spec, P("context"))
    out_specs = P(None, "context") if by_heads else q_spec
    mapped = jax.shard_map(compute, mesh=mesh, in_specs=specs, out_specs=out_specs)

    def gradients(q, k, v, *tokens):  # type: ignore[no-untyped-def]
        def loss(*arrays: jax.Array) -> jax.Array:
            return jnp.sum(mapped(*arrays, *tokens)[0])

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    shapes = [((q_ranks * T, HEADS, SIZE), "f4"), *[((ranks * kv_length, KV_HEADS, SIZE), "f4")] * 2]
    shapes += [((q_ranks * T,), "i4"), ((ranks * kv_length,), "i4")] * 2
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(shapes, specs, strict=True)
    ]
    return jax.jit(gradients if backward else mapped).lower(*arguments).compile()


def sent(program, ranks: int) -> dict[str, tuple[int, float]]:  # type: ignore[no-untyped-def]
    """Number and bytes of each kind of collective."""
    totals: dict[str, tuple[int, float]] = {}
    for opcode, size, *_ in collectives(program.as_text(), ranks):
        count, total = totals.get(opcode, (0, 0))
        totals[opcode] = (count + 1, total + size)
    return totals


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_pass_kv_sends_kv_once_round(ranks: int) -> None:
    """N - 1 permutes; KV heads are not repeated to query heads; tokens, 8 bytes each, are gathered in one message."""
    totals = sent(compiled(ring_pass_kv, ranks), ranks)
    if ranks == 1:
        assert totals == {}
        return
    hops = ranks - 1
    assert totals == {
        "collective-permute": (hops, hops * (KV_BYTES - 8 * S)),
        "all-gather": (1, hops * 8 * S),
    }


@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hops_that_no_query_needs_do_not_travel(backward: bool) -> None:
    """Of three ranks each sends its keys once, and their tokens, 8 bytes each; backward dK and dV come home once."""
    hops = layout_hops(3 * S, 3, "contiguous", window=(S, 0))
    assert hops == (0, 1)
    totals = sent(compiled(functools.partial(ring_pass_kv, hops=hops, window=(S, 0)), 3, backward), 3)
    if backward:
        assert totals.keys() == {"collective-permute"}
        assert totals["collective-permute"][1] <= 3 * KV_BYTES
    else:
        assert totals == {"collective-permute": (2, KV_BYTES)}


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 5))])
def test_pass_q_sends_queries_round_and_states_home(ranks: int) -> None:
    hops = ranks - 1
    assert sent(compiled(ring_pass_q, ranks), ranks) == {
        "collective-permute": (hops, hops * (Q_BYTES - 8 * T)),
        "all-gather": (1, hops * 8 * T),
        "all-to-all": (1, hops * STATE_BYTES),
    }


@pytest.mark.parametrize("method", ["pass_kv", "pass_q", "all_gather", "kvp", "ulysses"])
def test_the_cost_model_counts_the_bytes_of_compiled_programs(method: str) -> None:
    """A link of 1 byte/s and a device that computes in no time."""
    ranks, hardware = 8 if method == "ulysses" else 3, Hardware(peak_flops=1e30, bandwidth=1.0, bytes_per_element=4)
    program = (
        compiled(KVP["all_to_all"], ranks, replicated=True) if method == "kvp" else compiled(METHODS[method], ranks)
    )
    new = T if method == "kvp" else ranks * T
    model = ModelShape(HEADS, KV_HEADS, SIZE)
    times = predict_times(new, ranks * (S - T), ranks, model, hardware, with_ulysses=True)[method]
    assert times.exposed == pytest.approx(sum(size for _, size in sent(program, ranks).values()))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_backward_sends_what_the_docstrings_say(ranks: int) -> None:
    """Once more keys and values, then dK and dV in float32: in N - 2 messages one behind the keys, and one home."""
    hops = ranks - 1
    (_, kv_bytes) = sent(compiled(ring_pass_kv, ranks, backward=True), ranks)["collective-permute"]
    assert kv_bytes == 3 * hops * (KV_BYTES - 8 * S)  # forward, backward, and gradients as wide as these keys
    (_, q_bytes) = sent(compiled(ring_pass_q, ranks, backward=True), ranks)["collective-permute"]
    # Queries twice, cotangents of out and dQ as wide, lse and row terms. XLA's CPU backend finds that the first hop of
    # queries is the same both times.
    query_bytes = Q_BYTES - 8 * T
    assert q_bytes == hops * (4 * query_bytes + 2 * T * HEADS * 4) - query_bytes


@pytest.mark.parametrize("exchange", [ring_pass_kv, ring_pass_q])
def test_nothing_is_sent_of_no_keys(exchange: Callable[..., object]) -> None:
    """On CPUs jaxlib 0.11 crashes as it compiles the gradient of a ring of nothing."""
    assert sent(compiled(exchange, 3, backward=True, kv_length=0), 3) == {}


@pytest.mark.parametrize(
    ("exchange", "backward", "of_each"),
    [
        (ring_pass_kv, False, 8 * 2048),
        pytest.param(ring_pass_kv, True, 8 * 2048, marks=pytest.mark.slow),
        pytest.param(ring_pass_q, True, STATE_BYTES, marks=pytest.mark.slow),
    ],
)
def test_memory_of_a_rank_does_not_grow_with_the_ranks(
    exchange: Callable[..., object], backward: bool, of_each: int
) -> None:
    """But for what it has of each: in pass-KV positions and segments of its keys, in pass-Q states of its queries."""
    few, more = (compiled(exchange, n, backward, 2048).memory_analysis().temp_size_in_bytes for n in (2, 5))
    assert more - few < 3 * 2.5 * of_each


@pytest.mark.parametrize("ranks", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_all_gather_sends_kv_at_once_and_their_gradients_home(ranks: int) -> None:
    assert sent(compiled(all_gather_kv, ranks), ranks) == {"all-gather": (2, (ranks - 1) * KV_BYTES)}
    backward = sent(compiled(all_gather_kv, ranks, backward=True), ranks)
    assert backward["reduce-scatter"] == (1, (ranks - 1) * (KV_BYTES - 8 * S))


@pytest.mark.parametrize(("ranks", "copies"), [(2, 1), (8, 4), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_ulysses_sends_each_rank_its_heads(ranks: int, copies: int) -> None:
    """Queries, keys and values in one message, out and lse home; KV heads as often as there are ranks for each.

    Backward the first message again, and d_out and the three gradients, in place of out and lse.
    """
    share, states = (ranks - 1) / ranks, T * HEADS * SIZE * 4
    there = states + S * 2 * KV_HEADS * copies * SIZE * 4
    tokens = (2, (ranks - 1) * 8 * (T + S))
    home = states + T * HEADS * 4
    assert sent(compiled(ulysses_attention, ranks), ranks) == {
        "all-to-all": (3, share * (there + home)),
        "all-gather": tokens,
    }
    backward = sent(compiled(ulysses_attention, ranks, backward=True), ranks)
    assert backward == {"all-to-all": (3, share * (2 * there + states)), "all-gather": tokens}


def test_usp_sends_keys_between_groups_alone() -> None:
    """Two groups of two: a rank sends the other group the keys of its heads, once."""
    mesh = make_mesh(stage=2, context=2)
    spec = P(("stage", "context"))
    mapped = jax.shard_map(
        functools.partial(ulysses_attention, ring_axis="stage"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    shapes = [(4 * T, HEADS, SIZE), *[(4 * S, KV_HEADS, SIZE)] * 2]
    arguments = [jax.ShapeDtypeStruct(x, "f4", sharding=NamedSharding(mesh, spec)) for x in shapes]
    arguments += [jax.ShapeDtypeStruct((x,), "i4", sharding=NamedSharding(mesh, spec)) for x in (4 * T, 4 * S)]
    totals = sent(jax.jit(mapped).lower(*arguments).compile(), 2)
    assert totals["collective-permute"] == (1, S * 2 * KV_HEADS * SIZE * 4)
    of_tokens = 8 * (T + S + 2 * S)  # in a group, and those of the group's keys
    assert totals["all-gather"] == (3, of_tokens)
    assert totals["all-to-all"] == (3, (T * HEADS * (2 * SIZE + 1) + S * 2 * KV_HEADS * SIZE) * 4 / 2)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_kvp_sends_states_alone(ranks: int) -> None:
    """Bytes are those of the docstring, which do not depend on the KV length."""
    program = compiled(KVP["gather"], ranks, kv_length=4 * S, replicated=True)
    assert sent(program, ranks) == {"all-gather": (1, (ranks - 1) * STATE_BYTES)}
    totals = sent(compiled(KVP["all_to_all"], ranks, replicated=True), ranks)
    share = (ranks - 1) / ranks * -(-T // ranks) * ranks / T
    assert totals["all-to-all"] == (1, pytest.approx(share * STATE_BYTES))
    assert totals["all-gather"][1] == pytest.approx(share * T * HEADS * (SIZE * 4 + 4))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_helix_sends_states_of_other_ranks_heads(ranks: int) -> None:
    """An R-th of the bytes by which KVP gathers all states, for any KV length; backward d_out, lse and row terms."""
    share = (ranks - 1) / ranks
    program = compiled(helix_attention, ranks, kv_length=4 * S, replicated=True, by_heads=True)
    assert sent(program, ranks) == {"all-to-all": (1, share * STATE_BYTES)}
    totals = sent(compiled(helix_attention, ranks, backward=True, replicated=True, by_heads=True), ranks)
    assert totals["all-to-all"] == (1, share * STATE_BYTES)
    assert totals["all-gather"] == (1, share * (STATE_BYTES + 4 * T * HEADS))
    assert totals.keys() == {"all-to-all", "all-gather", "all-reduce"}
