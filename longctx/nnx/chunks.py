"""Functions of rows by chunks of rows, so that what they make of each row is stored for one chunk at a time.

Source: Blockwise Parallel Transformer (Liu and Abbeel 2023), section 3.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax


def map_chunks(
    function: Callable[..., Array], rows: tuple[Array, ...], padding: tuple[float, ...], chunk_size: int | None
) -> Array:
    """`function` of each chunk of at most `chunk_size` rows, stacked along a first axis.

    A gradient computes each chunk again, so nothing but its rows is kept for it.

    Args:
      function: of one chunk of each array.
      rows: arrays `[rows, ...]`, at least one row.
      padding: the value that fills up the last chunk, for each array.
      chunk_size: None: all rows are one chunk.

    Returns:
      the results `[chunks, ...]`.
    """
    count = rows[0].shape[0]
    chunks = 1 if chunk_size is None else math.ceil(count / chunk_size)
    size = math.ceil(count / chunks)

    def split(x: Array, value: float) -> Array:
        widths = [(0, chunks * size - count)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, widths, constant_values=value).reshape(chunks, size, *x.shape[1:])

    step = jax.checkpoint(lambda chunk: function(*chunk), prevent_cse=chunks == 1)
    return lax.map(step, tuple(map(split, rows, padding)))


def map_rows(function: Callable[[Array], Array], x: Array, chunk_size: int | None) -> Array:
    """`function` of hidden states `[*B, T, D]`, of which each token counts by itself, by chunks of tokens.

    Without chunks a gradient computes nothing again.
    """
    if chunk_size is None:
        return function(x)
    rows = x.reshape(-1, x.shape[-1])
    y = map_chunks(function, (rows,), (0,), chunk_size)
    return y.reshape(-1, y.shape[-1])[: rows.shape[0]].reshape(x.shape)
