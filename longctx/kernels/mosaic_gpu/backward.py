"""The backward attention kernel for Hopper GPUs, run once from the queries' side and once from the keys'.

From a tile of queries it computes d_q, over the keys that they see; from a tile of keys d_k and d_v, over the queries
that see them. So each result is summed in the registers of one warpgroup, without atomics and in a fixed order. Both
runs are the same code: the rows of the tile stay in shared memory, and the "others" pass by in blocks, which a producer
warpgroup copies to a ring of stages (TMA).

    from queries: scores = q @ k.T, d_weights = d_out @ v.T, d_q += d_scores @ k
    from keys:    scores = k @ q.T, d_weights = v @ d_out.T, d_k += d_scores @ q, d_v += weights @ d_out
    both:         weights = exp(scale * (scores - lse / scale)), d_scores = weights * (d_weights + row_term)

The accumulators of the first two products start from -lse / scale and the row term of each query.

Source: FlashAttention-2 (Dao 2023), algorithm 2; two passes in place of its atomics.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.mosaic_gpu import barrier_arrive as arrive
from jax.experimental.pallas.mosaic_gpu import barrier_wait as wait

from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.mosaic_gpu.adapter import COLUMN, ROW, TILE, broadcast, cast, copy_rows, read
from longctx.kernels.mosaic_gpu.keys import Contiguous
from longctx.kernels.mosaic_gpu.tile_config import WARPGROUP_ROWS, TileConfig
from longctx.kernels.mosaic_gpu.wgmma import Accumulator, multiply
from longctx.kernels.work import Tile, Tiles

_LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Static arguments of a call."""

    from_keys: bool  # whether the rows of a tile are keys, and the others queries
    scores: bool  # whether to compute scale * sum of d_scores @ others: d_q or d_k
    weights: bool  # whether to compute the sum of weights @ others: d_v
    scale: float
    tile_config: TileConfig

    @property
    def num_resident(self) -> int:
        """Number of the tile's two operands that are needed: the second serves d_scores alone."""
        return 1 + self.scores


@kernel_jit("config")
def attention_backward(
    config: BackwardConfig,
    rows: tuple[Array, Array],
    others: Contiguous,
    seen: tuple[Array, ...],
    stats: Array,
    tiles: Tiles,
) -> list[Array]:
    """One result for each of `config.scores` and `config.weights`.

    Args:
      rows: q and d_out `[B, T, N, H]`, or k and v `[B, S, K, H]`, or both as one array `[2, B, S, K, H]`, twice.
      others: the other two, and their tokens.
      seen: the row arguments of `others.seen`, int32 `[tiles, rows]` each.
      stats: `[2, B, N, whole blocks]`: -lse / scale, -inf where lse is, and row terms.

    Returns:
      Arrays `[tiles, rows, heads of rows, H]`, float32. Rows that a tile does not own hold any values.
    """
    heads, head_size = rows[0].shape[-2:]
    other_heads = others.k.shape[-2]
    dtype, num_tiles = rows[0].dtype, tiles.start.shape[0]
    resident = [
        adapter.pad_for_tma(x, -3, -x.shape[-3] % config.tile_config.block_q) for x in rows[: config.num_resident]
    ]
    others = others.pad_to_block(config.tile_config.block_kv)
    ring = functools.partial(
        adapter.tiled, (config.tile_config.num_stages, config.tile_config.block_kv, head_size), dtype
    )
    scratch = {
        "row_smem": adapter.tiled(
            (config.num_resident * config.tile_config.num_consumers, WARPGROUP_ROWS, head_size), dtype
        ),
        "x_smem": ring(),
        "y_smem": ring(),
        "rows_ready": plgpu.Barrier(num_arrivals=config.num_resident, num_barriers=config.tile_config.num_consumers),
        "ready": plgpu.Barrier(num_arrivals=2 + config.from_keys, num_barriers=config.tile_config.num_stages),
        "free": plgpu.Barrier(
            num_arrivals=config.tile_config.num_consumers, num_barriers=config.tile_config.num_stages
        ),
    }
    if config.from_keys:
        scratch["stats_smem"] = plgpu.SMEM((config.tile_config.num_stages, 2, config.tile_config.block_kv), jnp.float32)
    kernel = adapter.kernel(
        functools.partial(_kernel, config, heads, other_heads, len(seen)),
        [((num_tiles, config.tile_config.block_q, heads, head_size), jnp.float32)] * (config.scores + config.weights),
        like=rows[0],
        kernel_name="attention_of_keys" if config.from_keys else "attention_of_queries",
        grid=(heads, num_tiles),
        grid_names=("head", "tile"),
        num_threads=config.tile_config.num_consumers + 1,
        scratch_types=scratch,
    )
    return kernel(*resident, *others, *seen, stats, jnp.stack(tiles, 1))


class Steps(NamedTuple):
    """The loop of a tile: each block, once for each head of the others that belongs to the tile's head."""

    tile: Tile
    first_head: Array
    group: int
    stages: int

    @property
    def num(self) -> Array:
        return self.tile.num_blocks * self.group

    @property
    def num_full(self) -> Array:
        """Number of steps without a mask, which come first."""
        return self.tile.num_full * self.group

    def block(self, n: Array) -> Array:
        return self.tile.block(lax.div(n, jnp.int32(self.group)))

    def head(self, n: Array) -> Array:
        return self.first_head + lax.rem(n, jnp.int32(self.group))

    def stage(self, n: Array) -> Array:
        return lax.rem(n, jnp.int32(self.stages))


class ThreadBlock(NamedTuple):
    """State that the warpgroups of a thread block share."""

    config: BackwardConfig
    steps: Steps
    head: Array
    rows: Any  # references to global memory from here on
    others: Contiguous
    seen: Any
    stats: Any
    results: Any
    shared: dict[str, Any]  # shared memory and barriers


def _kernel(config: BackwardConfig, heads: int, other_heads: int, num_seen: int, *refs: Any, **scratch: Any) -> None:
    split = config.num_resident
    end = split + 3 + num_seen
    rows, others, seen = refs[:split], Contiguous(*refs[split : split + 3]), refs[split + 3 : end]
    stats, tiles, *results = refs[end:]
    head, number, wg = (lax.axis_index(name) for name in ("head", "tile", "wg"))
    # Long tiles begin first: in most layouts the last queries and the first keys see, or are seen by, most.
    number = number if config.from_keys else tiles.shape[0] - 1 - number
    # + 0 drops the mesh axes from the types, as loop bounds must not vary over them.
    tile = Tile(*(*(tiles[number, i] + 0 for i in range(len(Tiles._fields))), number))
    first_head = lax.div(head * other_heads, jnp.int32(heads))
    steps = Steps(tile, first_head, max(other_heads // heads, 1), config.tile_config.num_stages)
    block = ThreadBlock(config, steps, head, rows, others, seen, stats, results, scratch)
    num_consumers, registers = config.tile_config.num_consumers, config.tile_config.registers

    @pl.when(wg < num_consumers)
    def _() -> None:
        if registers:
            adapter.set_registers(registers.consumer, "increase")
        _consume(block, wg)

    @pl.when(wg == num_consumers)
    def _() -> None:
        if registers:
            adapter.set_registers(registers.producer, "decrease")
        _fetch(block)


def _fetch(thread_block: ThreadBlock) -> None:
    config, steps, shared = thread_block.config, thread_block.steps, thread_block.shared

    def fetch(n: Array, _: None) -> None:
        at, block, head = steps.stage(n), steps.block(n), steps.head(n)
        pl.when(n >= steps.stages)(functools.partial(wait, shared["free"].at[at]))
        ready = shared["ready"].at[at]
        for half, ring in enumerate((shared["x_smem"], shared["y_smem"])):
            thread_block.others.fetch(half, steps.tile, block, head, shared, ring.at[at], ready)
        if config.from_keys:
            own = pl.ds(block * config.tile_config.block_kv, config.tile_config.block_kv)
            x = thread_block.stats.at[:, steps.tile.kv, head, own]
            plgpu.copy_gmem_to_smem(x, shared["stats_smem"].at[at], ready)

    def drain(n: Array, _: None) -> None:
        # Wait for every phase of the barriers, so that the block does not end while a copy is in flight.
        wait(shared["free"].at[steps.stage(n)])

    lax.fori_loop(0, steps.num, fetch, None)
    lax.fori_loop(jnp.maximum(steps.num - steps.stages, 0), steps.num, drain, None)


def _consume(thread_block: ThreadBlock, wg: Array) -> None:
    """Compute 64 rows of a tile over all of its steps."""
    config, steps, head, row_refs, others, seen_refs, stats, results, shared = thread_block
    tile, shape = steps.tile, (WARPGROUP_ROWS, config.tile_config.block_kv)
    own = pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
    first_row = tile.q_row + wg * WARPGROUP_ROWS
    own_rows = pl.ds(first_row, WARPGROUP_ROWS)
    slots = [i * config.tile_config.num_consumers + wg for i in range(config.num_resident)]
    for half, (x, slot) in enumerate(zip(row_refs, slots, strict=True)):
        before = (half, tile.q_batch) if len(x.shape) == 5 else (tile.q_batch,)
        copy_rows(x, before, first_row, head, shared["row_smem"].at[slot], shared["rows_ready"].at[wg])
    row_stats = [] if config.from_keys else [read(stats.at[i, tile.q_batch, head, own_rows], ROW) for i in (0, 1)]
    seen = tuple(read(ref.at[tile.number, own], ROW) for ref in seen_refs)
    wait(shared["rows_ready"].at[wg])

    def step(n: Array, accs: list[Array], masked: bool) -> list[Array]:
        at, block = steps.stage(n), steps.block(n)
        x, y = shared["x_smem"].at[at], shared["y_smem"].at[at]
        # Always 0, but unknown to the compiler, which would otherwise keep all addresses in registers, and spill.
        zero = jnp.minimum(tile.start + n, 0)
        a, b = (shared["row_smem"].at[zero + slot] for slot in (slots[0], slots[-1]))

        def start(i: int) -> Array:
            if config.from_keys:
                return broadcast(read(shared["stats_smem"].at[at, i], COLUMN), shape, 1)
            return broadcast(row_stats[i], shape, 0)

        def to_weights(scores: Array) -> Array:
            weights = jnp.exp2(scores * (config.scale * _LOG2E))
            if masked:
                weights = jnp.where(others.seen(tile, seen, block, shape), weights, jnp.float32(0))
            return weights

        def first_products(of_scores: Accumulator, of_d_weights: Accumulator) -> tuple[Array, Array]:
            of_scores.issue(a, x, transposed=True)
            of_d_weights.issue(b, y, transposed=True)
            weights = to_weights(of_scores.awaited(in_flight=1))
            return weights, of_d_weights.awaited()

        def one_product(i: int, rows: Any, others: Any) -> Array:
            def product(accumulator: Accumulator) -> Array:
                accumulator.issue(rows, others, transposed=True)
                return accumulator.awaited()

            return multiply([start(i)], product, like=start(i))

        def sums(*accumulators: Accumulator) -> list[Array]:
            for accumulator, factor in zip(accumulators, factors, strict=True):
                accumulator.issue(*factor)
            return [accumulator.awaited() for accumulator in accumulators]

        wait(shared["ready"].at[at])
        if config.scores and not masked:
            weights, d_weights = multiply([start(0), start(1)], first_products, like=(start(0), start(1)))
        else:  # a mask takes registers, so the products run one after the other
            weights = to_weights(one_product(0, a, x))
            d_weights = one_product(1, b, y) if config.scores else weights
        factors = [((weights * d_weights).astype(x.dtype), x)] if config.scores else []
        if config.weights:
            factors.append((weights.astype(y.dtype), y))
        accs = multiply(accs, sums, like=accs)
        arrive(shared["free"].at[at])
        return accs

    zeros = cast(jnp.zeros((WARPGROUP_ROWS, row_refs[0].shape[-1]), jnp.float32), TILE)
    accs = [zeros] * len(results)
    accs = lax.fori_loop(0, steps.num_full, functools.partial(step, masked=False), accs)
    accs = lax.fori_loop(steps.num_full, steps.num, functools.partial(step, masked=True), accs)
    if config.scores:
        accs[0] = accs[0] * config.scale
    for result, acc in zip(results, accs, strict=True):
        adapter.write(result.at[tile.number, own, head], acc)
