"""Which rank computes which token of a sequence: contiguous, zigzag or striped."""

import jax
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


def shard_length(length: int, num_shards: int) -> int:
    """Tokens of a shard, padding included: ceil(length / num_shards)."""
    return -(-length // num_shards)


def shard_sequence(
    x: Array | np.ndarray, num_shards: int, layout: str = "zigzag", axis: int = 1, pad_value: float = 0
) -> Array | np.ndarray:
    """Reorder a sequence so that its equal parts along `axis` are the shards of a layout.

    Args:
      x: any array with the sequence along `axis`, of any length T.
      num_shards: ranks N. Shards are equally long, ceil(T / N): what is missing is `pad_value`, at a shard's end.
      layout: `"contiguous"`, `"zigzag"` or `"striped"`.
      pad_value: of segment ids, take -1, so that nobody sees padding. `shard_positions` makes both.

    Returns:
      x with N * ceil(T / N) entries along `axis`; numpy for numpy, and under jit a gather.
    """
    index, xp = shard_indices(x, num_shards, layout, axis), (np if isinstance(x, np.ndarray) else jnp)
    taken = xp.take(x, np.maximum(index, 0), axis=axis)
    if (index >= 0).all():
        return taken
    is_token = (index >= 0).reshape([-1 if a == axis % x.ndim else 1 for a in range(x.ndim)])
    return xp.where(np.broadcast_to(is_token, taken.shape), taken, np.asarray(pad_value, x.dtype))
