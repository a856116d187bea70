"""The compiled step: one donated program for a ragged batch of prompt chunks and decodes, with the sampling inside.

All that the host tells it is one int32 array whose size depends on the bucket alone. What is needed again stays on the
device: the cache, the page tables (of which only new entries are sent), each slot's last token (so that the host can
plan the next step before it knows it), and which tokens each slot has seen.

Source: Mnemosyne, section 5 (page tables on the device, deltas); Medha, section 4.4.
"""

import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from longctx.models import Llama
from longctx.models.params import Params
from longctx.serving.cache import PagedCache, Rows, attend_to_pages
from longctx.serving.sampling import IN_OUTPUT, Controls, Drawn, draw, token_logprobs


class DeviceState(NamedTuple):
    """What lives on the device from step to step, and is donated to each."""

    cache: PagedCache
    table: Array  # [slots, entries] int32
    last_token: Array  # [slots] int32
    seen: Array  # [slots, vocab] uint8


class Shape(NamedTuple):
    """The static sizes of a step: rows, samples and new entries of page tables."""

    rows: int
    samples: int
    entries: int
    page_size: int
    num_pages: int
    num_top: int

    @classmethod
    def of(cls, rows: int, max_running: int, page_size: int, num_pages: int, num_top: int) -> Self:
        # A chunk of c tokens begins at most c / page_size + 1 pages, and there is a chunk for a sequence at most.
        samples = min(rows, max_running)
        return cls(rows, samples, rows // page_size + samples, page_size, num_pages, num_top)


class Plan(NamedTuple):
    """What the host tells a step, int32. A slot or page of -1: nothing. A token of -1: the slot's last one."""

    tokens: Any  # [rows]
    positions: Any  # [rows]
    slots: Any  # [rows]
    sample_rows: Any  # [samples]
    sample_slots: Any  # [samples]
    controls: Any  # [samples, fields]
    table_slots: Any  # [entries]
    table_entries: Any  # [entries]
    table_pages: Any  # [entries]
    plain: Any  # [1], whether all samples are the likeliest tokens

    @staticmethod
    def sizes(shape: Shape) -> tuple[tuple[int, ...], ...]:
        rows, samples, entries = (shape.rows,), (shape.samples,), (shape.entries,)
        return (rows,) * 3 + (samples,) * 2 + ((shape.samples, len(Controls._fields)),) + (entries,) * 3 + ((1,),)

    @classmethod
    def views(cls, packed: Any, shape: Shape) -> Self:
        """The parts of one packed array, which may be on the host (views of it) or traced."""
        parts, start = [], 0
        for size in cls.sizes(shape):
            stop = start + int(np.prod(size))
            parts.append(packed[start:stop].reshape(size))
            start = stop
        return cls(*parts)

    @classmethod
    def empty(cls, shape: Shape) -> tuple[np.ndarray, Self]:
        """A packed array that does nothing, and its parts to be filled in."""
        packed = np.full(sum(int(np.prod(size)) for size in cls.sizes(shape)), -1, np.int32)
        plan = cls.views(packed, shape)
        plan.positions.fill(0)
        plan.tokens.fill(0)
        plan.controls.fill(0)
        plan.plain.fill(1)
        return packed, plan


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def step(
    model: Llama, params: Params, state: DeviceState, packed: Array, shape: Shape
) -> tuple[DeviceState, Drawn, Array]:
    """Compute the rows, draw the samples; also returns the hidden states `[rows, D]` after the last norm."""
    plan = Plan.views(packed, shape)
    # Where an index must not count it is out of range, beyond the end: negative ones would count from there.
    table = state.table.at[_or_beyond(plan.table_slots, state.table), plan.table_entries].set(
        plan.table_pages, mode="drop"
    )
    tokens = jnp.where(plan.tokens < 0, state.last_token[jnp.maximum(plan.slots, 0)], plan.tokens)
    rows = Rows(tokens, plan.positions, plan.slots)
    attend = attend_to_pages(rows, table, shape.num_pages, model.config.num_heads, state.cache.k)
    hidden, cache = model.forward(params, tokens, plan.positions, attend, state.cache)

    sample_rows, slots = jnp.maximum(plan.sample_rows, 0), jnp.maximum(plan.sample_slots, 0)
    logits = model.logits(params, hidden[sample_rows])
    controls, positions = Controls.unpack(plan.controls), plan.positions[sample_rows] + 1
    drawn = draw(logits, state.seen[slots], controls, positions, shape.num_top, plan.plain[0] > 0)
    to = _or_beyond(plan.sample_slots, state.last_token)
    last_token = state.last_token.at[to].set(drawn.tokens, mode="drop")
    seen = state.seen.at[to, drawn.tokens].set(state.seen[slots, drawn.tokens] | IN_OUTPUT, mode="drop")
    return DeviceState(cache, table, last_token, seen), drawn, hidden


def _or_beyond(slots: Array, x: Array) -> Array:
    return jnp.where(slots < 0, x.shape[0], slots)


@functools.partial(jax.jit, donate_argnums=0)
def set_entries(state: DeviceState, slot: Array, first: Array, pages: Array) -> DeviceState:
    """Entries of a slot's page table from `first` on become `pages` `[P]`; negative ones leave what is there.

    For what comes at once: a prefix that was found, whose length a step's plan has no room for.
    """
    entries = jnp.where(pages < 0, state.table.shape[1], first + jnp.arange(len(pages), dtype=jnp.int32))
    return state._replace(table=state.table.at[slot, entries].set(pages, mode="drop"))


@functools.partial(jax.jit, donate_argnums=0)
def set_seen(state: DeviceState, slot: Array, seen: Array) -> DeviceState:
    """Which tokens a slot has seen, uint8 `[vocab]`: for requests with penalties, when they are admitted."""
    return state._replace(seen=state.seen.at[slot].set(seen))


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def copy_page(state: DeviceState, source: Array, target: Array, num_pages: int) -> DeviceState:
    """Copy one page of every layer."""

    def copy_layer(layer: Array, cache: PagedCache) -> PagedCache:
        first = layer * num_pages
        return PagedCache(
            *(
                lax.dynamic_update_index_in_dim(x, lax.dynamic_index_in_dim(x, first + source), first + target, 0)
                for x in cache
            )
        )

    return state._replace(cache=lax.fori_loop(0, state.cache.k.shape[0] // num_pages, copy_layer, state.cache))


@functools.partial(jax.jit, static_argnums=(0, 4))
def prompt_logprobs(
    model: Llama, params: Params, hidden: Array, targets: Array, num_top: int
) -> tuple[Array, Array, Array]:
    """What `token_logprobs` says of the token that follows each row: hidden `[T, D]`, targets `[T]`.

    In blocks of rows: logits of all would take more memory than all else in a step.
    """
    block = 64
    count = -(-hidden.shape[0] // block)
    padding = count * block - hidden.shape[0]
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(count, block, -1)
    targets = jnp.pad(targets, (0, padding)).reshape(count, block)
    results = lax.map(lambda x: token_logprobs(model.logits(params, x[0]), x[1], num_top), (hidden, targets))
    return tuple(x.reshape(count * block, *x.shape[2:])[: count * block - padding] for x in results)
