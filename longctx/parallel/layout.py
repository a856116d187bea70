"""Which rank computes which token of a sequence: contiguous, zigzag or striped."""

import jax.numpy as jnp
import numpy as np
from jax import Array

LAYOUTS = ("contiguous", "zigzag", "striped")


def layout_shards(length: int, num_shards: int, layout: str) -> list[np.ndarray]:
    """The tokens of each shard, ascending; shards differ by a token at most, the first ones have it.

    * `contiguous`: one run of tokens each. Of a causal sequence, the last shard has most to attend to.
    * `zigzag`: 2 * num_shards chunks, which differ by a token at most; shard i has chunks i and 2 * num_shards - 1 - i.
      (The load-balanced sharding of the context parallelism paper, 3.5.1.)
    * `striped`: shard i has tokens i, i + num_shards, ... (Striped Attention, Brandon et al. 2023.)
    """
    check_layout(num_shards, layout)
    if not isinstance(length, (int, np.integer)) or length < 0:
        raise ValueError(f"length must be a non-negative integer, got {length!r}")
    if layout == "striped":
        return [np.arange(shard, length, num_shards) for shard in range(num_shards)]
    sizes = np.full(num_shards, length // num_shards)
    sizes[: length % num_shards] += 1
    if layout == "zigzag":
        sizes = np.concatenate([(sizes + 1) // 2, (sizes // 2)[::-1]])
    chunks = np.split(np.arange(length), np.cumsum(sizes)[:-1])
    if layout == "contiguous":
        return chunks
    return [np.concatenate([chunks[i], chunks[-1 - i]]) for i in range(num_shards)]


def check_layout(num_shards: int, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if not isinstance(num_shards, (int, np.integer)) or num_shards < 1:
        raise ValueError(f"num_shards must be a positive integer, got {num_shards!r}")


def shard_order(length: int, num_shards: int, layout: str) -> np.ndarray:
    """`layout_shards` as one array `[num_shards, ceil(length / num_shards)]`, filled up with -1."""
    shards = layout_shards(length, num_shards, layout)
    order = np.full((num_shards, -(-length // num_shards)), -1)
    for row, tokens in zip(order, shards, strict=True):
        row[: len(tokens)] = tokens
    return order


def shard_positions(length: int, num_shards: int, layout: str = "zigzag") -> tuple[np.ndarray, np.ndarray]:
    """(positions, segment_ids) of one sequence as `shard_sequence` deals it: int32 `[N * ceil(length / N)]`.

    Positions are 0 to length - 1, and 0 in padding, whose segment id is -1; all else is segment 0.
    """
    order = shard_order(length, num_shards, layout).ravel()
    return np.maximum(order, 0).astype(np.int32), np.where(order < 0, -1, 0).astype(np.int32)


def shard_sequence(
    x: Array | np.ndarray, num_shards: int, layout: str = "zigzag", axis: int = 1, pad_value: float = 0
) -> Array:
    """Reorder a sequence so that its N equal parts along `axis` are the shards of a layout.

    Args:
      x: any array with the sequence, of any length T, along `axis`.
      num_shards: ranks N. Shards are equally long, ceil(T / N): what is missing is `pad_value`, at a shard's end.
      layout: `"contiguous"`, `"zigzag"` or `"striped"`.
      pad_value: for segment ids take -1, so that nobody sees padding. (`shard_positions` makes both.)

    Returns:
      x with `N * ceil(T / N)` entries along `axis`, to be sharded over a mesh axis of N. In or outside of jit.

    Raises:
      ValueError: `layout`, `num_shards` or `axis` is none.
    """
    axis = _check_axis(x, axis)
    order = shard_order(x.shape[axis], num_shards, layout).ravel()
    taken = jnp.take(x, np.maximum(order, 0), axis)
    if (order >= 0).all():
        return taken
    is_token = np.expand_dims(order >= 0, [a for a in range(x.ndim) if a != axis])
    return jnp.where(jnp.broadcast_to(is_token, taken.shape), taken, jnp.asarray(pad_value, taken.dtype))


def unshard_sequence(
    x: Array | np.ndarray, num_shards: int, layout: str = "zigzag", axis: int = 1, length: int | None = None
) -> Array:
    """Undo `shard_sequence`.

    Args:
      x: an array of which N equal parts along `axis` are the shards of a layout.
      length: T of the sequence, whose padding is dropped. Default: all of `axis`, no padding.

    Returns:
      x with T entries along `axis`, in the order of the sequence. In or outside of jit.

    Raises:
      ValueError: `length` is not one that `shard_sequence` makes so many entries of; or as there.
    """
    axis = _check_axis(x, axis)
    length = x.shape[axis] if length is None else length
    order = shard_order(length, num_shards, layout).ravel()
    if order.size != x.shape[axis]:
        raise ValueError(
            f"length must be that of a sequence with {x.shape[axis]} entries in {num_shards} shards, got {length}"
        )
    places = np.empty(length, int)
    places[order[order >= 0]] = np.flatnonzero(order >= 0)
    return jnp.take(x, places, axis)


def _check_axis(x: Array | np.ndarray, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must index one of the {x.ndim} axes of x, got {axis}")
    return axis % x.ndim
