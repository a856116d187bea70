"""The forward attention kernel for Hopper GPUs, over contiguous keys or over pages.

A thread block has one producer warpgroup, which copies queries, keys and values to shared memory (TMA), and one or two
consumer warpgroups, which multiply 64 rows each (wgmma). `schedule.py` says in which order they wait, arrive and read;
here are the operations. A row of a tile is a query of one head, or, with folded heads, of any head that shares the KV
head; the kernel treats both alike.

`work.py` says beforehand which blocks a tile sees. Blocks of which all rows see every key come first and take no mask.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.mosaic_gpu import adapter, schedule
from longctx.kernels.mosaic_gpu.adapter import LOWEST, ROW, TILE, broadcast, cast, copy_rows, read
from longctx.kernels.mosaic_gpu.convert import convert_block
from longctx.kernels.mosaic_gpu.keys import Contiguous, Paged
from longctx.kernels.mosaic_gpu.tile_config import WARPGROUP_ROWS, TileConfig
from longctx.kernels.mosaic_gpu.wgmma import Accumulator, multiply
from longctx.kernels.work import Tile, Work

_LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Static arguments of a call; `scale` is positive."""

    tile_config: TileConfig
    scale: float
    split: bool  # several workers may share a tile, and its pieces must be merged


def with_positive_scale(q: Array, scale: float) -> tuple[Array, float]:
    """Make the scale positive by the sign of q. The kernel takes maxima before scaling, which must keep their order."""
    if abs(scale) < 1e-30:
        return jnp.zeros_like(q), 1.0
    return (q, scale) if scale > 0 else (-q, -scale)


@kernel_jit("config", "out_dtype")
def attention_forward(
    q: Array, keys: Contiguous | Paged, rows: tuple[Array, ...], work: Work, config: ForwardConfig, out_dtype: Any
) -> tuple[Array, Array]:
    """Attention of the items of `work`, each a tile of rows of one head.

    Args:
      q: `[B, R, heads, H]`. KV head i serves `heads / K` heads, from `i * heads / K` on. Tiles begin at multiples of 8.
      keys: keys and values, in the dtype of q.
      rows: the row arguments of `keys.seen`, int32 `[tiles, block_q]` each.

    Returns:
      out and lse (float32, natural log): `[pieces, block_q, H]` and `[pieces, block_q]` if the work is split,
      else `[tiles, block_q, heads, H]` and `[tiles, block_q, heads]`. Rows that a tile does not own hold any finite
      values; pieces that are not computed hold any values.
    """
    tile_config, (heads, head_size), kv_heads = config.tile_config, q.shape[2:], keys.k.shape[-2]
    block_q, num_tiles, num_workers = tile_config.block_q, work.tiles.shape[0], work.workers.shape[0]
    num_pieces = heads * num_tiles + num_workers
    of_rows = (num_pieces, block_q) if config.split else (num_tiles, block_q, heads)
    q, keys = adapter.pad_for_tma(q, 1, tile_config.block_q), keys.pad_to_block(tile_config.block_kv)
    pipeline = schedule.Pipeline(
        tile_config.num_consumers,
        tile_config.num_stages,
        keys.copies(tile_config.block_kv),
        tile_config.num_fp8_stages,
    )
    key_arrays, structure = jax.tree.flatten(keys)
    ring = adapter.tiled((tile_config.num_stages, tile_config.block_kv, head_size), q.dtype)
    kernel = adapter.kernel(
        functools.partial(_kernel, config, pipeline, structure, len(rows), heads // kv_heads),
        [((*of_rows, head_size), out_dtype), (of_rows, jnp.float32)],
        like=q,
        kernel_name="attention",
        grid=(num_workers,),
        grid_names=("worker",),
        num_threads=tile_config.num_consumers + 1 + bool(tile_config.num_fp8_stages),
        scratch_types={
            "q": adapter.tiled((tile_config.num_consumers, WARPGROUP_ROWS, head_size), q.dtype),
            "k": ring,
            "v": ring,
            **keys.shared(tile_config),
            **{
                name: plgpu.Barrier(num_arrivals=spec.arrivals, num_barriers=spec.number)
                for name, spec in pipeline.barriers.items()
            },
        },
    )
    return kernel(q, *key_arrays, *rows, work.tiles, work.items, work.workers)


def _kernel(
    config: ForwardConfig,
    pipeline: schedule.Pipeline,
    structure: Any,
    num_rows: int,
    group: int,
    *refs: Any,
    **scratch: Any,
) -> None:
    q, refs = refs[0], refs[1:]
    num_keys = structure.num_leaves
    keys, rows = jax.tree.unflatten(structure, refs[:num_keys]), refs[num_keys : num_keys + num_rows]
    block = ThreadBlock(config, pipeline, Operands(q, keys, rows, *refs[num_keys + num_rows :]), scratch, group)
    wg = lax.axis_index("wg")
    num_consumers, registers = config.tile_config.num_consumers, config.tile_config.registers

    @pl.when(wg < num_consumers)
    def _() -> None:
        if registers:
            adapter.set_registers(registers.consumer, "increase")
        consumer = Consumer(block, wg)
        schedule.consume(consumer, consumer.start, consumer.stop)

    @pl.when(wg == num_consumers)
    def _() -> None:
        if registers:
            adapter.set_registers(registers.producer, "decrease")
        producer = Producer(block)
        schedule.produce(producer, producer.start, producer.stop)

    if pipeline.num_fp8_stages:

        @pl.when(wg == num_consumers + 1)
        def _() -> None:
            if registers:
                adapter.set_registers(registers.converter, "decrease")
            converter = Converter(block)
            schedule.convert(converter, converter.start, converter.stop)


class Operands(NamedTuple):
    """References to global memory."""

    q: Any
    keys: Contiguous | Paged
    rows: tuple[Any, ...]
    tiles: Any
    items: Any
    workers: Any
    out: Any
    lse: Any


class ThreadBlock(NamedTuple):
    """State that all warpgroups of a thread block share."""

    config: ForwardConfig
    pipeline: schedule.Pipeline
    operands: Operands
    shared: dict[str, Any]  # shared memory and barriers
    group: int  # heads that share a KV head


class Machine:
    """The operations of `schedule.Machine` in Pallas."""

    def __init__(self, block: ThreadBlock) -> None:
        self.block, self.pipeline, self.shared = block, block.pipeline, block.shared
        self.operands, self.tile_config = block.operands, block.config.tile_config
        self.worker = lax.axis_index("worker")
        self.start, self.stop = self._of_worker(0), self._of_worker(1)

    def wait(self, barrier: str, index: Any) -> None:
        plgpu.barrier_wait(self.shared[barrier].at[index])

    def arrive(self, barrier: str, index: Any) -> None:
        plgpu.barrier_arrive(self.shared[barrier].at[index])

    def loop(self, start: Any, stop: Any, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        return lax.fori_loop(start, stop, step, carry)

    def when(self, condition: Any, action: Callable[[], None]) -> None:
        pl.when(condition)(action)

    def branch(self, condition: Any, function: Callable[[Any], Any], carry: Any) -> Any:
        return lax.cond(condition, function, lambda carry: carry, carry)

    def minimum(self, a: Any, b: Any) -> Any:
        return jnp.minimum(a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return jnp.maximum(a, b)

    def remainder(self, a: Any, b: int) -> Any:
        return lax.rem(a, jnp.int32(b))

    def integer(self, a: int) -> Any:
        return jnp.int32(a)

    def tile(self, position: Array) -> Tile:
        # The worker's units are read for each tile: a register less for each in all loops.
        tables, units = (self.operands.tiles, self.operands.items), (self._of_worker(2), self._of_worker(3))
        return Tile.of(*tables, position, self.worker, *units)

    def _of_worker(self, column: int) -> Array:
        # + 0 drops the mesh axes from the type, as loop bounds must not vary over them.
        return self.operands.workers[self.worker, column] + 0


class Producer(Machine):
    """Copies operands to shared memory."""

    def __init__(self, block: ThreadBlock) -> None:
        super().__init__(block)
        self.keys = self.operands.keys.load()

    def copy_rows(self, tile: Tile, consumer: int) -> None:
        start = tile.q_row + consumer * WARPGROUP_ROWS
        to, ready = self.shared["q"].at[consumer], self.shared["q_ready"].at[consumer]
        copy_rows(self.operands.q, (tile.q_batch,), start, tile.head, to, ready)

    def find(self, tile: Tile, n: Array) -> None:
        self.keys.find(tile, tile.block(n), self.tile_config.block_kv, self.shared)

    def copy_block(self, ring: schedule.Ring, tile: Tile, n: Array, stage: Array) -> None:
        to, ready = self.shared[ring.stages].at[stage], self.shared[ring.ready].at[stage]
        what = ring.half, tile, tile.block(n), lax.div(tile.head, jnp.int32(self.block.group)), self.shared
        self.keys.fetch(*what, to, ready)
        if isinstance(self.keys, Paged) and self.pipeline.num_fp8_stages:
            self.keys.fetch_scales(*what, self.shared["scales"].at[ring.half, stage], ready)


class Converter(Machine):
    """Converts blocks of FP8 pages."""

    def convert(self, source: schedule.Ring, source_stage: Array, ring: schedule.Ring, stage: Array) -> None:
        scales = self.shared["scales"].at[ring.half, source_stage]
        convert_block(self.shared[source.stages].at[source_stage], scales, self.shared[ring.stages].at[stage])


class Softmax(NamedTuple):
    """The softmax of 64 rows over the blocks so far, in registers."""

    peak: Array  # [64], times log2(e) * scale, so that a weight takes one fused multiply-add and one exp2
    total: Array  # [64]


class Consumer(Machine):
    """Computes 64 rows of each tile."""

    def __init__(self, block: ThreadBlock, wg: Array) -> None:
        super().__init__(block)
        self.consumer = wg
        self.own = pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        self.head_size = self.operands.q.shape[-1]

    def begin(self, tile: Tile) -> tuple[tuple[Array, ...], Array, Softmax]:
        mask = tuple(read(ref.at[tile.number, self.own], ROW) for ref in self.operands.rows)
        acc = cast(jnp.zeros((WARPGROUP_ROWS, self.head_size), jnp.float32), TILE)
        peak, total = (cast(jnp.full((WARPGROUP_ROWS,), x, jnp.float32), ROW) for x in (LOWEST, 0))
        return mask, acc, Softmax(peak, total)

    def weigh(
        self, tile: Tile, mask: tuple[Array, ...] | None, n: Array, softmax: Softmax, scores: Array
    ) -> tuple[Softmax, Array, Array]:
        if mask is not None:
            shape = (WARPGROUP_ROWS, self.tile_config.block_kv)
            seen = self.operands.keys.seen(tile, mask, tile.block(n), shape)
            scores = jnp.where(seen, scores, -jnp.inf)
        factor = self.block.config.scale * _LOG2E
        peak = jnp.maximum(softmax.peak, scores.max(1) * factor)
        weights = jnp.exp2(scores * factor - broadcast(peak, scores.shape, 0))
        decay = jnp.exp2(softmax.peak - peak)
        total = softmax.total * decay + weights.sum(1)
        return Softmax(peak, total), weights, decay

    def scale(self, acc: Array, decay: Array) -> Array:
        return acc * broadcast(decay, acc.shape, 0)

    def narrow(self, weights: Array) -> Array:
        return weights.astype(self.operands.q.dtype)

    def clean(self, tile: Tile, n: Array, stage: Array) -> None:
        self.operands.keys.clean(tile, tile.block(n), self.shared["v"].at[stage])

    def multiply(self, products: Callable[..., Any], scores: bool, acc: Array | None = None, like: Any = None) -> Any:
        starts: list[Any] = [(WARPGROUP_ROWS, self.tile_config.block_kv)] * scores
        return multiply(starts if acc is None else [*starts, acc], products, like)

    def issue_scores(self, accumulator: Accumulator, stage: Array) -> None:
        slot = self.consumer
        if self.head_size == 256:
            # Plus 0, which the compiler can't know: it would keep wgmma's descriptors of q in registers, and spill.
            slot = slot + jnp.minimum(stage, 0)
        accumulator.issue(self.shared["q"].at[slot], self.shared["k"].at[stage], transposed=True)

    def issue_values(self, accumulator: Accumulator, weights: Array, stage: Array) -> None:
        accumulator.issue(weights, self.shared["v"].at[stage])

    def awaited(self, accumulator: Accumulator, in_flight: int = 0) -> Array:
        return accumulator.awaited(in_flight)

    def store(self, tile: Tile, acc: Array, softmax: Softmax) -> None:
        # Masked scores are -inf and peaks begin finite, so the total of a row that saw nothing is exactly 0.
        empty = softmax.total == 0
        total = jnp.where(empty, jnp.float32(1), softmax.total)
        lse = jnp.where(empty, jnp.float32(-jnp.inf), softmax.peak * (1 / _LOG2E) + jnp.log(total))
        self._write(tile, acc * broadcast(1 / total, acc.shape, 0), lse)

    def store_empty(self, tile: Tile) -> None:
        if not self.block.config.split:  # else a tile without blocks has no piece
            zeros = cast(jnp.zeros((WARPGROUP_ROWS, self.head_size), jnp.float32), TILE)
            self._write(tile, zeros, cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), ROW))

    def _write(self, tile: Tile, out: Array, lse: Array) -> None:
        at = (tile.piece, self.own) if self.block.config.split else (tile.number, self.own, tile.head)
        adapter.write(self.operands.out.at[at], out.astype(self.operands.out.dtype))
        adapter.write(self.operands.lse.at[at], lse)
