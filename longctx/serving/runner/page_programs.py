"""The programs of one device that read rows of its pools and write them (see `page_transfer`)."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import SingleDeviceSharding
from jaxtyping import Int, Shaped

from longctx.kernels.fp8_rows import join_packed, split_packed
from longctx.serving.kv_cache.page_layout import PageLayout


def read_rows(
    pools: tuple[Shaped[Array, "rows ..."], ...], rows: Int[Array, "n"]
) -> Shaped[Array, "n 2 page_size K row_size"]:
    """Gather rows of a device's pools, those of `PagedCache`: keys, values and, where they have them, their scales."""

    def gather(pool: Array) -> Array:
        # XLA's CPU backend copies a row of two dimensions faster than one of four.
        found = pool.reshape(pool.shape[0], -1).at[rows].get(mode="promise_in_bounds")
        return found.reshape(-1, *pool.shape[1:])

    kv = jnp.stack([gather(pool) for pool in pools[:2]], 1)
    if len(pools) == 2:
        return kv
    return join_packed(kv, jnp.stack([gather(pool) for pool in pools[2:]], 1).swapaxes(2, 3))


def write_rows(
    is_cpu: bool,
    pools: tuple[Shaped[Array, "rows ..."], ...],
    rows: Int[Array, "n"],
    count: Int[Array, ""],
    head: Int[Array, ""],
    data: Shaped[Array, "n 2 page_size heads row_size"],
) -> tuple[tuple[Array, ...], Int[Array, ""]]:
    """Write the first `count` rows of `data` over KV heads `head` to `head + heads - 1` of the pools' `rows`.

    Returns:
      The pools, and a number that is there once they are written: they are donated to others before.
    """
    write = _write_in_loop if is_cpu else _write_by_scatter
    return write(pools, rows, count, head, data), count + 1


def _of_pools(data: Shaped[Array, "*rows 2 page_size heads row_size"], head_dim: int) -> tuple[Array, ...]:
    """Divide rows by pool: keys and values `[*rows, page_size, heads, H]`, and scales `[*rows, heads, page_size]`."""
    if data.shape[-1] == head_dim:
        return data[..., 0, :, :, :], data[..., 1, :, :, :]
    kv, scales = split_packed(data)
    scales = scales.swapaxes(-1, -2)
    return kv[..., 0, :, :, :], kv[..., 1, :, :, :], scales[..., 0, :, :], scales[..., 1, :, :]


def _head_axis(pool: Array) -> int:
    """The axis of KV heads: `[rows, page_size, K, H]` of keys and values, `[rows, K, page_size]` of scales."""
    return 2 if pool.ndim == 4 else 1


def _write_in_loop(pools: tuple[Array, ...], rows: Array, count: Array, head: Array, data: Array) -> tuple[Array, ...]:
    # XLA's CPU backend scatters at a quarter of this speed, and copies the rows before.
    head_dim, is_whole = pools[0].shape[3], data.shape[3] == pools[0].shape[2]
    shapes, zero = [pool.shape for pool in pools], jnp.zeros((), jnp.int32)
    if is_whole:
        flat = tuple(pool.reshape(pool.shape[0], -1) for pool in pools)
        starts: list[tuple[Array, ...]] = [(zero,)] * len(pools)
    else:
        flat = pools
        starts = [(zero, head, zero) if pool.ndim == 4 else (head, zero) for pool in pools]

    def write(i: Array, pools: tuple[Array, ...]) -> tuple[Array, ...]:
        new = _of_pools(lax.dynamic_index_in_dim(data, i, keepdims=False), head_dim)
        return tuple(
            lax.dynamic_update_slice(pool, x.reshape(1, *(x.shape if pool.ndim > 2 else (-1,))), (rows[i], *start))
            for pool, x, start in zip(pools, new, starts, strict=True)
        )

    written = lax.fori_loop(0, count, write, flat)
    return tuple(pool.reshape(shape) for pool, shape in zip(written, shapes, strict=True))


def _write_by_scatter(
    pools: tuple[Array, ...], rows: Array, count: Array, head: Array, data: Array
) -> tuple[Array, ...]:
    number = jnp.arange(rows.shape[0], dtype=jnp.int32)
    at = jnp.where(number < count, rows, pools[0].shape[0] + number)  # beyond the end, each once

    def write(pool: Array, new: Array) -> Array:
        axis = _head_axis(pool)
        if new.shape[axis] < pool.shape[axis]:
            old = pool.at[rows].get(mode="clip")
            new = lax.dynamic_update_slice_in_dim(old, new, head, axis)
        return pool.at[at].set(new, mode="drop", unique_indices=True)

    return tuple(map(write, pools, _of_pools(data, pools[0].shape[3])))


class PoolShape(NamedTuple):
    """Shapes of a device's pools: keys and values `[rows, page_size, heads, H]`, scales `[rows, heads, page_size]`."""

    layout: PageLayout
    rows: int
    heads: int

    def pools(self, device: jax.Device) -> tuple[Any, ...]:
        """Return the pools of `PagedCache`, as far as there are some."""
        layout = self.layout
        kv = _array(device, (self.rows, layout.page_size, self.heads, layout.head_dim), layout.bits)
        scales = _array(device, (self.rows, self.heads, layout.page_size), jnp.float32)
        return (kv, kv, scales, scales) if layout.has_scales else (kv, kv)


@cache
def compile_read(device: jax.Device, shape: PoolShape, bucket: int) -> Any:
    """Compile `read_rows` for a device, a number of rows and a shape of pools; once for all engines of a process."""
    return jax.jit(read_rows).lower(shape.pools(device), _array(device, (bucket,), jnp.int32)).compile()


@cache
def compile_write(device: jax.Device, shape: PoolShape, bucket: int, heads: int, is_cpu: bool) -> Any:
    """Compile `write_rows` for a device, numbers of rows and heads and a shape of pools; it donates the pools."""
    rows, scalar = _array(device, (bucket,), jnp.int32), _array(device, (), jnp.int32)
    data = _array(device, (bucket, 2, shape.layout.page_size, heads, shape.layout.row_size), shape.layout.bits)
    program = jax.jit(partial(write_rows, is_cpu), donate_argnums=0)
    return program.lower(shape.pools(device), rows, scalar, scalar, data).compile()


def _array(device: jax.Device, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))


@partial(jax.jit, static_argnums=(4, 5, 6))
def cut_block(
    data: Array, pages: Array, layer: Array, head: Array, layers: int, heads: int, bucket: int
) -> Shaped[Array, "bucket 2 page_size heads row_size"]:
    """Return rows of some pages, layers and heads of a block; the last pages may only fill the shape."""
    cut = lax.dynamic_slice_in_dim(data.at[pages].get(mode="clip"), layer, layers, 1)
    rows = lax.dynamic_slice_in_dim(cut, head, heads, 4).reshape(-1, *data.shape[2:4], heads, data.shape[5])
    return jnp.pad(rows, [(0, bucket - rows.shape[0])] + [(0, 0)] * 4)


@partial(jax.jit, static_argnums=(2, 3))
def slice_pages(rows: Array, first: Array, count: int, layers: int) -> Array:
    """Some pages, `[count, layers, 2, page_size, K, row_size]`, of rows that were read."""
    cut = lax.dynamic_slice_in_dim(rows, first * layers, count * layers)
    return cut.reshape(count, layers, *rows.shape[1:])
