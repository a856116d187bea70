"""The compiled step: one donated program over the mesh `(stage, context, tensor)`, up to the rows that are sampled.

In step t, stage s computes the batch that began in step t - s, and tokens are sampled for the batch in the last stage,
by a program of their own (`sample_step.py`).
The host sends two int32 arrays, whose sizes depend on the bucket only. `DeviceState` stays on the devices. Of the page
tables the host sends only new entries, and it can plan the next step before it knows the last sampled tokens, as the
devices keep these.

Source: Mnemosyne, sections 4.3 to 4.5 and 5 (page tables on the device, deltas); Medha, sections 3.5 and 4.4.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int, UInt32

from longctx.models import Llama
from longctx.models.layer_runs import sliding_places
from longctx.models.layer_stacks import of_one_stage
from longctx.models.params import Params
from longctx.models.rope import Rope
from longctx.models.sharded_params import sharded_specs
from longctx.parallel.mesh import index_of, named_sharding, shard_map
from longctx.parallel.pipeline import enter_stage
from longctx.parallel.tensor import embed_tokens
from longctx.serving.runner.attention import PagedAttend, WindowLayers
from longctx.serving.runner.ffn_rows import collectives_of
from longctx.serving.runner.layer_pages import LayerPages
from longctx.serving.runner.paged_cache import LayerInputs, PagedCache, PageTables
from longctx.serving.runner.sample_step import from_last_stage, padding_out_of_bounds
from longctx.serving.runner.sampler import LogitBias
from longctx.serving.runner.step_inputs import RowInputs, SampleInputs, Shape

# XLA would join products of the same rows, and copy their weights side by side for that in every step. To save memory
# it would compute parts of a step twice, as it counts the pages once for each layer that writes them; `PageFit` leaves
# room for what a step takes.
_ON_GPUS: Any = {"xla_gpu_dot_merger_threshold_mb": 0, "xla_disable_hlo_passes": "rematerialization"}
# Products are cuBLASLt's then, not of kernels that XLA writes (docs/fp8.md).
_CUBLASLT: Any = {"xla_gpu_enable_triton_gemm": False}


class DeviceState(NamedTuple):
    """The arrays that stay on the devices from step to step; every step donates and returns them."""

    cache: PagedCache  # of a stage's layers and a rank's pages
    table: Int[Array, "stages_ranks slots entries"]  # page table; pages of the rank
    page_index: (
        Int[Array, "stages_ranks slots entries"] | None
    )  # which page of its sequence; None on one rank: in order
    rows: Float[Array, "stages_ranks rows D"] | None  # output of each stage for its batch; None with one stage
    last_token: Int[Array, "slots"]  # last sampled token; the same on all devices
    seen: UInt32[Array, "slots vocab"]  # see `sampler.count_tokens`; the same on all devices
    bias: LogitBias  # of each slot; the same on all devices
    # As `table`, window pages of the rank for the same pages of sequences; None: no layer has a sliding window
    window_table: Int[Array, "stages_ranks slots entries"] | None = None


def state_specs(stages: int, ranks: int, is_fp8: bool = False, has_window: bool = False) -> DeviceState:
    """Return a PartitionSpec for each array of the state, on a mesh of `stages` stages and `ranks` context ranks."""
    each, pages = P(("stage", "context")), P(("stage", "context"), None, "tensor")
    several_ranks, several_stages = (each if ranks > 1 else None), (each if stages > 1 else None)
    scales = (P(("stage", "context"), "tensor"),) * 2 if is_fp8 else ()
    cache, bias = PagedCache(pages, pages, *scales), LogitBias(P(), P())  # type: ignore[arg-type]
    specs: Any = (cache, each, several_ranks, several_stages, P(), P(), bias, each if has_window else None)
    return DeviceState(*specs)


@functools.cache
def state_shardings(mesh: Mesh, is_fp8: bool, has_window: bool = False) -> DeviceState:
    """The sharding of each array of the state.

    Every program returns exactly these: left to itself, JAX returns equivalent ones, for which it compiles again.
    """
    specs = state_specs(mesh.shape["stage"], mesh.shape["context"], is_fp8, has_window)
    return jax.tree.map(functools.partial(named_sharding, mesh), specs, is_leaf=lambda leaf: isinstance(leaf, P))


@functools.cache
def step_program(mesh: Mesh, is_quantized: bool = False, is_fp8: bool = False, has_window: bool = False) -> Any:
    """`step`, jitted for a mesh.

    Args:
      is_quantized: for a model with FP8 weights.
      is_fp8: for FP8 pages.
      has_window: for a model with sliding layers.
    """
    outputs = named_sharding(mesh, P(("stage", "context"))), named_sharding(mesh, P("context"))
    shardings = (state_shardings(mesh, is_fp8, has_window), *outputs)
    on_gpu = mesh.devices.flat[0].platform != "cpu"
    return jax.jit(
        step,
        static_argnums=(0, 1, 6, 7),
        donate_argnums=3,
        out_shardings=shardings,
        compiler_options=_ON_GPUS | (_CUBLASLT if is_quantized else {}) if on_gpu else None,
    )


def step(
    model: Llama,
    mesh: Mesh,
    params: Params,
    state: DeviceState,
    rows: Int[Array, "stages ranks length"],
    samples: Int[Array, "length"],
    shape: Shape,
    sections: tuple[int, int],
) -> tuple[DeviceState, Float[Array, "stages_ranks rows D"], Float[Array, "R D"]]:
    """Run one step of all stages, up to the rows that tokens are sampled for.

    Args:
      rows: a packed `RowInputs` for each stage and rank, int32 `[stage, context, length]`.
      samples: a packed `SampleInputs`, int32 `[length]`.
      shape: static sizes of the step.
      sections: where replicated and local rows begin in `state.rows`, which has room for each kind's largest bucket.

    Returns:
      (state; hidden states `[stage * context, rows, D]` after the last norm, valid in the last stage only; of these
      the rows to sample from, ranks one after another).
    """
    has_window = state.window_table is not None
    specs = state_specs(mesh.shape["stage"], mesh.shape["context"], state.cache.is_fp8, has_window)
    return shard_map(
        functools.partial(_step_on_device, model, mesh, shape, sections),
        mesh,
        in_specs=(sharded_specs(params, model.config, mesh, shape.ffn), specs, P("stage", "context"), P()),
        out_specs=(specs, P(("stage", "context")), P("context")),
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
) -> tuple[DeviceState, Array, Array]:
    x, rope, attend = begin_step(model, mesh, shape, sections, params["embed"], state, rows)
    layers = of_one_stage(params["layers"])
    sliding = sliding_of_stage(model, mesh)
    x, cache = model.run_layers(layers, x, rope, attend, state.cache, *collectives_of(shape), sliding=sliding)
    stage_rows, hidden = end_layers(model, shape, sections, params, state.rows, x)
    last_rows = rows_to_sample(SampleInputs.views(samples, shape), hidden)
    state = state._replace(cache=cache, rows=stage_rows, **jax.tree.map(lambda x: x[None], attend.tables_of_state))
    return state, hidden[None], last_rows


def begin_step(
    model: Llama, mesh: Mesh, shape: Shape, sections: tuple[int, int], embed: Array, state: Any, rows: Array
) -> tuple[Float[Array, "rows D"], Rope, PagedAttend]:
    """On a device: what the layers of a step start from, and what they share."""
    inputs = RowInputs.views(rows[0, 0], shape)
    tables, window_table = _update_tables(state, inputs)
    tokens = jnp.where(inputs.tokens < 0, state.last_token[jnp.maximum(inputs.slots, 0)], inputs.tokens)
    x = model.scale_embeddings(embed_tokens(embed, tokens))
    if state.rows is not None:
        x = enter_stage(_read_rows(state.rows[0], shape, sections), x)
    local_heads = model.config.num_heads // mesh.shape["tensor"]
    window, size = None, model.config.sliding_window
    if window_table is not None and size is not None:
        pages = LayerPages.of(model.config, mesh.shape["stage"], shape.num_pages, shape.num_window_pages)
        first_pages = jnp.asarray(pages.first)[index_of("stage")]
        window = WindowLayers(size, window_table, first_pages)
    layers = LayerInputs(inputs, tables, shape, local_heads, state.cache.k, x.dtype)
    return x, model.rope(inputs.positions), PagedAttend.make(layers, window)


def end_layers(
    model: Llama, shape: Shape, sections: tuple[int, int], params: Params, stage_rows: Array | None, x: Array
) -> tuple[Array | None, Float[Array, "rows D"]]:
    """On a device: the stage's output for the next stage, and hidden states after the last norm."""
    return None if stage_rows is None else _write_rows(stage_rows, x, shape, sections), model.norm(params, x)


def rows_to_sample(inputs: SampleInputs, hidden: Float[Array, "rows D"]) -> Float[Array, "samples D"]:
    """On a device: the rank's rows that a token is sampled for, of the last stage."""
    return from_last_stage(hidden[inputs.rows[index_of("context")]])


def sliding_of_stage(model: Llama, mesh: Mesh) -> Bool[Array, "places"] | None:
    """On a device: which layers of its stage are sliding; None in a model without."""
    if model.config.sliding_window is None:
        return None
    return jnp.asarray(sliding_places(model.config, mesh.shape["stage"]))[index_of("stage")]


def _update_tables(state: DeviceState, inputs: RowInputs) -> tuple[PageTables, Array | None]:
    """The page tables with new entries, and that of window pages; an entry whose page is never read has a valid one."""

    def update(table: Array, values: Array) -> Array:
        at = padding_out_of_bounds(inputs.table_slots, table[0])
        return table[0].at[at, inputs.table_entries].set(values, mode="drop")

    page_index = None if state.page_index is None else update(state.page_index, inputs.table_page_index)
    tables = PageTables(update(state.table, inputs.table_pages), page_index)
    if state.window_table is None:
        return tables, None
    return tables, update(state.window_table, jnp.maximum(inputs.table_window_pages, 0))


def _read_rows(rows: Array, shape: Shape, sections: tuple[int, int]) -> Array:
    starts = zip((0, *sections), shape[:3], strict=True)
    return jnp.concatenate([rows[start : start + count] for start, count in starts])


def _write_rows(rows: Array, x: Array, shape: Shape, sections: tuple[int, int]) -> Array:
    at = 0
    for start, count in zip((0, *sections), shape[:3], strict=True):
        rows = rows.at[0, start : start + count].set(x[at : at + count])
        at += count
    return rows
