"""Masks `[T, S]` as positions and segment ids, where they are such."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class MaskTokens(NamedTuple):
    """A mask as int32 positions and segment ids of queries `[Bm, T]` and keys `[Bm, S]`, and whether that is all of it.

    `is_exact` is bool `[]`, a NumPy value where the mask is one.
    """

    q_positions: Any
    kv_positions: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    is_exact: Any


def tokens_of_mask(mask: Any) -> MaskTokens:
    """Positions and segments that give a mask: a query sees the keys of its segment up to its position.

    So are masks that are causal, that hide padding, that keep packed sequences apart, and all masks of one query. A
    query's segment is the first key that it sees, its position the last one.

    Args:
      mask: bool `[Bm, Hm, T, S]`, of NumPy or JAX; `is_exact` is False if its heads differ.
    """
    numpy: Any = jnp if isinstance(mask, jax.Array) else np
    one = mask[:, 0]
    batch, _, keys = one.shape
    index = numpy.arange(keys, dtype=numpy.int32)
    # The initial values are those of no keys, and of no queries.
    first = numpy.min(numpy.where(one, index[None, None, :], keys), 2, initial=keys)
    first = numpy.where(first < keys, first, -1)
    last = numpy.max(numpy.where(one, index[None, None, :], -1), 2, initial=-1)
    kv_segments = numpy.max(numpy.where(one, first[:, :, None], -1), 1, initial=-1)
    visible = (first[:, :, None] == kv_segments[:, None, :]) & (first[:, :, None] >= 0)
    visible &= index[None, None, :] <= last[:, :, None]
    is_exact = (visible[:, None] == mask).all()
    return MaskTokens(last, numpy.broadcast_to(index[None, :], (batch, keys)), first, kv_segments, is_exact)
