"""Ring pass-KV for a step's sharded rows: cached and new keys travel together, and are written as they pass."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from longctx.kernels.attention.kernel import Kernel, Operands
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.operands import check_kernel
from longctx.kernels.bits import from_bits
from longctx.kernels.merge import with_sinks
from longctx.kernels.partitioning import match_varying
from longctx.parallel.mesh import index_of
from longctx.parallel.ring import fold_ring, ring_source
from longctx.serving.runner.cached_pages import CachedPages, first_new_positions
from longctx.serving.runner.paged_cache import LayerInputs, NewKeys, PagedCache, PageTables, as_floats
from longctx.serving.runner.step_inputs import Shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyRing:
    """Attention of sharded rows to the keys of all ranks, which come round in blocks.

    A rank's block has its new keys and those of its cached pages. Every rank attends to a block while the next one
    travels, and takes its new keys from it. After the last hop it writes those whose pages it has, in one write: with
    one in every hop, XLA would count the cache several times, and so have no memory left to hide hops. No key is
    gathered, and where nothing is cached no page is sent. What one block has no room for goes in further rounds.

    Attributes:
      queries: `[1, rows]`.
      keys: `[ranks, 1, length]`, of each rank's first block, sorted by slot and position.
      source: `[length]`, which of this rank's cached and new keys each key of its first block is; beyond: padding.
      places: `[ranks, rows]`, where in its first block each rank has its new keys.
      own, cached: pages that this rank sends, and labels of those of all ranks `[ranks, pages]`; None: nothing.
      num_rounds: how many rounds all ranks need; None: one.
      plans: of the attention to the first block that is here after each hop, as `Kernel.plan` makes it.

    Source: context parallelism paper, 3.5.2 and algorithm 2.
    """

    same_in_all_layers = ("keys", "source", "places", "cached", "num_rounds")

    queries: Tokens
    keys: Tokens
    source: Array
    places: Array
    own: CachedPages | None
    cached: CachedPages | None
    num_rounds: Array | None
    plans: list[Any]
    shape: Shape = dataclasses.field(metadata={"static": True})

    @classmethod
    def make(cls, inputs: LayerInputs) -> "KeyRing":
        own_rows, shape = inputs.rows, inputs.shape
        ranks, rows, message = shape.ranks, shape.sharded, shape.message
        new = Tokens(*(x.reshape(ranks, rows) for x in (own_rows.sharded_positions, own_rows.sharded_slots)))
        own = cached = None
        keys, places = new, jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (ranks, rows))
        source = places[0]
        if message:
            firsts = first_new_positions(inputs)
            own = CachedPages.of(inputs, firsts)
            cached = own.of_all_ranks()
            first = cached.round(0, message).tokens(shape.page_size)
            sources, places = jax.vmap(lambda old, new: _sort_block(old, new, firsts.size))(
                first.segments, new.segments
            )
            source = sources[index_of("context")]
            padding = Tokens(*(jnp.full((ranks, 1), x, jnp.int32) for x in (0, -1)))
            every = jax.tree.map(lambda *x: jnp.concatenate(x, 1), first, new, padding)
            keys = jax.tree.map(lambda x: jnp.take_along_axis(x, sources, 1), every)
        positions = own_rows.positions[None, :rows]
        queries = Tokens(positions, own_rows.slots[None, :rows], inputs.first(positions))
        keys = jax.tree.map(lambda x: x[:, None], keys)
        kv_heads, head_size = inputs.pool.shape[2:]
        q, k = (
            jax.ShapeDtypeStruct((1, length, heads, head_size), inputs.dtype)
            for length, heads in ((rows, inputs.num_heads), (keys.positions.shape[-1], kv_heads))
        )
        kernel = check_kernel(q, True, None, None).beside_hops(ranks)
        plans = [kernel.plan(q, k, queries, _keys_after(hop, keys)) for hop in range(ranks)]
        num_rounds = own_rows.message_rounds[0] if shape.rounds > 1 else None
        return cls(queries, keys, source, places, own, cached, num_rounds, plans, shape)

    def __call__(
        self,
        cache: PagedCache,
        tables: PageTables,
        first_page: Array,
        q: Array,
        new: NewKeys,
        sinks: Array | None = None,
    ) -> tuple[Array, PagedCache]:
        """As `GatheredKeys`."""
        sharded, others = jnp.split(new.kv, [self.shape.sharded])
        q, sharded = match_varying((q[None], sharded), "context")
        kernel = check_kernel(q, True, None, None).beside_hops(self.shape.ranks)
        block = self._first_block(cache, first_page, jnp.moveaxis(sharded, 1, 0))

        def step(state: Any, block: tuple[Array, ...], keys: tuple[Tokens, Any], source: Array) -> Any:
            (kv,), (attended, *passed) = block, state
            return self._attend(kernel, q, kv, *keys, attended), *passed, kv[:, 0, self.places[source]]

        def keys_of(hop: int) -> tuple[Tokens, Any]:
            return _keys_after(hop, self.keys), self.plans[hop]

        state, *passed = fold_ring((block,), keys_of, step, "context", (None,))
        if self.num_rounds is not None:
            further = self._round(kernel, q, first_page)
            state, cache = lax.fori_loop(1, self.num_rounds, further, (match_varying(state, "context"), cache))
        # The keys of rank i were here after (rank - i) % n hops.
        ranks = self.shape.ranks
        hops = (index_of("context") - jnp.arange(ranks, dtype=jnp.int32)) % ranks
        gathered = jnp.moveaxis(jnp.stack(passed)[hops], 1, 2).reshape(-1, *new.kv.shape[1:])
        out, _ = with_sinks(state, sinks)
        return out[0].astype(q.dtype), new.write(cache, jnp.concatenate([gathered, others]), 0)

    def _attend(self, kernel: Kernel, q: Array, kv: Array, keys: Tokens, plan: Any, state: Any) -> tuple[Array, Array]:
        kv = as_floats(kv, q.dtype)
        return kernel.forward(match_varying(Operands(q, kv, kv, self.queries, keys)), state, plan)

    def _first_block(self, cache: PagedCache, first_page: Array, new: Array) -> Array:
        """`[2, 1, length, K, width]`, from the new keys and values `[2, rows, K, width]`."""
        if self.own is None:
            return new[:, None]
        size, num_cached = self.shape.page_size, self.shape.message * self.shape.page_size
        page, offset = jnp.divmod(jnp.minimum(self.source, num_cached - 1), size)
        page = first_page + self.own.pages[page]
        cached = from_bits(cache.read_rows(page, offset), new.dtype)
        fresh = new[:, jnp.clip(self.source - num_cached, 0, new.shape[1] - 1)]
        is_cached, is_padding = (self.source < num_cached), (self.source == self.source.size)
        block = jnp.where(is_cached[:, None, None], cached, fresh)
        return jnp.where(is_padding[:, None, None], jnp.zeros_like(block), block)[:, None]

    def _round(self, kernel: Kernel, q: Array, first_page: Array) -> Callable[[Array, Any], Any]:
        """A further round, of cached pages only: from its number and (state, cache) to these."""
        own, cached, message = self.own, self.cached, self.shape.message
        assert own is not None
        assert cached is not None

        def step(state: Any, block: tuple[Array, ...], keys: Tokens, source: Array) -> Any:
            return self._attend(kernel, q, block[0], keys, None, state)

        def further(number: Array, carry: Any) -> Any:
            (state, cache), labels = carry, cached.round(number, message)

            def keys_of(hop: int) -> Tokens:
                source = ring_source("context", hop)
                keys = CachedPages(*(x[source] for x in labels)).tokens(self.shape.page_size)
                return jax.tree.map(lambda x: x[None], keys)

            block = own.round(number, message).key_values(cache, first_page, q.dtype)
            # If the loop did not carry the cache, XLA would copy it, as it is written afterwards. Without the barrier
            # JAX would find that the loop does not change it.
            return lax.optimization_barrier((fold_ring((block,), keys_of, step, "context", state), cache))

        return further


def _keys_after(hop: int, keys: Tokens) -> Tokens:
    """Those of the block that is here after a hop, of all ranks' `[ranks, 1, length]`."""
    source = ring_source("context", hop)
    return jax.tree.map(lambda x: x[source], keys)


def _sort_block(cached: Array, new: Array, num_slots: int) -> tuple[Array, Array]:
    """Sort a block's keys by slot and position, by counting: those of a slot are in order, cached before new ones.

    Args:
      cached, new: slots of the keys `[C]` and `[T]`, ascending, but for padding; in `new` it comes last.

    Returns:
      (which of the C + T keys each key of the block is, `[C + T]`, C + T in padding; where its new keys are, `[T]`).
    """

    def count(slots: Array) -> Array:
        """Keys of each slot and of those before it, 0 before all of them."""
        each = jnp.zeros(num_slots, jnp.int32).at[jnp.where(slots < 0, num_slots, slots)].add(1, mode="drop")
        return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(each, dtype=jnp.int32)])

    length, is_cached, old, fresh = cached.size + new.size, cached >= 0, count(cached), count(new)
    place_cached = jnp.cumsum(is_cached, dtype=jnp.int32) - 1 + fresh[jnp.maximum(cached, 0)]
    place_new = jnp.arange(new.size, dtype=jnp.int32) + jnp.where(new < 0, old[-1], old[jnp.maximum(new, 0) + 1])
    source = jnp.full(length, length, jnp.int32)
    source = source.at[jnp.where(is_cached, place_cached, length)].set(
        jnp.arange(cached.size, dtype=jnp.int32), mode="drop"
    )
    return source.at[place_new].set(cached.size + jnp.arange(new.size, dtype=jnp.int32)), place_new
