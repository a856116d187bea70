"""Pass-Q and all-gather for a step's sharded rows: all ranks get the new keys, and the cached ones by either."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from longctx.gpu_flags import reserved_multiprocessors
from longctx.kernels import attention, merge_state, paged_attention
from longctx.kernels.attention.kernel import Operands
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.operands import check_kernel
from longctx.kernels.barrier import hold
from longctx.kernels.merge import with_sinks
from longctx.kernels.paged_attention import PagedPlan
from longctx.kernels.partitioning import match_varying
from longctx.parallel.pass_q import pass_q_forward
from longctx.parallel.ring import ring_source
from longctx.serving.runner.cached_pages import CachedPages, first_new_positions
from longctx.serving.runner.paged_cache import LayerInputs, NewKeys, PagedCache, PageTables, RowMetadata, as_floats
from longctx.serving.runner.step_inputs import Shape

State = tuple[Array, Array]
"""A partial attention result, `(out, lse)`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatheredKeys:
    """Attention of sharded rows to their new keys, gathered from all ranks, and to the cached keys of all ranks.

    In pass-Q the queries go round, and attend to the pages of each rank; in all-gather those pages are gathered too.
    In pass-Q attention hides all of it. Each hop of the queries travels beside the attention of those before them, the
    new keys beside the attention of the last queries that arrive, and the states beside the attention to new keys,
    which are written after the pages have been read.

    Attributes:
      order: sorts the gathered keys by slot and position.
      queries, keys: this rank's rows, and the gathered keys in that order.
      hops: of pass-Q: the metadata and the plan of the queries that are here after each hop.
      own, cached: of all-gather: the pages that this rank sends, and labels of those of all ranks `[ranks, pages]`.
      num_rounds: of all-gather: how many rounds all ranks need; None: one.

    Source: context parallelism paper, 3.5.2 and 3.5.3, algorithms 3 and 4; Llama 3 training, 3.3.2.
    """

    same_in_all_layers = ("order", "keys", "cached", "num_rounds")

    order: Array
    queries: Tokens
    keys: Tokens
    hops: list[tuple[RowMetadata, PagedPlan]]
    own: CachedPages | None
    cached: CachedPages | None
    num_rounds: Array | None
    shape: Shape = dataclasses.field(metadata={"static": True})

    @classmethod
    def make(cls, inputs: LayerInputs) -> "GatheredKeys":
        rows, shape = inputs.rows, inputs.shape
        positions, slots, order = rows.sharded_positions, rows.sharded_slots, rows.sharded_order
        firsts = first_new_positions(inputs)
        own = cached = None
        hops = []
        if shape.exchange == "pass_q":
            reserved = 0 if shape.ranks == 1 else reserved_multiprocessors()
            for hop in range(shape.ranks):
                source = ring_source("context", hop)
                at, whose = (x.reshape(shape.ranks, -1)[source] for x in (positions, slots))
                metadata = inputs.metadata(firsts, at, whose)
                hops.append((metadata, inputs.plan(metadata, reserved_multiprocessors=reserved)))
        elif shape.message:
            own = CachedPages.of(inputs, firsts)
            cached = own.of_all_ranks()
        own_positions = rows.positions[: shape.sharded]
        return cls(
            order,
            Tokens(own_positions, rows.slots[: shape.sharded], inputs.first(own_positions)),
            Tokens(positions[order], slots[order]),
            hops,
            own,
            cached,
            rows.message_rounds[0] if shape.rounds > 1 else None,
            shape,
        )

    def __call__(
        self,
        cache: PagedCache,
        tables: PageTables,
        first_page: Array,
        q: Array,
        new: NewKeys,
        sinks: Array | None = None,
    ) -> tuple[Array, PagedCache]:
        """Write the new keys of all rows, and attend with the sharded ones.

        Args:
          first_page: of the layer.
          q: `[sharded, N, H]`.
          sinks: as for `attention`.

        Returns:
          (out `[sharded, N, H]`, the cache).
        """
        sharded, others = jnp.split(new.kv, [self.shape.sharded])
        of_pages: State | None = None
        if self.hops:
            of_pages, gathered = self._pass_q(cache, tables, first_page, q, sharded)
        else:
            gathered = lax.all_gather(sharded, "context", tiled=True)
        cache = new.write(cache, jnp.concatenate([gathered, others]), 0)
        kv = as_floats(gathered[self.order], q.dtype)
        state = attention(
            q,
            kv[:, 0],
            kv[:, 1],
            q_positions=self.queries.positions,
            kv_positions=self.keys.positions,
            q_segment_ids=self.queries.segments,
            kv_segment_ids=self.keys.segments,
            q_first=self.queries.first,
            out_dtype=jnp.float32,
        )
        if of_pages is not None:
            state = merge_state(*state, *of_pages)
        elif self.own is not None:
            state, cache = self._all_gather(cache, first_page, q, state)
        return with_sinks(state, sinks)[0].astype(q.dtype), cache

    def _pass_q(
        self, cache: PagedCache, tables: PageTables, first_page: Array, q: Array, kv: Array
    ) -> tuple[State, Array]:
        """The state of this rank's rows over all cached keys, and the new keys `kv` of all ranks."""

        def attend_to_local_pages(q: Array, hop: int) -> State:
            nonlocal kv
            is_last = hop == self.shape.ranks - 1
            if is_last:  # XLA sends one message at a time: this one, once no query is on its way any more
                kv, q = hold(kv, q)
                kv = lax.all_gather(kv, "context", tiled=True)
            metadata, plan = self.hops[hop]
            options: Any = metadata._asdict() | cache.scales | {"plan": plan, "out_dtype": jnp.float32}
            state = paged_attention(q[0], cache.k, cache.v, *tables, first_page=first_page, **options)
            if is_last:
                kv, state = hold(kv, state)
            return state[0][None], state[1][None]

        out, lse = pass_q_forward(q[None], lambda hop: hop, attend_to_local_pages, axis_name="context")
        return (out[0], lse[0]), kv

    def _all_gather(self, cache: PagedCache, first_page: Array, q: Array, state: State) -> tuple[State, PagedCache]:
        own, cached, message = self.own, self.cached, self.shape.message
        assert own is not None
        assert cached is not None
        kernel = check_kernel(q, True, None, None)
        own_rows, queries = jax.tree.map(lambda x: x[None], (q, self.queries))

        def attend_to_block(state: State, block: Any) -> tuple[State, None]:
            rows, labels = block
            kv = as_floats(rows, q.dtype)
            keys = jax.tree.map(lambda x: x[None], labels.tokens(self.shape.page_size))
            return kernel.forward(match_varying(Operands(own_rows, kv, kv, queries, keys)), state), None

        def attend_to_round(number: int | Array, carry: tuple[State, PagedCache]) -> tuple[State, PagedCache]:
            state, cache = carry
            block = own.round(number, message).key_values(cache, first_page, q.dtype)
            blocks = lax.all_gather(block, "context"), cached.round(number, message)
            # The loop carries the cache, and the barrier makes it do so, for the reason in `KeyRing`.
            return lax.optimization_barrier((lax.scan(attend_to_block, state, blocks)[0], cache))

        state = match_varying((state[0][None], state[1][None]), "context")
        state, cache = attend_to_round(0, (state, cache))
        if self.num_rounds is not None:
            state, cache = lax.fori_loop(1, self.num_rounds, attend_to_round, (state, cache))
        return (state[0][0], state[1][0]), cache
