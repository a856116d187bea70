"""The compiled step: one donated program over the mesh `(stage, context, tensor)`, with the sampling inside.

In tick t stage s computes the batch that began in tick t - s: each stage is told of its own, and the last one's samples
are drawn. All that the host tells are two int32 arrays whose sizes depend on the bucket alone. What is needed again
stays on the devices: the cache, the page tables (of which only new entries are sent), each slot's last token (so that
the host can plan the next step before it knows it), which tokens each slot has seen, and what goes to the next stage.

Source: Mnemosyne, sections 4.3 to 4.5 and 5 (page tables on the device, deltas); Medha, sections 3.5 and 4.4.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from longctx.kernels.attention.operands import match_varying
from longctx.models import Llama
from longctx.models.params import Params
from longctx.models.sharded_params import local_params, sharded_specs
from longctx.parallel.mesh import index_of, present, shard_map, size_of
from longctx.parallel.pipeline import enter_stage
from longctx.parallel.tensor import all_gather_vocabulary, argmax, embed_tokens, psum
from longctx.serving.runner.attention import attend_to_pages
from longctx.serving.runner.paged_cache import PagedCache
from longctx.serving.runner.sampler import IN_OUTPUT, Controls, Drawn, draw
from longctx.serving.runner.step_inputs import RowPlan, SamplePlan, Shape

# Over which the head is sharded, the slowest first.
VOCABULARY_AXES = ("tensor", "stage")


class DeviceState(NamedTuple):
    """What lives on the devices from step to step, and is donated to each. On each context rank, unless said."""

    cache: PagedCache  # of a stage's layers
    table: Array  # [stage * context, slots, entries] int32, pages of this rank
    numbers: Array | None  # alike: which page of its sequence each is; None on one rank: in order
    rows: Array | None  # [stage * context, rows, D], what each stage made of its batch; None with one stage
    last_token: Array  # [slots] int32, the same everywhere
    seen: Array  # [slots, vocab] uint8, the same everywhere


def state_specs(stages: int, ranks: int) -> DeviceState:
    """A PartitionSpec for each part of the state."""
    each, pages = P(("stage", "context")), P(("stage", "context"), None, "tensor")
    several_ranks, several_stages = (each if ranks > 1 else None), (each if stages > 1 else None)
    specs: Any = (PagedCache(pages, pages), each, several_ranks, several_stages, P(), P())  # type: ignore[arg-type]
    return DeviceState(*specs)


def sizes_of(mesh: Mesh) -> tuple[int, int, int]:
    return mesh.shape["stage"], mesh.shape["context"], mesh.shape["tensor"]


@functools.partial(jax.jit, static_argnums=(0, 1, 6, 7), donate_argnums=3)
def step(
    model: Llama,
    mesh: Mesh,
    params: Params,
    state: DeviceState,
    rows: Array,
    samples: Array,
    shape: Shape,
    sections: tuple[int, int],
) -> tuple[DeviceState, Drawn, Array]:
    """One tick.

    Args:
      rows: a `RowPlan` for each stage and rank, int32 `[stage, context, length]`.
      samples: a `SamplePlan`, int32 `[length]`.
      sections: where shared and own rows begin in `state.rows`, which holds each kind's largest bucket.

    Returns:
      (state; what was drawn, ranks one after another; hidden states `[stage * context, rows, D]` after the last norm,
      of which the last stage's mean something).
    """
    tick = functools.partial(_tick, model, mesh, shape, sections)
    specs = state_specs(*sizes_of(mesh)[:2])
    return shard_map(
        tick,
        mesh,
        in_specs=(sharded_specs(params, model.config, mesh), specs, P("stage", "context"), P()),
        out_specs=(specs, P(), P(("stage", "context"))),
    )(params, state, rows, samples)


def _tick(
    model: Llama,
    mesh: Mesh,
    shape: Shape,
    sections: tuple[int, int],
    params: Params,
    state: DeviceState,
    rows: Array,
    samples: Array,
) -> tuple[DeviceState, Drawn, Array]:
    plan = RowPlan.views(rows[0, 0], shape)
    table, numbers = _update_tables(state, plan)
    params = local_params(params)

    tokens = jnp.where(plan.tokens < 0, state.last_token[jnp.maximum(plan.slots, 0)], plan.tokens)
    x = embed_tokens(params["embed"], tokens)
    if state.rows is not None:
        x = enter_stage(_read_rows(state.rows[0], shape, sections), x)
    attend = attend_to_pages(plan, table, numbers, shape, model.config.num_heads // mesh.shape["tensor"], state.cache.k)
    x, cache = model.run_layers(params["layers"], x, plan.positions, attend, state.cache, lambda x: psum(x, "tensor"))
    kept = None if state.rows is None else _write_rows(state.rows, x, shape, sections)

    hidden = model.norm(params, x)
    drawn, last_token, seen = _sample(model, mesh, shape, params, state, hidden, SamplePlan.views(samples, shape))
    tables = table[None], None if numbers is None else numbers[None]
    return DeviceState(cache, *tables, kept, last_token, seen), drawn, hidden[None]


def _update_tables(state: DeviceState, plan: RowPlan) -> tuple[Array, Array | None]:
    def update(table: Array, values: Array) -> Array:
        # Where an index must not count it is out of range, beyond the end: negative ones would count from there.
        return table[0].at[_or_beyond(plan.table_slots, table[0]), plan.table_entries].set(values, mode="drop")

    numbers = None if state.numbers is None else update(state.numbers, plan.table_numbers)
    return update(state.table, plan.table_pages), numbers


def _read_rows(rows: Array, shape: Shape, sections: tuple[int, int]) -> Array:
    starts = zip((0, *sections), shape[:3], strict=True)
    return jnp.concatenate([rows[start : start + count] for start, count in starts])


def _write_rows(rows: Array, x: Array, shape: Shape, sections: tuple[int, int]) -> Array:
    at = 0
    for start, count in zip((0, *sections), shape[:3], strict=True):
        rows = rows.at[0, start : start + count].set(x[at : at + count])
        at += count
    return rows


def _sample(
    model: Llama, mesh: Mesh, shape: Shape, params: Params, state: DeviceState, hidden: Array, plan: SamplePlan
) -> tuple[Drawn, Array, Array]:
    """Each rank draws for its own rows, over the vocabulary's shards; then all know of all."""
    rank = index_of("context")
    mine = plan._replace(**{name: getattr(plan, name)[rank] for name in plan._fields[:-1]})
    rows = of_last_stage(hidden[mine.rows])
    logits = head_logits(model, mesh, params, rows)

    def plainly(_: None) -> Drawn:
        tokens = argmax(logits, *VOCABULARY_AXES)
        none = jnp.zeros((shape.samples, shape.num_top))
        return match_varying(Drawn(tokens, jnp.zeros(shape.samples), none.astype(jnp.int32), none))

    def fully(_: None) -> Drawn:
        whole = all_gather_vocabulary(logits, *VOCABULARY_AXES)[:, : model.config.vocab_size]
        seen = state.seen[jnp.maximum(mine.slots, 0)]
        return match_varying(draw(whole, seen, Controls.unpack(mine.controls), mine.positions, shape.num_top))

    drawn = lax.cond(plan.plain[0] > 0, plainly, fully, None)
    drawn = Drawn(*(all_gather(x, "context") for x in drawn))
    slots = plan.slots.reshape(-1)
    to = _or_beyond(slots, state.last_token)
    last_token = state.last_token.at[to].set(drawn.tokens, mode="drop")
    seen_before = state.seen[jnp.maximum(slots, 0), drawn.tokens]
    seen = state.seen.at[to, drawn.tokens].set(seen_before | IN_OUTPUT, mode="drop")
    return drawn, last_token, seen


def all_gather(x: Array, axis: str) -> Array:
    """What each device of an axis has, one after another, the same on all."""
    return lax.all_gather(x, axis, tiled=True, to="invarying") if present(axis) else x


def of_last_stage(x: Array) -> Array:
    """What the last stage has, for all of them."""
    is_last = index_of("stage") == size_of("stage") - 1
    return psum(jnp.where(is_last, x, jnp.zeros_like(x)), "stage")


def head_logits(model: Llama, mesh: Mesh, params: Params, rows: Array) -> Array:
    """This device's part of the logits; -inf for what fills up the vocabulary."""
    logits = model.logits(params, rows)
    parts = mesh.shape["tensor"] * mesh.shape["stage"]
    if logits.shape[1] * parts == model.config.vocab_size:
        return logits
    first = index_of(*VOCABULARY_AXES) * logits.shape[1]
    token = first + jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where((token < model.config.vocab_size)[None], logits, -jnp.inf)


def _or_beyond(slots: Array, x: Array) -> Array:
    return jnp.where(slots < 0, x.shape[0], slots)
