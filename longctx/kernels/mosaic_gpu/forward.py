"""The forward attention kernel for Hopper GPUs, over contiguous keys or over pages.

A thread block has one producer warpgroup, which copies keys and values to a ring of stages in shared memory (TMA), and
one or two consumer warpgroups, which multiply 64 rows each (wgmma). Of two consumers, one computes its softmax while
the other multiplies. A row of a tile is a query of one head, or, with folded heads, of any head that shares the KV
head; the kernel treats both alike.

`work.py` says beforehand which blocks a tile sees. Blocks of which all rows see every key come first and take no mask.

Source: FlashAttention-3 (Shah et al. 2024), 3.1 and 3.2: warp specialisation, two warpgroups in ping-pong.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.mosaic_gpu import barrier_arrive as arrive
from jax.experimental.pallas.mosaic_gpu import barrier_wait as wait

from longctx.kernels.attention.online_softmax import LOWEST
from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.mosaic_gpu.adapter import ROW, TILE, broadcast, cast, read
from longctx.kernels.mosaic_gpu.keys import Contiguous, Paged
from longctx.kernels.mosaic_gpu.tile_config import WARPGROUP_ROWS, TileConfig
from longctx.kernels.mosaic_gpu.work import Tile, Work

_LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Static arguments of a call; `scale` is positive."""

    tile_config: TileConfig
    scale: float
    split: bool  # several workers may share a tile, and its pieces must be merged


def with_positive_scale(q: Array, scale: float) -> tuple[Array, float]:
    """q and scale with a positive scale. The kernel takes maxima before scaling, so a scale must keep their order."""
    if abs(scale) < 1e-30:
        return jnp.zeros_like(q), 1.0
    return (q, scale) if scale > 0 else (-q, -scale)


@kernel_jit("config", "out_dtype")
def attention_forward(
    q: Array, keys: Contiguous | Paged, rows: tuple[Array, ...], work: Work, config: ForwardConfig, out_dtype: Any
) -> tuple[Array, Array]:
    """Attention of tiles of rows; the results are pieces of tiles.

    Args:
      q: `[B, R, heads, H]`. KV head i serves `heads / K` heads, from `i * heads / K` on.
      keys: keys and values, in the dtype of q.
      rows: the row arguments of `keys.seen`, int32 `[tiles, rows]` each.

    Returns:
      out `[pieces, rows, heads, H]` and lse `[heads, pieces, rows]`, float32, natural log. Rows that
      a tile does not own hold any finite values; unused pieces hold any values.
    """
    tile_config, (heads, head_size), kv_heads = config.tile_config, q.shape[2:], keys.k.shape[-2]
    num_workers = work.workers.shape[0]
    num_pieces = work.tiles.shape[0] + (num_workers if config.split else 0)
    q, keys = adapter.pad_for_tma(q, 1, tile_config.block_q), keys.pad_to_block(tile_config.block_kv)
    ring = functools.partial(adapter.tiled, (tile_config.num_stages, tile_config.block_kv, head_size), q.dtype)
    ready = functools.partial(
        plgpu.Barrier, num_arrivals=keys.copies(tile_config.block_kv), num_barriers=tile_config.num_stages
    )
    free = functools.partial(plgpu.Barrier, num_arrivals=tile_config.num_consumers, num_barriers=tile_config.num_stages)
    kernel = adapter.kernel(
        functools.partial(_kernel, config, type(keys), len(rows), heads // kv_heads),
        [
            ((num_pieces, tile_config.block_q, heads, head_size), out_dtype),
            ((heads, num_pieces, tile_config.block_q), jnp.float32),
        ],
        like=q,
        kernel_name="attention",
        # CUDA bounds all grid axes but the last one here to 65,535.
        grid=(kv_heads, heads // kv_heads, num_workers),
        grid_names=("kv_head", "group", "worker"),
        num_threads=tile_config.num_consumers + 1,
        scratch_types={
            "q_smem": adapter.tiled((tile_config.num_consumers, WARPGROUP_ROWS, head_size), q.dtype),
            "k_smem": ring(),
            "v_smem": ring(),
            "q_ready": plgpu.Barrier(num_barriers=tile_config.num_consumers),
            "k_ready": ready(),
            "v_ready": ready(),
            "k_free": free(),
            "v_free": free(),
            "turn": plgpu.Barrier(num_arrivals=tile_config.num_consumers),
        },
    )
    return kernel(q, *keys, *rows, work.tiles, work.workers)


def _kernel(
    config: ForwardConfig, kind: Any, num_rows: int, group: int, q_ref: Any, *refs: Any, **scratch: Any
) -> None:
    num_keys = len(kind._fields)
    keys, rows = kind(*refs[:num_keys]), refs[num_keys : num_keys + num_rows]
    tiles, workers, *results = refs[num_keys + num_rows :]
    kv_head, worker, wg = (lax.axis_index(name) for name in ("kv_head", "worker", "wg"))
    # + 0 drops the mesh axes from the types, as loop bounds must not vary over them.
    first_tile, stop_tile, first_unit, stop_unit = (workers[worker, i] + 0 for i in range(4))

    def sweep(each_tile: Any) -> Array:
        """Call `each_tile(tile, number, blocks done before)` for each tile; return the number of blocks."""

        def body(number: Array, done: Array) -> Array:
            tile = Tile.of(tiles, number, worker, first_unit, stop_unit)
            each_tile(tile, number, done)
            return done + tile.num_blocks

        return lax.fori_loop(first_tile, stop_tile, body, jnp.int32(0))

    @pl.when(wg < config.tile_config.num_consumers)
    def _() -> None:
        adapter.set_registers(232, "increase")
        head = kv_head * group + lax.axis_index("group")
        sweep(functools.partial(_consume, config, q_ref, keys, rows, results, scratch, wg, head))

    @pl.when(wg == config.tile_config.num_consumers)
    def _() -> None:
        adapter.set_registers(40, "decrease")
        done = sweep(functools.partial(_fetch, config.tile_config, keys, scratch, kv_head))

        # Wait for every phase of the barriers, so that the block does not end while a copy is in flight.
        def drain(at: Array, _: None) -> None:
            for name in ("k_free", "v_free"):
                wait(scratch[name].at[lax.rem(at, jnp.int32(config.tile_config.num_stages))])

        lax.fori_loop(jnp.maximum(done - config.tile_config.num_stages, 0), done, drain, None)


def _fetch(
    tile_config: TileConfig, keys: Any, scratch: Any, kv_head: Array, tile: Tile, number: Array, done: Array
) -> None:
    def fetch(n: Array, _: None) -> None:
        at, block = lax.rem(done + n, jnp.int32(tile_config.num_stages)), tile.block(n)
        for half, name in enumerate("kv"):
            pl.when(done + n >= tile_config.num_stages)(functools.partial(wait, scratch[f"{name}_free"].at[at]))
            keys.fetch(half, tile, block, kv_head, scratch[f"{name}_smem"].at[at], scratch[f"{name}_ready"].at[at])

    lax.fori_loop(0, tile.num_blocks, fetch, None)


def _consume(
    config: ForwardConfig,
    q_ref: Any,
    keys: Any,
    row_refs: Any,
    results: Any,
    scratch: Any,
    wg: Array,
    head: Array,
    tile: Tile,
    number: Array,
    done: Array,
) -> None:
    """Compute 64 rows of a tile over all of its blocks."""
    tile_config, head_size = config.tile_config, q_ref.shape[-1]
    q, out_shape = scratch["q_smem"].at[wg], (WARPGROUP_ROWS, head_size)
    own = pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def take_turns() -> None:
        """Let the other consumer multiply, and wait until it has."""
        if tile_config.num_consumers == 2:
            arrive(scratch["turn"])
            wait(scratch["turn"])

    rows_of_q = pl.ds(tile.q_row + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
    plgpu.copy_gmem_to_smem(q_ref.at[tile.q_batch, rows_of_q, head], q, scratch["q_ready"].at[wg])
    rows = tuple(read(ref.at[number, own], ROW) for ref in row_refs)
    wait(scratch["q_ready"].at[wg])
    pl.when(wg == 1)(take_turns)

    def step(n: Array, carry: Any, masked: bool) -> Any:
        acc, peak, total = carry
        at, block = lax.rem(done + n, jnp.int32(tile_config.num_stages)), tile.block(n)
        wait(scratch["k_ready"].at[at])
        # Always 0, but unknown to the compiler, which would otherwise keep wgmma's descriptors of q in registers.
        zero = jnp.minimum(tile.start + n, 0)
        scores = adapter.product(scratch["q_smem"].at[wg + zero], scratch["k_smem"].at[at], take_turns)
        arrive(scratch["k_free"].at[at])
        if masked:
            scores = jnp.where(keys.seen(tile, rows, block, scores.shape), scores, -jnp.inf)
        # Peaks are kept multiplied by log2(e) * scale, so that a weight takes one fused multiply-add and one exp2.
        factor = config.scale * _LOG2E
        new_peak = jnp.maximum(peak, scores.max(1) * factor)
        weights = jnp.exp2(scores * factor - broadcast(new_peak, scores.shape, 0))
        decay = jnp.exp2(peak - new_peak)
        total = total * decay + weights.sum(1)
        acc = acc * broadcast(decay, out_shape, 0)
        weights = weights.astype(q.dtype)
        if tile_config.num_consumers == 2:
            acc, total, new_peak, weights = lax.optimization_barrier((acc, total, new_peak, weights))
            arrive(scratch["turn"])
        wait(scratch["v_ready"].at[at])
        if tile_config.num_consumers == 2:
            wait(scratch["turn"])
        if masked:
            # The first consumer cleans for both, as its turn comes first.
            pl.when(wg == 0)(functools.partial(keys.clean, tile, block, scratch["v_smem"].at[at]))
        acc = adapter.accumulate(acc, weights, scratch["v_smem"].at[at])
        arrive(scratch["v_free"].at[at])
        return acc, new_peak, total

    carry = (
        cast(jnp.zeros(out_shape, jnp.float32), TILE),
        cast(jnp.full((WARPGROUP_ROWS,), LOWEST, jnp.float32), ROW),
        cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), ROW),
    )
    carry = lax.fori_loop(0, tile.num_full, functools.partial(step, masked=False), carry)
    acc, peak, total = lax.fori_loop(tile.num_full, tile.num_blocks, functools.partial(step, masked=True), carry)
    pl.when(wg == 0)(take_turns)

    # Masked scores are -inf and peaks begin finite, so the total of a row that saw nothing is exactly 0.
    empty = total == 0
    total = jnp.where(empty, jnp.float32(1), total)
    lse = jnp.where(empty, jnp.float32(-jnp.inf), peak * (1 / _LOG2E) + jnp.log(total))
    out = (acc * broadcast(1 / total, out_shape, 0)).astype(results[0].dtype)

    def store() -> None:
        results[0].at[tile.piece, own, head][...] = out
        results[1].at[head, tile.piece, own][...] = lse

    # With several workers per tile, a tile that sees nothing has no piece.
    pl.when(tile.num_blocks > 0)(store) if config.split else store()
