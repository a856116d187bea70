"""Host-side plans of packed sequences of varying length: which rank computes which new token."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from longctx.annotations import Integer
from longctx.parallel.layout import Layout, check_layout, layout_shards


@dataclasses.dataclass(frozen=True)
class VarseqPlan:
    """B packed sequences over N ranks. Rows of the arrays are ranks; -1 in indices and segments is padding.

    New tokens are numbered through all sequences, 0 to T - 1, and so are cached ones, 0 to P - 1. A rank's keys are its
    cached and new ones together, sorted by (segment, position), as attention prefers them.

    Attributes:
      q_indices: the new tokens that each rank computes, integers `[N, ceil(T / N)]`.
      q_positions, q_segment_ids: theirs, int32 of the same shape.
      kv_indices: the keys that each rank holds, new ones numbered after all P cached ones, integers
        `[N, max P_i + ceil(T / N)]`.
      kv_positions, kv_segment_ids: theirs, int32 of the same shape.
      scores: pairs (query, visible key) of each rank's queries, integers `[N]`.
      kv_tokens: keys that each rank holds, without padding, integers `[N]`.

    Source:
      Context parallelism paper, 3.5.1 and 3.5.2.

    Examples:
      >>> import numpy as np
      >>> from longctx.parallel import plan_varseq
      >>> plan = plan_varseq([5, 3], cached_lengths=None, num_shards=2)  # two sequences of 5 and 3 tokens
      >>> plan.q_indices.tolist()  # of 8 packed tokens, those of each rank
      [[0, 1, 4, 6], [2, 3, 5, 7]]
      >>> plan.q_segment_ids.tolist()
      [[0, 0, 0, 1], [0, 0, 1, 1]]
      >>> packed = np.arange(8) * 10.0  # anything with an entry for each new token
      >>> packed[plan.q_indices].tolist()  # [N, ceil(T / N)], to be sharded over the axis
      [[0.0, 10.0, 40.0, 60.0], [20.0, 30.0, 50.0, 70.0]]
    """

    # The new tokens that the rank computes, [N, ceil(T / N)].
    q_indices: np.ndarray
    q_positions: np.ndarray
    q_segment_ids: np.ndarray
    # The keys that it holds, new ones numbered after all P cached ones, [N, max P_i + ceil(T / N)].
    kv_indices: np.ndarray
    kv_positions: np.ndarray
    kv_segment_ids: np.ndarray
    # Pairs (query, visible key) of its queries, and keys that it holds without padding, [N].
    scores: np.ndarray
    kv_tokens: np.ndarray

    @property
    def message_tokens(self) -> int:
        """Keys in a message of ring pass-KV: `max_i P_i + ceil(T / N)`, the same for all ranks."""
        return self.kv_indices.shape[1]

    def flops(self, num_heads: int, head_size: int) -> np.ndarray:
        """FLOP of each rank's attention, `[N]`: two matrix products, 4 * N_heads * H for each score.

        Args:
          num_heads: query heads.
          head_size: H.
        """
        return 4 * num_heads * head_size * self.scores

    def report(self, num_heads: int, head_size: int) -> str:
        """A table of FLOP and keys of each rank, and how far the busiest rank is above the mean.

        Args:
          num_heads: query heads.
          head_size: H.
        """
        flops = self.flops(num_heads, head_size)
        lines = ["rank  new tokens  KV tokens       GFLOP"]
        for rank, (flop, kv) in enumerate(zip(flops, self.kv_tokens, strict=True)):
            lines.append(f"{rank:>4}  {np.sum(self.q_indices[rank] >= 0):>10,}  {kv:>9,}  {flop / 1e9:>10,.3f}")
        surplus = flops.max() / flops.mean() - 1 if flops.any() else 0.0
        lines.append(f"busiest rank {surplus:+.2%} above the mean; {self.message_tokens:,} KV tokens in a message")
        return "\n".join(lines)


def plan_varseq(
    new_lengths: Sequence[int] | np.ndarray,
    cached_lengths: Sequence[int] | np.ndarray | None,
    num_shards: Integer,
    layout: Layout = "zigzag",
    cached_ranks: np.ndarray | None = None,
) -> VarseqPlan:
    """Shard the new tokens of packed sequences over ranks, each sequence by the layout; cached tokens may lie anywhere.

    Args:
      new_lengths: T_b, new tokens of each sequence, at positions P_b to P_b + T_b - 1.
      cached_lengths: P_b, cached tokens of each, at positions 0 to P_b - 1. None: full prefill.
      num_shards: ranks N.
      layout: `"contiguous"`, `"zigzag"` or `"striped"`.
      cached_ranks: which rank holds each cached token, integers `[sum of P_b]`, sequence after sequence. Default: they
        are sharded by the same layout.

    Returns:
      A `VarseqPlan`. The chunks of a sequence differ by a token at most, ranks have `ceil(T / N)` new tokens at most,
      and with sequences of one size no rank always gets the heavier share.

    Raises:
      ValueError: an argument is wrong; the message names it.

    Source:
      Context parallelism paper, 3.5.1 (figures 1 and 2) and 3.5.2 (message size).

    Examples:
      >>> from longctx.parallel import plan_varseq
      >>> plan = plan_varseq([1000, 300, 20], cached_lengths=[0, 5000, 0], num_shards=4)
      >>> print(plan.report(num_heads=32, head_size=128))
      rank  new tokens  KV tokens       GFLOP
         0         330      1,580       8.378
         1         330      1,580       8.379
         2         330      1,580       8.380
         3         330      1,580       8.382
      busiest rank +0.02% above the mean; 1,580 KV tokens in a message
    """
    check_layout(num_shards, layout)
    new = _check_lengths("new_lengths", new_lengths)
    cached = np.zeros_like(new) if cached_lengths is None else _check_lengths("cached_lengths", cached_lengths)
    if new.shape != cached.shape:
        raise ValueError(f"cached_lengths must have one entry a sequence, {new.size}, got {cached.size}")
    num_new, num_cached = int(new.sum()), int(cached.sum())

    computed, scores = _assign_tokens(new, cached, num_shards, layout)
    if cached_ranks is None:
        held, _ = _assign_tokens(cached, np.zeros_like(cached), num_shards, layout)
    else:
        ranks = np.asarray(cached_ranks)
        if ranks.shape != (num_cached,) or not np.isin(ranks, np.arange(num_shards)).all():
            raise ValueError(f"cached_ranks must be {num_cached} ranks below {num_shards}, one a cached token")
        held = [np.flatnonzero(ranks == rank) for rank in range(num_shards)]

    segments = np.concatenate([np.repeat(np.arange(x.size), x) for x in (cached, new)])
    positions = np.concatenate([_positions_within(cached), _positions_within(new) + np.repeat(cached, new)])
    keys = [np.concatenate([old, num_cached + tokens]) for old, tokens in zip(held, computed, strict=True)]
    keys = [tokens[np.lexsort((positions[tokens], segments[tokens]))] for tokens in keys]
    share = -(-num_new // num_shards)
    kv_indices = _pad_rows(keys, max(map(len, held)) + share)
    q_indices = _pad_rows(computed, share)
    q_tokens = np.where(q_indices < 0, -1, q_indices + num_cached)
    return VarseqPlan(
        q_indices,
        *_look_up(q_tokens, positions, segments),
        kv_indices,
        *_look_up(kv_indices, positions, segments),
        scores,
        np.array([len(tokens) for tokens in keys]),
    )


def shard_tokens(
    new_lengths: Sequence[int] | np.ndarray,
    cached_lengths: Sequence[int] | np.ndarray,
    num_shards: Integer,
    layout: Layout = "zigzag",
) -> list[np.ndarray]:
    """The new tokens of each rank, ascending, as in `plan_varseq`. The work doesn't grow with cached tokens."""
    new, cached = _check_lengths("new_lengths", new_lengths), _check_lengths("cached_lengths", cached_lengths)
    return _assign_tokens(new, cached, num_shards, layout)[0]


def plan_decode(num_sequences: Integer, step: Integer, num_shards: Integer) -> np.ndarray:
    """The rank that computes and keeps the token that each sequence decodes in this step.

    Sequence b belongs to rank (b + step) mod N. So the rows of a step are sharded evenly, and over the steps so is the
    cache of every sequence; one rank per sequence would fill that rank first.

    Args:
      num_sequences: B, at least 0.
      step: number of the step, from 0.
      num_shards: ranks N.

    Returns:
      Sequences, integers `[N, ceil(B / N)]`, -1 in rows without one: the `q_segment_ids` of `ring_pass_q(...,
      decode=True)`.

    Raises:
      ValueError: one of them is no integer, or too small.

    Source:
      Context parallelism paper, 3.6.

    Examples:
      >>> from longctx.parallel import plan_decode
      >>> plan_decode(num_sequences=5, step=0, num_shards=4).tolist()
      [[0, 4], [1, -1], [2, -1], [3, -1]]
      >>> plan_decode(num_sequences=5, step=1, num_shards=4).tolist()  # one rank further
      [[3, -1], [0, 4], [1, -1], [2, -1]]
    """
    for name, value, least in (("num_sequences", num_sequences, 0), ("step", step, 0), ("num_shards", num_shards, 1)):
        if not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    ranks = (np.arange(num_sequences) + step) % num_shards
    return _pad_rows([np.flatnonzero(ranks == rank) for rank in range(num_shards)], -(-num_sequences // num_shards))


def _assign_tokens(
    new: np.ndarray, cached: np.ndarray, num_shards: Integer, layout: Layout
) -> tuple[list[np.ndarray], np.ndarray]:
    """Each rank's new tokens, ascending, and its scores.

    Long sequences come first. Shard i of the first one goes to rank i. Of every other sequence, the heaviest shard goes
    to the rank with the lightest load so far, by tokens (so that no rank gets two more than another), then by scores.
    Then the busiest and the idlest rank swap shards of one sequence as long as that helps.
    """
    shards = [layout_shards(int(length), num_shards, layout) for length in new]
    sizes = np.array([[len(x) for x in row] for row in shards]).reshape(-1, num_shards)
    weights = sizes * (cached[:, None] + 1) + np.array([[x.sum() for x in row] for row in shards]).reshape(sizes.shape)
    owners = np.tile(np.arange(num_shards), (len(new), 1))  # [B, N] which shard of a sequence each rank has

    tokens, scores = np.zeros(num_shards, int), np.zeros(num_shards, int)
    for b in np.argsort(-(new + cached), kind="stable"):
        if tokens.any():
            owners[b, np.lexsort((scores, tokens))] = np.lexsort((-weights[b], -sizes[b]))
        tokens += sizes[b, owners[b]]
        scores += weights[b, owners[b]]

    sizes, weights = (np.take_along_axis(x, owners, 1) for x in (sizes, weights))
    for _ in range(4 * num_shards):
        busy, idle = scores.argmax(), scores.argmin()
        moved = np.where(sizes[:, busy] == sizes[:, idle], weights[:, busy] - weights[:, idle], 0)
        b = np.argmin(np.abs(2 * moved - (scores[busy] - scores[idle]))) if moved.size else 0
        if not moved.size or not 0 < moved[b] < scores[busy] - scores[idle]:
            break
        for x in (owners, weights):
            x[b, [busy, idle]] = x[b, [idle, busy]]
        scores[[busy, idle]] += (-moved[b], moved[b])

    starts = np.cumsum(new) - new
    by_rank = [
        [start + row[shard] for start, row, shard in zip(starts, shards, of_rank, strict=True)] for of_rank in owners.T
    ]
    return [np.sort(np.concatenate([np.empty(0, int), *parts])) for parts in by_rank], scores


def _check_lengths(name: str, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    checked = np.asarray(lengths)
    if checked.ndim != 1 or not (checked.size == 0 or np.issubdtype(checked.dtype, np.integer)) or (checked < 0).any():
        raise ValueError(f"{name} must be non-negative integers, one a sequence, got {lengths!r}")
    return checked.astype(int)


def _positions_within(lengths: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... within each sequence."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _pad_rows(rows: list[np.ndarray], length: Integer) -> np.ndarray:
    """Stack rows, padded to a length with -1."""
    return np.stack([np.pad(row, (0, length - len(row)), constant_values=-1) for row in rows])


def _look_up(tokens: np.ndarray, positions: np.ndarray, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions (0 in padding) and segments (-1 in padding) of tokens."""
    return (
        np.where(tokens < 0, 0, np.append(positions, 0)[tokens]).astype(np.int32),
        np.where(tokens < 0, -1, np.append(segments, 0)[tokens]).astype(np.int32),
    )
