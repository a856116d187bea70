"""Problems for exchanges, as data: one padded shape per number of ranks, for any layout, lengths and segments."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from longctx.parallel import layout_shards, plan_decode, plan_varseq

# Of each rank. 20 cached tokens for each of up to NEW / 4 new ones fit in, as do packed sequences.
NEW, KEYS, HEAD_SIZE = 16, 96, 8
KINDS = ("full", "prefix", "packed", "decode")
LAYOUTS = ("contiguous", "zigzag", "striped")


def alibi(head: jax.Array, q_position: jax.Array, kv_position: jax.Array) -> jax.Array:
    """Bias that tells up to 24 heads apart."""
    return -(0.5 ** (jnp.arange(1.0, 25.0) / 3)[head]) * jnp.abs(q_position - kv_position)


class Tokens(NamedTuple):
    """The tokens of all ranks, concatenated: int32 `[ranks * NEW]` and `[ranks * KEYS]`, padded with segment -1."""

    q_positions: np.ndarray
    kv_positions: np.ndarray
    q_segment_ids: np.ndarray
    kv_segment_ids: np.ndarray
    q_first: np.ndarray | None = None
    q_last: np.ndarray | None = None

    def __repr__(self) -> str:
        return f"Tokens of segments {np.unique(self.q_segment_ids)} among {np.unique(self.kv_segment_ids)}"


@st.composite
def limits(draw: st.DrawFn, tokens: Tokens) -> Tokens:
    """Limits of what each query sees: a window and what is ahead of it by row, chunks, or any, also of nothing."""
    positions, rng = tokens.q_positions, np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = rng.integers(0, 40, (2, len(positions)))
    chunks = positions // 16 * 16
    first, last = {
        "rows": (positions - sizes[0], positions + sizes[1]),
        "chunks": (chunks, chunks + 15),
        "any": (rng.integers(-5, 60, len(positions)), rng.integers(-5, 60, len(positions))),
    }[draw(st.sampled_from(["rows", "chunks", "any"]))]
    return tokens._replace(q_first=first.astype(np.int32), q_last=last.astype(np.int32))


@st.composite
def tokens(draw: st.DrawFn, ranks: int, kinds: tuple[str, ...] = KINDS, layouts: tuple[str, ...] = LAYOUTS) -> Tokens:
    kind, layout = draw(st.sampled_from(kinds)), draw(st.sampled_from(layouts))
    capacity = ranks * NEW
    if kind == "decode":
        return _decode(draw, ranks, layout)
    if kind == "full":
        new, cached = [draw(st.integers(1, capacity))], [0]
    elif kind == "prefix":
        new = [draw(st.integers(1, capacity // 4))]
        cached = [new[0] * draw(st.integers(0, 20))]
    else:
        new = draw(st.lists(st.integers(0, capacity // 5), min_size=2, max_size=5))
        cached = draw(st.lists(st.integers(0, 12 * ranks), min_size=len(new), max_size=len(new)))
        new[0] += 1
    # Any placement of the cache will do, so also one that no layout would make.
    places = st.just(None) if draw(st.booleans()) else st.just(np.arange(sum(cached)) // 7 % ranks)
    plan = plan_varseq(new, cached, ranks, layout, draw(places))
    return Tokens(
        _fill(plan.q_positions, NEW, 0),
        _fill(plan.kv_positions, KEYS, 0),
        _fill(plan.q_segment_ids, NEW, -1),
        _fill(plan.kv_segment_ids, KEYS, -1),
    )


def _decode(draw: st.DrawFn, ranks: int, layout: str) -> Tokens:
    """Sequences of P_b prefilled tokens, sharded by the layout, and `step` decoded ones, round robin over ranks."""
    batch, step = draw(st.integers(1, 2 * ranks + 1)), draw(st.integers(0, 5))
    prefilled = draw(st.lists(st.integers(0, 25), min_size=batch, max_size=batch))
    rows = plan_decode(batch, step, ranks)
    lengths = np.array([*prefilled, 0]) + step
    keys: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for b, length in enumerate(prefilled):
        for rank, shard in enumerate(layout_shards(length, ranks, layout)):
            keys[rank] += [(b, int(position)) for position in shard]
        for t in range(step + 1):
            keys[np.flatnonzero((plan_decode(batch, t, ranks) == b).any(1))[0]].append((b, length + t))
    sorted_keys = [np.array(sorted(k), int).reshape(-1, 2) for k in keys]
    return Tokens(
        _fill(np.where(rows < 0, 0, lengths[rows]), NEW, 0),
        _fill([k[:, 1] for k in sorted_keys], KEYS, 0),
        _fill(rows, NEW, -1),
        _fill([k[:, 0] for k in sorted_keys], KEYS, -1),
    )


def _fill(rows: np.ndarray | list[np.ndarray], length: int, value: int) -> np.ndarray:
    filled = [np.pad(row, (0, length - len(row)), constant_values=value) for row in rows]
    return np.concatenate(filled).astype(np.int32)
