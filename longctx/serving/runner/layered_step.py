"""The step on CPUs, as three small programs, of which the one that runs a layer is called for each layer.

XLA's CPU backend copies weights that a scan slices out of a stack, and a program with all layers in it takes as many
times longer to compile as there are layers. So each layer's weights are arrays and arguments of their own.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from longctx.models import Llama
from longctx.models.params import Params
from longctx.models.rope import Rope
from longctx.models.sharded_params import layer_specs, sharded_specs
from longctx.parallel.mesh import named_sharding, shard_map
from longctx.serving.runner.attention import PagedAttend
from longctx.serving.runner.ffn_rows import collectives_of
from longctx.serving.runner.paged_cache import PagedCache, PageTables
from longctx.serving.runner.sample_step import outer_params
from longctx.serving.runner.step import (
    DeviceState,
    begin_step,
    end_layers,
    rows_to_sample,
    sliding_of_stage,
    state_shardings,
    state_specs,
)
from longctx.serving.runner.step_inputs import SampleInputs, Shape

_EACH = P(("stage", "context"))  # of arrays that each stage and rank has its own of
_INPUTS = P("stage", "context")
# Metadata of a few numbers make up half of a step's operations, and optimising their code twice as long to compile.
_UNOPTIMISED: dict[str, Any] = {"xla_backend_optimization_level": 0}
# Where 32 programs are in flight, the launch of one more waits in a thread of each CPU device. If there are no more
# threads than devices, none is left for the programs that it waits for.
_AHEAD = 8  # layers


class Programs(NamedTuple):
    """The programs of a mesh, jitted or compiled. The first arguments of jitted ones are static."""

    begin: Any
    layer: Any
    end: Any


@functools.cache
def programs(mesh: Mesh, is_fp8: bool) -> Programs:
    """The programs of a mesh, for FP8 pages or others. Of the state each donates what it returns."""
    each, ranks = named_sharding(mesh, _EACH), named_sharding(mesh, P("context"))
    cache = state_shardings(mesh, is_fp8).cache
    return Programs(
        jax.jit(
            _begin_step,
            static_argnums=(0, 1, 2, 3, 4),
            donate_argnums=6,
            out_shardings=each,
            compiler_options=_UNOPTIMISED,
        ),
        jax.jit(_step_layer, static_argnums=(0, 1), donate_argnums=(4, 7), out_shardings=(each, cache)),
        jax.jit(_end_layers, static_argnums=(0, 1, 2, 3), donate_argnums=5, out_shardings=(each, each, ranks)),
    )


def layered_step(
    model: Llama,
    mesh: Mesh,
    params: Params,
    state: DeviceState,
    rows: Any,
    samples: Any,
    shape: Shape,
    sections: tuple[int, int],
    *,
    call: Callable[..., Any] = lambda program, *arguments: program(*arguments),
) -> tuple[DeviceState, Float[Array, "stages_ranks rows D"], Float[Array, "R D"]]:
    """`step.step` for parameters whose `layers` are a tuple, with the same arguments and results; donates the state."""
    begin, layer, end = programs(mesh, state.cache.is_fp8)
    outer, static, cache = outer_params(params), (model, mesh, shape, sections), state.cache
    tables = PageTables(state.table, state.page_index), state.window_table
    x, rope, attend = call(begin, *static, _pool(state), outer, tables, state.rows, state.last_token, rows)
    for number, (index, weights) in enumerate(
        zip(_indices(mesh, len(params["layers"])), params["layers"], strict=True)
    ):
        x, cache = call(layer, model, mesh, weights, index, x, rope, attend, cache)
        if mesh.size > 1 and number % _AHEAD == _AHEAD - 1:
            x.block_until_ready()
    stage_rows, hidden, last_rows = call(end, *static, outer, state.rows, x, samples)
    state = state._replace(cache=cache, rows=stage_rows, **attend.tables_of_state)
    return state, hidden, last_rows


def compile_layered_step(
    model: Llama, mesh: Mesh, params: Params, *arguments: Any, compiled: Callable[[], object] = lambda: None
) -> Programs:
    """Compile the programs that `layered_step` would run, and call `compiled` after each.

    Of arrays, only shapes, dtypes and shardings are used.
    """
    found = []

    def compile_program(program: Any, *arguments: Any) -> Any:
        lowered = program.lower(*arguments)
        found.append(lowered.compile())
        compiled()
        return jax.tree.map(_array, lowered.out_info, found[-1].output_shardings)

    layered_step(model, mesh, params | {"layers": params["layers"][:1]}, *arguments, call=compile_program)
    return Programs(*found)


def _array(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _begin_step(
    model: Llama,
    mesh: Mesh,
    shape: Shape,
    sections: tuple[int, int],
    pool: Any,
    outer: Params,
    tables: tuple[PageTables, Array | None],
    stage_rows: Array | None,
    last_token: Array,
    rows: Array,
) -> tuple[Array, Rope, PagedAttend]:
    def on_device(params: Params, tables: Any, stage_rows: Array | None, last_token: Array, rows: Array) -> Any:
        (table, page_index), window_table = tables
        pools: Any = PagedCache(pool, pool)
        unused: Any = None
        state = DeviceState(pools, table, page_index, stage_rows, last_token, unused, unused, window_table)
        return _expand(begin_step(model, mesh, shape, sections, params["embed"], state, rows))

    specs = sharded_specs(outer, model.config, mesh), _EACH, _EACH, P(), _INPUTS
    return shard_map(on_device, mesh, specs, _EACH)(outer, tables, stage_rows, last_token, rows)


def _step_layer(
    model: Llama,
    mesh: Mesh,
    weights: Params,
    index: Array,
    x: Array,
    rope: Rope,
    attend: PagedAttend,
    cache: PagedCache,
) -> tuple[Array, PagedCache]:
    def on_device(weights: Params, index: Array, shared: Any, cache: PagedCache) -> tuple[Array, PagedCache]:
        x, rope, attend = _squeeze(shared)
        sliding = sliding_of_stage(model, mesh)
        is_sliding = None if sliding is None else sliding[index]
        collectives = collectives_of(attend.shape)
        x, cache = model.layer(_squeeze(weights), index, x, rope, attend, cache, *collectives, is_sliding=is_sliding)
        return x[None], cache

    cache_specs = state_specs(mesh.shape["stage"], mesh.shape["context"], cache.is_fp8).cache
    specs = layer_specs(weights, model.config, mesh, attend.shape.ffn), P(), _EACH, cache_specs
    return shard_map(on_device, mesh, specs, (_EACH, cache_specs))(weights, index, (x, rope, attend), cache)


def _end_layers(
    model: Llama,
    mesh: Mesh,
    shape: Shape,
    sections: tuple[int, int],
    outer: Params,
    stage_rows: Array | None,
    x: Array,
    samples: Array,
) -> tuple[Array | None, Array, Array]:
    def on_device(params: Params, stage_rows: Array | None, x: Array, samples: Array) -> Any:
        stage_rows, hidden = end_layers(model, shape, sections, params, stage_rows, x[0])
        last_rows = rows_to_sample(SampleInputs.views(samples, shape), hidden)
        return stage_rows, hidden[None], last_rows

    specs = sharded_specs(outer, model.config, mesh), _EACH, _EACH, P()
    return shard_map(on_device, mesh, specs, (_EACH, _EACH, P("context")))(outer, stage_rows, x, samples)


def _expand(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def _squeeze(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(x.shape[1:]), tree)


def _pool(state: DeviceState) -> Any:
    """Shape and dtype of the key pages of a device."""
    pool = state.cache.k
    return jax.ShapeDtypeStruct(pool.sharding.shard_shape(pool.shape), pool.dtype)


@functools.cache
def _indices(mesh: Mesh, count: int) -> list[Array]:
    return [jax.device_put(np.int32(i), named_sharding(mesh, P())) for i in range(count)]
