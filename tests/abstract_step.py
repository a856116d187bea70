"""Abstract arguments of an engine's step on a mesh, to compile it without allocating arrays."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.kernels.bits import bits_dtype
from longctx.models import Llama, LlamaConfig
from longctx.models.params import Ffn
from longctx.models.sharded_params import abstract_sharded_params, device_config
from longctx.serving.request.sampling_params import MAX_LOGIT_BIAS, SamplingLevel
from longctx.serving.runner.layer_pages import LayerPages
from longctx.serving.runner.layered_step import compile_layered_step
from longctx.serving.runner.paged_cache import PagedCache
from longctx.serving.runner.sample_step import compile_samplers
from longctx.serving.runner.sampler import LogitBias
from longctx.serving.runner.step import DeviceState, state_specs, step_program
from longctx.serving.runner.step_inputs import RowInputs, SampleInputs, Shape

CONFIG = LlamaConfig(64, 32, 48, 3, 4, 2, 16, max_positions=1 << 20)
PAGE_SIZE, NUM_PAGES, SLOTS = 64, 2048, 8
LAYER = NUM_PAGES * PAGE_SIZE * CONFIG.num_kv_heads * CONFIG.head_dim
TOP = 2


def make_shape(
    mesh: Mesh, rows: tuple[int, int, int] = (0, 0, 16), num_pages: int = NUM_PAGES, **options: Any
) -> Shape:
    return Shape.of(rows, SLOTS, PAGE_SIZE, num_pages, TOP, mesh.shape["context"], **options)


def abstract_state(
    mesh: Mesh,
    dtype: object,
    config: LlamaConfig = CONFIG,
    num_pages: int = NUM_PAGES,
    sections: tuple[int, int, int] = (64, 64, 64),
    kv_dtype: object = None,
    num_window_pages: int = 0,
) -> DeviceState:
    is_fp8, has_window = kv_dtype == "float8_e4m3fn", num_window_pages > 0
    stages, ranks = mesh.shape["stage"], mesh.shape["context"]
    specs, each = state_specs(stages, ranks, is_fp8, has_window), stages * ranks
    sharded = device_config(config, mesh)
    pages = each * LayerPages.of(config, stages, num_pages, num_window_pages).total
    pool = (pages, PAGE_SIZE, sharded.num_kv_heads, config.head_dim)
    pools = (jax.ShapeDtypeStruct(pool, jnp.uint8 if is_fp8 else bits_dtype(dtype)),) * 2
    scales = (jax.ShapeDtypeStruct((pool[0], pool[2], pool[1]), jnp.float32),) * 2 if is_fp8 else ()
    entries = config.max_positions // PAGE_SIZE
    shapes: DeviceState = DeviceState(
        PagedCache(*pools, *scales),  # type: ignore[arg-type]
        jax.ShapeDtypeStruct((each, SLOTS, entries), jnp.int32),
        jax.ShapeDtypeStruct((each, SLOTS, entries), jnp.int32) if ranks > 1 else None,
        jax.ShapeDtypeStruct((each, sum(sections), config.hidden_size), dtype) if stages > 1 else None,  # type: ignore
        jax.ShapeDtypeStruct((SLOTS,), jnp.int32),
        jax.ShapeDtypeStruct((SLOTS, config.vocab_size), jnp.uint32),
        LogitBias(*(jax.ShapeDtypeStruct((SLOTS, MAX_LOGIT_BIAS), x) for x in (jnp.int32, jnp.float32))),  # type: ignore
        jax.ShapeDtypeStruct((each, SLOTS, entries), jnp.int32) if has_window else None,
    )
    return jax.tree.map(lambda x, spec: on_mesh(mesh, x, spec), shapes, specs)


def on_mesh(mesh: Mesh, x: Any, spec: P) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def abstract_params(
    mesh: Mesh, dtype: object, config: LlamaConfig = CONFIG, layered: bool = False, ffn: Ffn = "tensor"
) -> dict:
    params = abstract_sharded_params(config, mesh, dtype, ffn=ffn)
    if layered:  # as `shard_params` makes them on a CPU
        layer = {
            name: on_mesh(mesh, jax.ShapeDtypeStruct((mesh.shape["stage"], *x.shape[1:]), x.dtype), x.sharding.spec)
            for name, x in params["layers"].items()
        }
        params["layers"] = (layer,) * (config.num_layers // mesh.shape["stage"])
    elif dtype == jnp.bfloat16 and mesh.devices.flat[0].platform == "cpu":
        params["layers"] = {
            name: on_mesh(mesh, jax.ShapeDtypeStruct(x.shape, jnp.uint16), x.sharding.spec)
            for name, x in params["layers"].items()
        }
    return params


def compile_step(
    mesh: Mesh,
    shape: Shape,
    dtype: object,
    config: LlamaConfig = CONFIG,
    layered: bool = False,
    sections: tuple[int, int, int] = (64, 64, 64),
    kv_dtype: object = None,
) -> Any:
    """Compile the step for the devices of a mesh: one program, or those of `layered_step`."""
    size = (mesh.shape["stage"], mesh.shape["context"], RowInputs.length(shape))
    inputs = on_mesh(mesh, jax.ShapeDtypeStruct(size, jnp.int32), P("stage", "context")), _samples(mesh, shape)
    state = abstract_state(mesh, dtype, config, shape.num_pages, sections, kv_dtype, shape.num_window_pages)
    params = abstract_params(mesh, dtype, config, layered, shape.ffn)
    starts = (sections[0], sections[0] + sections[1])
    arguments = (Llama(config), mesh, params, state, *inputs, shape, starts)
    if layered:
        return compile_layered_step(*arguments)
    kinds = config.quantization is not None, kv_dtype is not None, config.sliding_window is not None
    return step_program(mesh, *kinds).lower(*arguments).compile()


def compile_sampling(
    mesh: Mesh,
    shape: Shape,
    dtype: object,
    config: LlamaConfig = CONFIG,
    levels: Iterable[SamplingLevel] = SamplingLevel,
) -> dict[SamplingLevel, Any]:
    """Compile the programs that sample after the step, for each level."""
    state, params = abstract_state(mesh, dtype, config), abstract_params(mesh, dtype, config)
    return compile_samplers(Llama(config), mesh, shape, params, state, _samples(mesh, shape), levels)


def _samples(mesh: Mesh, shape: Shape) -> Any:
    return on_mesh(mesh, jax.ShapeDtypeStruct((SampleInputs.length(shape),), jnp.int32), P())
