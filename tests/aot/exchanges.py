"""Exchanges as compiled for 8 H100: every permute has attention under it, and memory does not grow with the ranks."""

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from h100 import h100_mesh
from hlo import Collective, collectives
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longctx import xla_flags
from longctx.gpu_flags import OVERLAPS
from longctx.kernels import attention, merge_state
from longctx.parallel import all_gather_kv, kvp_attention, ring_pass_kv, ring_pass_q
from longctx.parallel.ring import ring_shift

# Of one rank. Keys of 32 MiB and values of 32 MiB: beyond what XLA joins into one permute.
T, S, HEADS, KV_HEADS, SIZE = 4096, 16384, 8, 8, 128
KV_BYTES = S * 2 * KV_HEADS * SIZE * 2
STATE_BYTES = T * HEADS * (SIZE + 1) * 4
RANKS = [3, pytest.param(8, marks=pytest.mark.slow)]  # a ring is unrolled: more hops compile longer


@functools.cache
def program(  # type: ignore[no-untyped-def]
    compute: Callable[..., object],
    ranks: int,
    backward: bool = False,
    rows: int = T,
    replicated: bool = False,
):
    mesh = h100_mesh(context=ranks)
    q_spec, q_ranks = (P(), 1) if replicated else (P("context"), ranks)
    specs = (q_spec, P("context"), P("context"), q_spec, P("context"))
    mapped = jax.shard_map(compute, mesh=mesh, in_specs=specs, out_specs=q_spec)

    def gradients(q, k, v, *positions):  # type: ignore[no-untyped-def]
        return jax.grad(lambda *x: jnp.sum(mapped(*x, *positions)[0].astype(jnp.float32)), (0, 1, 2))(q, k, v)

    shapes = [((q_ranks * rows, HEADS, SIZE), "bfloat16")]
    shapes += [((ranks * S, KV_HEADS, SIZE), "bfloat16")] * 2
    shapes += [((q_ranks * rows,), "int32"), ((ranks * S,), "int32")]
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(shapes, specs, strict=True)
    ]
    return jax.jit(gradients if backward else mapped).lower(*arguments).compile()


def permutes(compute: Callable[..., object], ranks: int = 8, backward: bool = False) -> list[Collective]:
    found = collectives(program(compute, ranks, backward).as_text(), ranks)
    return [x for x in found if x.opcode == "collective-permute"]


def is_hidden(permute: Collective) -> bool:
    """Attention runs while it travels: the Mosaic kernel, or XLA's loop."""
    return permute.is_async and not {"custom-call", "while"}.isdisjoint(permute.hidden_by)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("compute", [ring_pass_kv, ring_pass_q])
def test_every_permute_is_hidden(compute: Callable[..., object], ranks: int) -> None:
    found = permutes(compute, ranks)
    assert len(found) == ranks - 1
    assert all(map(is_hidden, found)), found


@pytest.mark.parametrize("ranks", RANKS)
def test_bytes_on_the_wire(ranks: int) -> None:
    """Long keys and values travel as one message; KV heads as they are."""
    assert [x.sent for x in permutes(ring_pass_kv, ranks)] == [KV_BYTES] * (ranks - 1)
    assert [x.sent for x in permutes(ring_pass_q, ranks)] == [T * HEADS * SIZE * 2] * (ranks - 1)
    (home,) = (x for x in collectives(program(ring_pass_q, ranks).as_text(), ranks) if x.opcode == "all-to-all")
    assert home.sent == (ranks - 1) * STATE_BYTES


@pytest.mark.slow
def test_kvp_gathers_states() -> None:
    """Their bytes do not depend on the keys."""
    ranks = 3
    gather = program(functools.partial(kvp_attention, merge="gather"), ranks, rows=64, replicated=True)
    assert [(x.opcode, x.sent) for x in collectives(gather.as_text(), ranks)] == [
        ("all-gather", (ranks - 1) * STATE_BYTES * 64 / T)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compute", "ranks", "overlap", "workers"),
    [
        (ring_pass_kv, 2, "multiprocessors", 128),
        (ring_pass_q, 2, "multiprocessors", 128),
        (ring_pass_kv, 2, "copy_engines", 132),
        (ring_pass_kv, 2, None, 132),
        (ring_pass_kv, 1, "multiprocessors", 132),
        (all_gather_kv, 2, "multiprocessors", 132),
    ],
)
def test_kernels_beside_hops_leave_multiprocessors_to_nccl(
    compute: Callable[..., object], ranks: int, overlap: str | None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the workers' table is a thread block of the grid. Kernels that no hop runs beside take all."""
    monkeypatch.setenv("XLA_FLAGS", xla_flags(overlap=overlap))
    lines = program.__wrapped__(compute, ranks).as_text().splitlines()
    calls = [x.split("backend_config")[0] for x in lines if '"mosaic_gpu_v2"' in x and "attention_forward" in x]
    assert calls
    assert {re.findall(r"s32\[(\d+),4\]", call)[-1] for call in calls} == {str(workers)}


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_permutes_compile_with_the_flags_of_every_choice(overlap: str | None) -> None:
    mesh = h100_mesh(context=2)
    there = NamedSharding(mesh, P("context"))
    shift = jax.shard_map(lambda x: ring_shift("context", x)[0], mesh=mesh, in_specs=there.spec, out_specs=there.spec)
    lowered = jax.jit(shift).lower(jax.ShapeDtypeStruct((1 << 20,), jnp.bfloat16, sharding=there))
    options = {name: True if value == "true" else value for name, value in OVERLAPS[overlap].items()}
    (permute,) = collectives(lowered.compile(options).as_text(), 2)
    assert permute.opcode == "collective-permute"


@pytest.mark.slow
def test_gradients_travel_hidden() -> None:
    """7 permutes forward; backward 7 of keys and values, of which 5 also hold gradients, and 2 of gradients alone.

    The last of all, on which the result waits, travels while d_q is computed.
    """
    found = permutes(ring_pass_kv, backward=True)
    assert len(found) == 16
    assert all(map(is_hidden, found)), found
    assert sum(x.sent for x in found) == 7 * (KV_BYTES + KV_BYTES + 2 * KV_BYTES)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_ranks() -> None:
    """Beyond what one rank needs: two shards of keys and values, and one state."""
    one, eight = (program(ring_pass_kv, n).memory_analysis().temp_size_in_bytes for n in (1, 8))
    assert eight - one < 2 * KV_BYTES + 2 * STATE_BYTES


@pytest.mark.slow
def test_memory_of_gradients_does_not_grow_with_the_ranks() -> None:
    four, eight = (program(ring_pass_kv, n, True).memory_analysis().temp_size_in_bytes for n in (4, 8))
    assert eight < 1.02 * four


@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("compute", [ring_pass_kv, pytest.param(ring_pass_q, marks=pytest.mark.slow)])
def test_a_ring_of_64_is_a_loop_whose_permutes_are_hidden(compute: Callable[..., object], backward: bool) -> None:
    """One of the first hop and one of the loop, and backward those of three hops at its ends; as long as one of 9."""
    few, many = (program(compute, ranks, backward).as_text() for ranks in (9, 64))
    found = [x for x in collectives(many, 64) if x.opcode == "collective-permute"]
    assert len(found) == (7 if backward else 2)
    assert all(map(is_hidden, found))
    assert len(many.splitlines()) < 1.05 * len(few.splitlines())


def naive_ring(q, k, v, q_positions, kv_positions):  # type: ignore[no-untyped-def]
    """As one would write it: unrolled, and nothing that orders the hops."""
    n = lax.axis_size("context")
    permutation = [(i, (i + 1) % n) for i in range(n)]
    state = None
    for hop in range(n):
        arriving = lax.ppermute((k, v, kv_positions), "context", permutation) if hop < n - 1 else (k, v, kv_positions)
        part = attention(q, k, v, q_positions=q_positions, kv_positions=kv_positions, out_dtype=jnp.float32)
        state = part if state is None else merge_state(*state, *part)
        k, v, kv_positions = arriving
    return state


@pytest.mark.slow
def test_the_naive_ring_fails_these_tests() -> None:
    """Its permutes are issued one after another: not hidden, and all shards held at once."""
    found = permutes(naive_ring)
    assert len(found) > 7
    assert sum(map(is_hidden, found)) < 7
    four, eight = (program(naive_ring, n).memory_analysis().temp_size_in_bytes for n in (4, 8))
    assert eight - four > 3 * KV_BYTES


@pytest.mark.slow
def test_all_gather_is_one_message_of_keys_and_values() -> None:
    found = collectives(program(all_gather_kv, 3).as_text(), 3)
    assert {x.opcode for x in found} == {"all-gather"}
    assert [x.sent for x in found if x.sent >= KV_BYTES] == [2 * KV_BYTES]
