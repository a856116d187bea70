"""Small programs beside the step, for what comes now and then. They reach all stages at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from longctx.models import Llama
from longctx.models.params import Params
from longctx.models.sharded_params import sharded_specs
from longctx.parallel.mesh import shard_map
from longctx.parallel.tensor import all_gather_vocabulary
from longctx.serving.runner.sampler import token_logprobs
from longctx.serving.runner.step import (
    VOCABULARY_AXES,
    DeviceState,
    all_gather,
    head_logits,
    of_last_stage,
)

_BLOCK = 64  # rows of which logits are computed at a time


def no_number(page_size: int) -> int:
    """The number of a page that is none: beyond any length."""
    return np.iinfo(np.int32).max // page_size


@functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
def clear_slot(state: DeviceState, slot: Array, page_size: int) -> DeviceState:
    """Forget a slot's pages, on several ranks: entries that are not in use must be known as such."""
    assert state.numbers is not None
    return state._replace(numbers=state.numbers.at[:, slot].set(no_number(page_size)))


@functools.partial(jax.jit, donate_argnums=0)
def set_entries(state: DeviceState, slot: Array, first: Array, pages: Array, numbers: Array) -> DeviceState:
    """Entries of a slot's page tables from `first` `[ranks]` on become `pages` `[ranks, P]`, and `numbers` alike;
    negative pages leave what is there.

    For what comes at once: a prefix that was found, whose length a step's plan has no room for.
    """
    parts = state.table.shape[0] // pages.shape[0]  # stages, which have the same tables
    pages, numbers, first = (jnp.tile(x, (parts,) + (1,) * (x.ndim - 1)) for x in (pages, numbers, first))
    at = first[:, None] + jnp.arange(pages.shape[1], dtype=jnp.int32)[None]
    at = jnp.where(pages < 0, state.table.shape[2], at)
    rank = jnp.arange(pages.shape[0], dtype=jnp.int32)[:, None]
    state = state._replace(table=state.table.at[rank, slot, at].set(pages, mode="drop"))
    if state.numbers is not None:
        state = state._replace(numbers=state.numbers.at[rank, slot, at].set(numbers, mode="drop"))
    return state


@functools.partial(jax.jit, donate_argnums=0)
def set_seen(state: DeviceState, slot: Array, seen: Array) -> DeviceState:
    """Which tokens a slot has seen, uint8 `[vocab]`: for requests with penalties, when they are admitted."""
    return state._replace(seen=state.seen.at[slot].set(seen))


@functools.partial(jax.jit, static_argnums=(0, 1, 5))
def prompt_logprobs(
    model: Llama, mesh: Mesh, params: Params, hidden: Array, targets: Array, num_top: int
) -> tuple[Array, Array, Array]:
    """What `token_logprobs` says of the token that follows each row of the last stage, ranks one after another.

    In blocks of rows: logits of all would take more memory than all else in a step.

    Args:
      hidden: `[stage * context, rows, D]`, as `step` returns it.
      targets: `[context, rows]`.
    """

    def tell(params: Params, hidden: Array, targets: Array) -> Any:
        rows, targets = of_last_stage(hidden[0]), targets[0]
        count = -(-rows.shape[0] // _BLOCK)
        padding = count * _BLOCK - rows.shape[0]
        rows = jnp.pad(rows, ((0, padding), (0, 0))).reshape(count, _BLOCK, -1)
        targets = jnp.pad(targets, (0, padding)).reshape(count, _BLOCK)

        def block(x: tuple[Array, Array]) -> Any:
            logits = all_gather_vocabulary(head_logits(model, mesh, params, x[0]), *VOCABULARY_AXES)
            return token_logprobs(logits[:, : model.config.vocab_size], x[1], num_top)

        results = lax.map(block, (rows, targets))
        told = (x.reshape(count * _BLOCK, *x.shape[2:])[: hidden.shape[1]] for x in results)
        return tuple(all_gather(x, "context") for x in told)  # every process reads its own copy

    head = {"lm_head": params["lm_head"]}
    specs = {"lm_head": sharded_specs(params, model.config, mesh)["lm_head"]}
    return shard_map(
        tell,
        mesh,
        in_specs=(specs, P(("stage", "context")), P("context")),
        out_specs=P(),
    )(head, hidden, targets)
