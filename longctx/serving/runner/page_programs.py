"""The programs of one device that read rows of its pools and write them (see `page_transfer`)."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import SingleDeviceSharding
from jaxtyping import Int, Shaped


def read_rows(
    k: Shaped[Array, "rows page_size K H"], v: Shaped[Array, "rows page_size K H"], rows: Int[Array, "n"]
) -> Shaped[Array, "n 2 page_size K H"]:
    """Gather rows of a device's pools."""

    def gather(pool: Array) -> Array:
        # XLA's CPU backend copies a row of two dimensions faster than one of four.
        return pool.reshape(pool.shape[0], -1).at[rows].get(mode="promise_in_bounds")

    return jnp.stack([gather(k), gather(v)], 1).reshape(-1, 2, *k.shape[1:])


def write_rows(
    is_cpu: bool,
    k: Shaped[Array, "rows page_size K H"],
    v: Shaped[Array, "rows page_size K H"],
    rows: Int[Array, "n"],
    count: Int[Array, ""],
    head: Int[Array, ""],
    data: Shaped[Array, "n 2 page_size heads H"],
) -> tuple[Array, Array, Int[Array, ""]]:
    """Write the first `count` rows of `data` over KV heads `head` to `head + heads - 1` of the pools' `rows`.

    Returns:
      The pools, and a number that is there once they are written: they are donated to others before.
    """
    write = _write_in_loop if is_cpu else _write_by_scatter
    return *write(k, v, rows, count, head, data), count + 1


def _write_in_loop(k: Array, v: Array, rows: Array, count: Array, head: Array, data: Array) -> tuple[Array, Array]:
    # XLA's CPU backend scatters at a quarter of this speed, and copies the rows before.
    shape, zero = k.shape, jnp.zeros((), jnp.int32)
    is_whole = data.shape[3] == shape[2]
    start: tuple[Array, ...] = (zero, head, zero)
    if is_whole:
        k, v = (pool.reshape(shape[0], -1) for pool in (k, v))
        data, start = data.reshape(*data.shape[:2], -1), (zero,)

    def write(i: Array, pools: tuple[Array, Array]) -> tuple[Array, Array]:
        new = lax.dynamic_index_in_dim(data, i, keepdims=False)
        k, v = (lax.dynamic_update_slice(x, new[j][None], (rows[i], *start)) for j, x in enumerate(pools))
        return k, v

    k, v = lax.fori_loop(0, count, write, (k, v))
    return k.reshape(shape), v.reshape(shape)


def _write_by_scatter(k: Array, v: Array, rows: Array, count: Array, head: Array, data: Array) -> tuple[Array, Array]:
    number = jnp.arange(rows.shape[0], dtype=jnp.int32)
    at = jnp.where(number < count, rows, k.shape[0] + number)  # beyond the end, each once

    def write(pool: Array, new: Array) -> Array:
        if new.shape[2] < pool.shape[2]:
            old = pool.at[rows].get(mode="clip")
            new = lax.dynamic_update_slice_in_dim(old, new, head, 2)
        return pool.at[at].set(new, mode="drop", unique_indices=True)

    return write(k, data[:, 0]), write(v, data[:, 1])


@cache
def compile_read(device: jax.Device, pool: tuple[int, ...], dtype: Any, bucket: int) -> Any:
    """`read_rows` of so many rows of pools of a shape, compiled for a device; once for all engines of a process."""
    pools = (_array(device, pool, dtype),) * 2
    return jax.jit(read_rows).lower(*pools, _array(device, (bucket,), jnp.int32)).compile()


@cache
def compile_write(device: jax.Device, pool: tuple[int, ...], dtype: Any, bucket: int, heads: int, is_cpu: bool) -> Any:
    """`write_rows` of so many rows and heads into pools of a shape, compiled for a device; it donates the pools."""
    pools, scalar = (_array(device, pool, dtype),) * 2, _array(device, (), jnp.int32)
    data = _array(device, (bucket, 2, pool[1], heads, pool[3]), dtype)
    program = jax.jit(partial(write_rows, is_cpu), donate_argnums=(0, 1))
    return program.lower(*pools, _array(device, (bucket,), jnp.int32), scalar, scalar, data).compile()


def _array(device: jax.Device, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))


@partial(jax.jit, static_argnums=(4, 5, 6))
def cut_block(
    data: Array, pages: Array, layer: Array, head: Array, layers: int, heads: int, bucket: int
) -> Shaped[Array, "bucket 2 page_size heads H"]:
    """Rows of some pages of a block, of so many layers and heads of it; the last pages may be there for the shape."""
    cut = lax.dynamic_slice_in_dim(data.at[pages].get(mode="clip"), layer, layers, 1)
    rows = lax.dynamic_slice_in_dim(cut, head, heads, 4).reshape(-1, *data.shape[2:4], heads, data.shape[5])
    return jnp.pad(rows, [(0, bucket - rows.shape[0])] + [(0, 0)] * 4)


@partial(jax.jit, static_argnums=(2, 3))
def slice_pages(rows: Array, first: Array, count: int, layers: int) -> Array:
    """Some pages, `[count, layers, 2, page_size, K, H]`, of rows that were read."""
    cut = lax.dynamic_slice_in_dim(rows, first * layers, count * layers)
    return cut.reshape(count, layers, *rows.shape[1:])
