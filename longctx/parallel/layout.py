"""Which rank computes which token of a sequence: contiguous, zigzag or striped."""

from typing import Literal, get_args

import numpy as np

from longctx.annotations import Integer

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


def layout_shards(length: Integer, num_shards: Integer, layout: Layout) -> list[np.ndarray]:
    """The tokens of each shard, ascending. Shards differ by one token at most, and the longer ones come first.

    * `contiguous`: each shard has one run of tokens. In a causal sequence the last shard has most keys to attend to.
    * `zigzag`: of 2 * num_shards chunks, shard i has chunks i and 2 * num_shards - 1 - i.
    * `striped`: shard i has tokens i, i + num_shards, ...

    Args:
      length: tokens T of the sequence.
      num_shards: ranks N.
      layout: `"contiguous"`, `"zigzag"` or `"striped"`.

    Returns:
      Of each shard its tokens, integers `[T / N]`, or one more.

    Raises:
      ValueError: there is no such layout, or a number is negative, 0 shards, or no integer.

    Source:
      Zigzag: context parallelism paper, 3.5.1. Striped: Striped Attention (Brandon et al. 2023).

    Examples:
      >>> from longctx.parallel import layout_shards
      >>> for layout in ("contiguous", "zigzag", "striped"):
      ...     print(layout, [shard.tolist() for shard in layout_shards(8, 2, layout)])
      contiguous [[0, 1, 2, 3], [4, 5, 6, 7]]
      zigzag [[0, 1, 6, 7], [2, 3, 4, 5]]
      striped [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    check_layout(num_shards, layout)
    _check_length(length)
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


def check_layout(num_shards: Integer, layout: Layout) -> None:
    """Raise ValueError for an unknown layout or a wrong number of shards."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if not isinstance(num_shards, (int, np.integer)) or num_shards < 1:
        raise ValueError(f"num_shards must be a positive integer, got {num_shards!r}")


def _check_length(length: Integer) -> None:
    if not isinstance(length, (int, np.integer)) or length < 0:
        raise ValueError(f"length must be a non-negative integer, got {length!r}")


def shard_order(length: Integer, num_shards: Integer, layout: Layout) -> np.ndarray:
    """`layout_shards` as one array `[num_shards, ceil(length / num_shards)]`, padded with -1."""
    shards = layout_shards(length, num_shards, layout)
    order = np.full((num_shards, -(-length // num_shards)), -1)
    for row, tokens in zip(order, shards, strict=True):
        row[: len(tokens)] = tokens
    return order


def layout_hops(
    length: Integer,
    num_shards: Integer,
    layout: Layout = "zigzag",
    *,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
) -> tuple[int, ...]:
    """Return the hops of a ring after which some rank holds keys that one of its queries sees.

    After h hops rank r holds the keys of rank r - h. With a window few hops are left: `ring_pass_kv(..., hops=...)`
    sends no others.

    Args:
      length: tokens T of a sequence whose queries and keys are sharded by the layout, at positions 0 to T - 1.
      num_shards, layout: as for `layout_shards`.
      causal, window: as for `longctx.kernels.attention`.

    Returns:
      Hops, ascending, of which the first is 0: the rank's own keys.

    Raises:
      ValueError: as for `layout_shards`, or the window is wrong.

    Examples:
      >>> from longctx.parallel import layout_hops
      >>> layout_hops(64, 8, "contiguous", window=(8, 0))  # of 8 tokens a rank: its own and those of the rank before
      (0, 1)
      >>> layout_hops(64, 8, "zigzag", window=(4, 0))  # a rank has two chunks, and its neighbours those before them
      (0, 1, 7)
    """
    # The scheduler and the cost model import this module without JAX.
    from longctx.kernels.attention.operands import check_window

    before, after = check_window(window)
    _check_length(length)
    check_layout(num_shards, layout)
    most = max(length - 1, 0)
    before, after = (most if side is None else min(side, most) for side in (before, 0 if causal else after))
    if layout == "striped":  # a key `distance` before its query came by as many hops, modulo the ranks
        return tuple(sorted({distance % num_shards for distance in range(-after, before + 1)[:num_shards]}))
    shards = layout_shards(length, num_shards, layout)
    runs = [
        (rank, run[0], run[-1])
        for rank, shard in enumerate(shards)
        for run in np.split(shard, np.flatnonzero(np.diff(shard) > 1) + 1)
        if run.size
    ]
    rank, first, last = np.array(runs or [(0, 0, 0)]).T
    seen = (first[None] <= last[:, None] + after) & (last[None] >= first[:, None] - before)
    return tuple(np.unique((rank[:, None] - rank[None])[seen] % num_shards).tolist())


def shard_positions(length: Integer, num_shards: Integer, layout: Layout = "zigzag") -> tuple[np.ndarray, np.ndarray]:
    """Positions and segments of one sequence in the order of `shard_sequence`.

    Args:
      length: tokens T of the sequence.
      num_shards: ranks N.
      layout: `"contiguous"`, `"zigzag"` or `"striped"`.

    Returns:
      (positions, segment_ids), both int32 `[N * ceil(T / N)]`. Positions are 0 to T - 1, all of segment 0. Padding has
      position 0 and segment -1.

    Raises:
      ValueError: as for `layout_shards`.

    Examples:
      >>> from longctx.parallel import shard_positions
      >>> positions, segment_ids = shard_positions(6, num_shards=4, layout="striped")  # 2 tokens a rank
      >>> positions.reshape(4, 2).tolist()
      [[0, 4], [1, 5], [2, 0], [3, 0]]
      >>> segment_ids.reshape(4, 2).tolist()  # ranks 2 and 3 have a token of padding
      [[0, 0], [0, 0], [0, -1], [0, -1]]
    """
    order = shard_order(length, num_shards, layout).ravel()
    return np.maximum(order, 0).astype(np.int32), np.where(order < 0, -1, 0).astype(np.int32)
