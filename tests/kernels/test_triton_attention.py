"""Triton kernels of attention, interpreted: after a state, with shared keys, sharded, mapped, and their tiles."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.kernels import attention
from longctx.kernels.attention.kernel import Kernel, Operands
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.device import Device, compiled_for
from longctx.kernels.triton import adapter
from longctx.kernels.triton.tile_config import TileConfig, padded, pieces_of


def operands_of_a_hop(q_length: int, kv_length: int, size: int, pair: bool) -> Operands:
    """Two sequences of queries with limits of their own, which share keys, in one array or two."""
    rng = np.random.default_rng(q_length)
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, q_length, 6, size), (1, kv_length, 2, size), (1, kv_length, 2, size))
    )
    positions = kv_length // 2 + jnp.arange(q_length)[None]
    first = jnp.maximum(positions - jnp.asarray(rng.integers(0, 90, (2, q_length))), 0)
    queries = Tokens(positions, jnp.zeros_like(positions), first, first + 70)
    keys = Tokens(jnp.arange(kv_length)[None], jnp.zeros((1, kv_length), jnp.int32).at[0, :7].set(-1))
    kv = jnp.stack([k, v]) if pair else None
    return Operands(q, *((k, v) if kv is None else (kv, kv)), queries, keys)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [True, False])
def test_shared_keys_after_a_state(pair: bool) -> None:
    """As in the hops of a ring, with the first and the last position that each query sees; and gradients."""
    operands, rule = operands_of_a_hop(30, 170, 24, pair), AttentionRule(True, 0.2)
    rng = np.random.default_rng(1)
    out = jnp.asarray(rng.standard_normal(operands.q.shape), jnp.float32)
    lse = jnp.asarray(rng.standard_normal(operands.q.shape[:-1]), jnp.float32).at[0, :2].set(-jnp.inf)
    out = jnp.where((lse == -jnp.inf)[..., None], 0, out)
    kernels = {name: Kernel(name, rule) for name in ("triton", "xla")}
    with adapter.interpreted():
        got, want = (kernel.forward(operands, (out, lse)) for kernel in kernels.values())
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
        terms = jnp.where(want[1] == -jnp.inf, 0, -jnp.sum(want[0] * out, -1))
        got, want = (kernel.backward(operands, want[1], terms, out) for kernel in kernels.values())
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)


def loss(q: Any, k: Any, v: Any, implementation: str = "triton") -> Any:
    out, _ = attention(q, k, v, window=(30, 0), implementation=implementation)
    return jnp.sum(jnp.sin(out))


def arrays(*batch: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (*batch, 40, n, 16)) for key, n in zip(keys, (4, 2, 2), strict=True)]


def compare(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


def test_a_mesh_divides_it() -> None:
    """XLA divides it; the interpreter can't run where `jax.shard_map` checks types, as with Explicit axes."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    spec, xs = P("data", None, "tensor"), arrays(2)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in xs]
    with adapter.interpreted():
        got = jax.jit(jax.grad(loss, (0, 1, 2)))(*placed)
    assert [x.sharding.spec for x in got] == [spec] * 3
    compare(got, jax.grad(loss, (0, 1, 2))(*xs, "reference"))


@pytest.mark.slow
def test_jax_vmap() -> None:
    """Of a second batch dimension, which the keys lack."""
    q, k, v = arrays(3, 2)
    with adapter.interpreted():
        got = jax.vmap(jax.grad(loss, (0, 1, 2)), (0, None, None))(q, k[0], v[0])
    want = jax.vmap(lambda *x: jax.grad(loss, (0, 1, 2))(*x, "reference"), (0, None, None))(q, k[0], v[0])
    compare(got, want)


@pytest.mark.parametrize("size", range(1, 580, 3))
def test_pieces_of_a_head(size: int) -> None:
    """They follow each other, are powers of two that tensor cores take, and waste less than a quarter."""
    pieces = pieces_of(size)
    assert [piece.start for piece in pieces] == [sum(x.size for x in pieces[:n]) for n in range(len(pieces))]
    assert all(piece.size >= 16 and piece.size & (piece.size - 1) == 0 for piece in pieces)
    assert size <= padded(size) <= max(16, size + 15, 4 * size // 3)
    assert [piece.is_whole for piece in pieces[:-1]] == [True] * (len(pieces) - 1)


@pytest.mark.parametrize("sizes", [(576, 512), *((size, size) for size in range(1, 577, 25))])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_operands_in_flight_fit_into_shared_memory(sizes: tuple[int, int], dtype: str) -> None:
    """Of the smallest GPU, 99 KiB; heads of more than 256 in float32 are refused."""
    if dtype == "float32" and max(sizes) > 256:
        return
    columns, size = sum(map(padded, sizes)), jnp.dtype(dtype).itemsize
    for rows in (1, 40, 10**6):
        forward = TileConfig.forward(*sizes, dtype, rows)
        assert forward.num_stages * forward.block_kv * columns * size <= 99 * 1024
        for from_keys in (False, True):
            tiles = TileConfig.backward(*sizes, dtype, rows, from_keys)
            block = tiles.block_q if from_keys else tiles.block_kv
            assert tiles.num_stages * block * columns * size <= 99 * 1024


def test_few_queries_are_computed_by_many_programs() -> None:
    """Their states are merged; a GPU's multiprocessors all have work."""
    q, k = jnp.ones((1, 8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((40_000, 2, 64), jnp.bfloat16)

    def decode(q: Any, k: Any) -> Any:
        return attention(q, k, k, q_positions=np.array([40_000]), implementation="triton")

    device = Device("NVIDIA A100-SXM4-80GB", "gpu", False, 108, capability=(8, 0))
    with compiled_for(device):
        text = str(jax.make_jaxpr(decode)(q, k))
    assert "grid=(1, 2, 108)" in text.replace("\n", "")
