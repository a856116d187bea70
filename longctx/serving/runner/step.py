"""The compiled step: one donated program over the mesh `(stage, context, tensor)`, with the sampling inside.

In step t, stage s computes the batch that began in step t - s, and tokens are sampled for the batch in the last stage.
The host sends two int32 arrays, whose sizes depend on the bucket only. `DeviceState` stays on the devices. Of the page
tables the host sends only new entries, and it can plan the next step before it knows the last sampled tokens, as the
devices keep these.

Source: Mnemosyne, sections 4.3 to 4.5 and 5 (page tables on the device, deltas); Medha, sections 3.5 and 4.4.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Shaped, UInt8

from longctx.kernels.attention.operands import match_varying
from longctx.models import Llama
from longctx.models.params import Params
from longctx.models.sharded_params import local_params, sharded_specs
from longctx.parallel.mesh import index_of, present, shard_map, size_of
from longctx.parallel.pipeline import enter_stage
from longctx.parallel.tensor import all_gather_vocabulary, argmax, embed_tokens, psum
from longctx.serving.runner.attention import make_paged_attend
from longctx.serving.runner.paged_cache import PagedCache
from longctx.serving.runner.sampler import IN_OUTPUT, Controls, SampledTokens, sample_tokens
from longctx.serving.runner.step_inputs import RowInputs, SampleInputs, Shape

VOCABULARY_AXES = ("tensor", "stage")
"""Mesh axes that the head's vocabulary is sharded over, the slowest first."""


class DeviceState(NamedTuple):
    """The arrays that stay on the devices from step to step; every step donates and returns them."""

    cache: PagedCache  # of a stage's layers and a rank's pages
    table: Int[Array, "stages_ranks slots entries"]  # page table; pages of the rank
    page_index: (
        Int[Array, "stages_ranks slots entries"] | None
    )  # which page of its sequence; None on one rank: in order
    rows: Float[Array, "stages_ranks rows D"] | None  # output of each stage for its batch; None with one stage
    last_token: Int[Array, "slots"]  # last sampled token; the same on all devices
    seen: UInt8[Array, "slots vocab"]  # bits of `sampler`; the same on all devices


def state_specs(stages: int, ranks: int) -> DeviceState:
    """A PartitionSpec for each array of the state, on a mesh of so many stages and context ranks."""
    each, pages = P(("stage", "context")), P(("stage", "context"), None, "tensor")
    several_ranks, several_stages = (each if ranks > 1 else None), (each if stages > 1 else None)
    specs: Any = (PagedCache(pages, pages), each, several_ranks, several_stages, P(), P())  # type: ignore[arg-type]
    return DeviceState(*specs)


@functools.partial(jax.jit, static_argnums=(0, 1, 6, 7), donate_argnums=3)
def step(
    model: Llama,
    mesh: Mesh,
    params: Params,
    state: DeviceState,
    rows: Int[Array, "stages ranks length"],
    samples: Int[Array, "length"],
    shape: Shape,
    sections: tuple[int, int],
) -> tuple[DeviceState, SampledTokens, Float[Array, "stages_ranks rows D"]]:
    """Run one step of all stages.

    Args:
      rows: a packed `RowInputs` for each stage and rank, int32 `[stage, context, length]`.
      samples: a packed `SampleInputs`, int32 `[length]`.
      shape: static sizes of the step.
      sections: where replicated and local rows begin in `state.rows`, which has room for each kind's largest bucket.

    Returns:
      (state; sampled tokens, ranks one after another; hidden states `[stage * context, rows, D]` after the last norm,
      valid in the last stage only).
    """
    specs = state_specs(mesh.shape["stage"], mesh.shape["context"])
    return shard_map(
        functools.partial(_step_on_device, model, mesh, shape, sections),
        mesh,
        in_specs=(sharded_specs(params, model.config, mesh), specs, P("stage", "context"), P()),
        out_specs=(specs, P(), P(("stage", "context"))),
    )(params, state, rows, samples)


def _step_on_device(
    model: Llama,
    mesh: Mesh,
    shape: Shape,
    sections: tuple[int, int],
    params: Params,
    state: DeviceState,
    rows: Array,
    samples: Array,
) -> tuple[DeviceState, SampledTokens, Array]:
    inputs = RowInputs.views(rows[0, 0], shape)
    table, page_index = _update_tables(state, inputs)
    params = local_params(params)

    tokens = jnp.where(inputs.tokens < 0, state.last_token[jnp.maximum(inputs.slots, 0)], inputs.tokens)
    x = embed_tokens(params["embed"], tokens)
    if state.rows is not None:
        x = enter_stage(_read_rows(state.rows[0], shape, sections), x)
    local_heads = model.config.num_heads // mesh.shape["tensor"]
    attend = make_paged_attend(inputs, table, page_index, shape, local_heads, state.cache.k)
    x, cache = model.run_layers(params["layers"], x, inputs.positions, attend, state.cache, lambda x: psum(x, "tensor"))
    stage_output = None if state.rows is None else _write_rows(state.rows, x, shape, sections)

    hidden = model.norm(params, x)
    sampled, last_token, seen = _sample(model, mesh, shape, params, state, hidden, SampleInputs.views(samples, shape))
    tables = table[None], None if page_index is None else page_index[None]
    return DeviceState(cache, *tables, stage_output, last_token, seen), sampled, hidden[None]


def _update_tables(state: DeviceState, inputs: RowInputs) -> tuple[Array, Array | None]:
    def update(table: Array, values: Array) -> Array:
        at = _padding_out_of_bounds(inputs.table_slots, table[0])
        return table[0].at[at, inputs.table_entries].set(values, mode="drop")

    page_index = None if state.page_index is None else update(state.page_index, inputs.table_page_index)
    return update(state.table, inputs.table_pages), page_index


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
    model: Llama, mesh: Mesh, shape: Shape, params: Params, state: DeviceState, hidden: Array, inputs: SampleInputs
) -> tuple[SampledTokens, Array, Array]:
    """Sample on each rank for its own rows, over the vocabulary's shards; then gather the tokens of all ranks."""
    rank = index_of("context")
    local = inputs._replace(**{name: getattr(inputs, name)[rank] for name in inputs._fields[:-1]})
    rows = from_last_stage(hidden[local.rows])
    logits = local_logits(model, mesh, params, rows)

    def sample_plain(_: None) -> SampledTokens:
        tokens = argmax(logits, *VOCABULARY_AXES)
        none = jnp.zeros((shape.samples, shape.num_top))
        return match_varying(SampledTokens(tokens, jnp.zeros(shape.samples), none.astype(jnp.int32), none))

    def sample_full(_: None) -> SampledTokens:
        whole = all_gather_vocabulary(logits, *VOCABULARY_AXES)[:, : model.config.vocab_size]
        seen = state.seen[jnp.maximum(local.slots, 0)]
        controls = Controls.unpack(local.controls)
        return match_varying(sample_tokens(whole, seen, controls, local.positions, shape.num_top))

    sampled = lax.cond(inputs.plain[0] > 0, sample_plain, sample_full, None)
    sampled = SampledTokens(*(all_gather(x, "context") for x in sampled))
    slots = inputs.slots.reshape(-1)
    at = _padding_out_of_bounds(slots, state.last_token)
    last_token = state.last_token.at[at].set(sampled.tokens, mode="drop")
    seen_before = state.seen[jnp.maximum(slots, 0), sampled.tokens]
    seen = state.seen.at[at, sampled.tokens].set(seen_before | IN_OUTPUT, mode="drop")
    return sampled, last_token, seen


def all_gather(x: Shaped[Array, "n *rest"], axis: str) -> Shaped[Array, "m *rest"]:
    """Concatenate the arrays of a mesh axis's devices; the result is the same on all of them."""
    return lax.all_gather(x, axis, tiled=True, to="invarying") if present(axis) else x


def from_last_stage(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Broadcast the last stage's array to all stages."""
    is_last = index_of("stage") == size_of("stage") - 1
    return psum(jnp.where(is_last, x, jnp.zeros_like(x)), "stage")


def local_logits(model: Llama, mesh: Mesh, params: Params, rows: Float[Array, "R D"]) -> Float[Array, "R shard"]:
    """Logits of this device's shard of the vocabulary; those of padding are -inf."""
    logits = model.logits(params, rows)
    parts = mesh.shape["tensor"] * mesh.shape["stage"]
    if logits.shape[1] * parts == model.config.vocab_size:
        return logits
    first = index_of(*VOCABULARY_AXES) * logits.shape[1]
    token = first + jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where((token < model.config.vocab_size)[None], logits, -jnp.inf)


def _padding_out_of_bounds(slots: Array, x: Array) -> Array:
    """Indices along the first axis of x, with padding beyond its end: `mode="drop"` would wrap negative ones round."""
    return jnp.where(slots < 0, x.shape[0], slots)
