"""Which rank computes which token of a sequence: contiguous, zigzag or striped."""

import numpy as np

LAYOUTS = ("contiguous", "zigzag", "striped")


def layout_shards(length: int, num_shards: int, layout: str) -> list[np.ndarray]:
    """The tokens of each shard, ascending. Shards differ by one token at most, and the longer ones come first.

    * `contiguous`: each shard has one run of tokens. In a causal sequence the last shard has most keys to attend to.
    * `zigzag`: of 2 * num_shards chunks, shard i has chunks i and 2 * num_shards - 1 - i.
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
    """Raise ValueError for an unknown layout or a wrong number of shards."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if not isinstance(num_shards, (int, np.integer)) or num_shards < 1:
        raise ValueError(f"num_shards must be a positive integer, got {num_shards!r}")


def shard_order(length: int, num_shards: int, layout: str) -> np.ndarray:
    """`layout_shards` as one array `[num_shards, ceil(length / num_shards)]`, padded with -1."""
    shards = layout_shards(length, num_shards, layout)
    order = np.full((num_shards, -(-length // num_shards)), -1)
    for row, tokens in zip(order, shards, strict=True):
        row[: len(tokens)] = tokens
    return order


def shard_positions(length: int, num_shards: int, layout: str = "zigzag") -> tuple[np.ndarray, np.ndarray]:
    """(positions, segment_ids) of one sequence in the order of `shard_sequence`: int32 `[N * ceil(length / N)]`.

    Positions are 0 to length - 1, all of segment 0. Padding has position 0 and segment -1.
    """
    order = shard_order(length, num_shards, layout).ravel()
    return np.maximum(order, 0).astype(np.int32), np.where(order < 0, -1, 0).astype(np.int32)
