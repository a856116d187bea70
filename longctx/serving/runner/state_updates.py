"""Small compiled programs for rare updates and reads of the device state. Each call reaches all stages at once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, UInt32

from longctx.models import Llama
from longctx.models.params import Params
from longctx.models.sharded_params import sharded_specs
from longctx.parallel.mesh import shard_map
from longctx.parallel.tensor import all_gather_vocabulary, psum
from longctx.serving.runner.sample_step import VOCABULARY_AXES, all_gather, from_last_stage, local_logits
from longctx.serving.runner.sampler import LogitBias, token_logprobs
from longctx.serving.runner.step import DeviceState, state_shardings

_BLOCK = 64  # rows whose logits are computed at a time


def unused_page_index(page_size: int) -> int:
    """The page index of unused page table entries, which is beyond any length."""
    return np.iinfo(np.int32).max // page_size


@functools.cache
def update_program(
    update: Callable[..., DeviceState], mesh: Mesh, is_fp8: bool, has_window: bool, *static_argnames: str
) -> Any:
    """One of the functions below, jitted for a mesh, for FP8 pages or others, with window pages or without."""
    shardings = state_shardings(mesh, is_fp8, has_window)
    return jax.jit(update, donate_argnums=0, static_argnames=static_argnames, out_shardings=shardings)


def clear_slot(state: DeviceState, slot: Int[Array, ""], page_size: int) -> DeviceState:
    """Mark all page table entries of a slot as unused; only several ranks need that, as they have a page index."""
    assert state.page_index is not None
    return state._replace(page_index=state.page_index.at[:, slot].set(unused_page_index(page_size)))


def set_entries(
    state: DeviceState,
    slot: Int[Array, ""],
    first: Int[Array, "ranks"],
    pages: Int[Array, "ranks P"],
    page_index: Int[Array, "ranks P"],
    window_pages: Int[Array, "ranks P"] | None = None,
) -> DeviceState:
    """Set P entries of a slot's page tables on each rank, from entry `first[rank]` on.

    Negative pages leave an entry as it is. A long cached prefix adds more entries at once than a step has room for.

    Args:
      pages: pages of each rank.
      page_index: which page of the sequence each is; ignored on one rank.
      window_pages: window pages of each rank, any where none is read; None: of a model without sliding layers.
    """
    stages = state.table.shape[0] // pages.shape[0]  # all of them have the same tables
    pages, page_index, first, window_pages = jax.tree.map(
        lambda x: jnp.tile(x, (stages,) + (1,) * (x.ndim - 1)), (pages, page_index, first, window_pages)
    )
    at = first[:, None] + jnp.arange(pages.shape[1], dtype=jnp.int32)[None]
    at = jnp.where(pages < 0, state.table.shape[2], at)
    rank = jnp.arange(pages.shape[0], dtype=jnp.int32)[:, None]
    state = state._replace(table=state.table.at[rank, slot, at].set(pages, mode="drop"))
    if state.page_index is not None:
        state = state._replace(page_index=state.page_index.at[rank, slot, at].set(page_index, mode="drop"))
    if state.window_table is not None:
        window_pages = jnp.maximum(window_pages, 0)  # an entry that is never read has a valid page
        state = state._replace(window_table=state.window_table.at[rank, slot, at].set(window_pages, mode="drop"))
    return state


def set_seen(state: DeviceState, slot: Int[Array, ""], seen: UInt32[Array, "vocab"]) -> DeviceState:
    """Set how often a slot has seen each token, when a request with penalties is admitted."""
    return state._replace(seen=state.seen.at[slot].set(seen))


def set_bias(state: DeviceState, slot: Int[Array, ""], bias: LogitBias) -> DeviceState:
    """Set the biases of a slot, arrays `[M]`, when a request that has some, or that comes after one, is admitted."""
    return state._replace(bias=jax.tree.map(lambda x, row: x.at[slot].set(row), state.bias, bias))


@functools.partial(jax.jit, static_argnums=(0, 1, 5))
def prompt_logprobs(
    model: Llama,
    mesh: Mesh,
    params: Params,
    hidden: Float[Array, "stages_ranks rows D"],
    targets: Int[Array, "ranks rows"],
    num_top: int,
) -> tuple[Float[Array, "R"], Int[Array, "R L"], Float[Array, "R L"]]:
    """Log probabilities of the token that follows each row of the last stage, and the most probable tokens.

    Logits are computed in blocks of rows: those of all rows would take more memory than the rest of a step.

    Args:
      hidden: `[stage * context, rows, D]`, as `step` returns it.
      targets: `[context, rows]`, the token that follows each row.
      num_top: L, how many of the most probable tokens to return.

    Returns:
      What `token_logprobs` returns, for R = context * rows, ranks one after another.
    """

    def logprobs_of_rank(params: Params, hidden: Array, targets: Array) -> Any:
        rows, targets = from_last_stage(hidden[0]), targets[0]
        count = -(-rows.shape[0] // _BLOCK)
        padding = count * _BLOCK - rows.shape[0]
        rows = jnp.pad(rows, ((0, padding), (0, 0))).reshape(count, _BLOCK, -1)
        targets = jnp.pad(targets, (0, padding)).reshape(count, _BLOCK)

        def block(x: tuple[Array, Array]) -> Any:
            logits = all_gather_vocabulary(local_logits(model, mesh, params, x[0]), *VOCABULARY_AXES)
            return token_logprobs(logits[:, : model.config.vocab_size], x[1], num_top)

        results = lax.map(block, (rows, targets))
        unpadded = (x.reshape(count * _BLOCK, *x.shape[2:])[: hidden.shape[1]] for x in results)
        return tuple(all_gather(x, "context") for x in unpadded)  # so that every process has a copy to read

    head = {"lm_head": params["lm_head"]}
    specs = {"lm_head": sharded_specs(params, model.config, mesh)["lm_head"]}
    return shard_map(
        logprobs_of_rank,
        mesh,
        in_specs=(specs, P(("stage", "context")), P("context")),
        out_specs=P(),
    )(head, hidden, targets)


@functools.partial(jax.jit, static_argnums=(0, 3))
def pool_rows(
    mesh: Mesh, hidden: Float[Array, "stages_ranks rows D"], slots: Int[Array, "ranks rows"], num_slots: int
) -> Float[Array, "slots D"]:
    """Sum the rows of the last stage by slot, in float32.

    Args:
      hidden: `[stage * context, rows, D]`, as `step` returns it.
      slots: `[context, rows]`, the slot of each row that counts; -1: it does not.
      num_slots: of the result.
    """

    def sum_of_rank(hidden: Array, slots: Array) -> Array:
        rows = from_last_stage(hidden[0].astype(jnp.float32))
        at = jnp.where(slots[0] < 0, num_slots, slots[0])
        sums = jnp.zeros((num_slots, rows.shape[1]), jnp.float32).at[at].add(rows, mode="drop")
        return psum(sums, "context")

    return shard_map(sum_of_rank, mesh, in_specs=(P(("stage", "context")), P("context")), out_specs=P())(hidden, slots)
