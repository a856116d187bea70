"""The cached pages of sharded sequences, which a rank sends to others."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Int

from longctx.kernels.attention.mask import Tokens
from longctx.kernels.bits import from_bits
from longctx.serving.runner.paged_cache import LayerInputs, PagedCache


def first_new_positions(inputs: LayerInputs) -> Int[Array, "slots"]:
    """The position of each slot's first new sharded token; what is before it, is cached. 0 where there is none."""
    big = jnp.iinfo(jnp.int32).max
    slots, positions = inputs.rows.sharded_slots, inputs.rows.sharded_positions
    firsts = jnp.full_like(positions, big, shape=inputs.tables.table.shape[0])
    firsts = firsts.at[jnp.maximum(slots, 0)].min(jnp.where(slots >= 0, positions, big))
    return jnp.where(firsts == big, 0, firsts)


class CachedPages(NamedTuple):
    """A rank's pages with cached keys of the sharded sequences, one sequence after the other, then padding.

    A round sends `Shape.message` of them. The four numbers of a page, 16 bytes, say what all of its keys are.

    Attributes:
      pages: `[*, pages]` int32, of this rank's pool.
      slots: `[*, pages]` int32, whose they are; -1 is padding.
      first: `[*, pages]` int32, the position of their first key.
      num_cached: `[*, pages]` int32, how many of their keys are cached; the others come first in the next page.
    """

    pages: Int[Array, "*rounds pages"]
    slots: Int[Array, "*rounds pages"]
    first: Int[Array, "*rounds pages"]
    num_cached: Int[Array, "*rounds pages"]

    @classmethod
    def of(cls, inputs: LayerInputs, firsts: Int[Array, "slots"]) -> "CachedPages":
        """List this rank's, `[rounds * message]`; `firsts` as `first_new_positions` makes them."""
        shape, tables = inputs.shape, inputs.tables
        asking, page_index = inputs.rows.message_slots, tables.numbered
        # Entries with cached keys come first in a slot's row of the table, so a count identifies them.
        cached = page_index[jnp.maximum(asking, 0)] * shape.page_size < firsts[jnp.maximum(asking, 0)][:, None]
        ends = jnp.cumsum(jnp.where(asking >= 0, jnp.sum(cached, 1), 0), dtype=jnp.int32)
        number = jnp.arange(shape.message * shape.rounds, dtype=jnp.int32)
        of = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
        of = jnp.minimum(of, asking.shape[0] - 1)
        entry = number - jnp.where(of > 0, ends[of - 1], 0)
        slots = jnp.where(number < ends[-1], asking[of], -1)
        at = jnp.maximum(slots, 0), jnp.where(slots >= 0, entry, 0)
        first = page_index[at] * shape.page_size
        count = jnp.where(slots >= 0, jnp.clip(firsts[at[0]] - first, 0, shape.page_size), 0)
        return cls(jnp.where(slots >= 0, tables.table[at], 0), slots, jnp.where(slots >= 0, first, 0), count)

    def of_all_ranks(self) -> "CachedPages":
        """`[ranks, pages]`, in one message."""
        return CachedPages(*jnp.moveaxis(lax.all_gather(jnp.stack(self), "context"), 1, 0))

    def round(self, number: int | Array, message: int) -> "CachedPages":
        """Those that a round sends."""
        return CachedPages(*(lax.dynamic_slice_in_dim(x, number * message, message, -1) for x in self))

    def tokens(self, page_size: int) -> Tokens:
        """Their keys, `[*, pages * page_size]`."""
        at = lax.broadcasted_iota(jnp.int32, (*self.num_cached.shape, page_size), self.num_cached.ndim)
        is_cached = at < self.num_cached[..., None]
        positions = jnp.where(is_cached, self.first[..., None] + at, 0)
        segments = jnp.where(is_cached, self.slots[..., None], -1)
        return Tokens(*(x.reshape(*x.shape[:-2], -1) for x in (positions, segments)))

    def key_values(self, cache: PagedCache, first_page: Array, dtype: DTypeLike) -> Array:
        """Their keys and values in one array `[2, 1, pages * page_size, K, width]`, 0 where nothing is cached.

        They are floats of `dtype`, or packed rows of FP8 pages: `as_floats` makes floats of either.
        """
        is_cached = jnp.arange(cache.k.shape[1], dtype=jnp.int32)[None] < self.num_cached[:, None]
        # Unwritten tokens of a page may hold NaN, and an attention weight of 0 times NaN is NaN.
        block = from_bits(cache.read_pages(first_page + self.pages), dtype)
        block = jnp.where(is_cached[..., None, None], block, jnp.zeros_like(block))
        return block.reshape(2, 1, -1, *block.shape[3:])
