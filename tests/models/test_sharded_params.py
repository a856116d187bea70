"""Parameters sharded over a mesh: the same model, and no needless copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from longctx.models import Llama, LlamaConfig
from longctx.models.sharded_params import (
    abstract_sharded_params,
    device_config,
    local_params,
    shard_params,
    sharded_specs,
)
from longctx.parallel import make_mesh

SIZES = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_positions": 256}


def make_params(config: LlamaConfig, dtype: type) -> dict:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.4, x.shape), dtype), Llama(config).abstract_params(dtype))


@pytest.mark.parametrize(
    ("dtype", "tied", "rows"), [(jnp.float32, False, 41), (jnp.float32, True, 100), (jnp.bfloat16, False, 41)]
)
def test_the_same_logits_on_one_device(dtype: type, tied: bool, rows: int) -> None:
    """Of few rows and of many, whose products differ."""
    config = LlamaConfig(90, 32, 48, **SIZES, tie_embeddings=tied)
    model, params = Llama(config), make_params(config, dtype)
    arranged = local_params(shard_params(params, config, make_mesh()))
    if dtype == jnp.bfloat16:  # views of the same memory
        for name, stack in params["layers"].items():
            assert arranged["layers"][name].unsafe_buffer_pointer() == stack.unsafe_buffer_pointer()
    logits = jax.jit(model.__call__)
    tokens = np.arange(rows) * 7 % 90
    ours, theirs = logits(arranged, tokens), logits(params, tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 if dtype == jnp.float32 else 0.2)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [(2, 1, 4), (1, 2, 3)])
def test_parameters_of_each_device(sizes: tuple[int, int, int], tied: bool) -> None:
    """Layers over stages; each KV head repeated in place; the vocabulary padded with zeros."""
    stages, _, tensor = sizes
    heads = {4: (8, 2), 3: (6, 3)}[tensor]
    config = LlamaConfig(50, 32, 48, **(SIZES | {"num_heads": heads[0], "num_kv_heads": heads[1]}), tie_embeddings=tied)
    mesh, params = make_mesh(*sizes), make_params(config, jnp.float32)
    sharded, wanted = shard_params(params, config, mesh), device_config(config, mesh)
    assert wanted.num_kv_heads == max(heads[1], tensor)
    assert wanted.vocab_size % (stages * tensor) == 0
    layer = sharded["layers"][0]
    assert len(sharded["layers"]) == 2 // stages
    assert layer["wk"].matrix.sharding.shard_shape(layer["wk"].matrix.shape) == (
        1,
        wanted.num_kv_heads * 8 // tensor,
        32,
    )
    repeats = wanted.num_kv_heads // heads[1]
    of_stage = np.asarray(layer["wk"].matrix).reshape(stages, -1, 8, 32)
    for stage in range(stages):
        for head in range(wanted.num_kv_heads):
            original = np.asarray(params["layers"]["wk"])[stage * 2 // stages, :, head // repeats]
            np.testing.assert_array_equal(of_stage[stage, head], original.T)
    head = params["embed"] if tied else params["lm_head"].T
    np.testing.assert_array_equal(np.asarray(sharded["lm_head"].matrix)[:50], head)
    assert not np.asarray(sharded["lm_head"].matrix)[50:].any()
    assert sharded_specs(sharded, config, mesh)["layers"][0]["wo"].matrix == P("stage", None, "tensor")


def test_abstract_params_are_those_of_an_accelerator() -> None:
    config = LlamaConfig(50, 32, 48, **SIZES)
    abstract = abstract_sharded_params(config, make_mesh(2, 1, 4), jnp.bfloat16)
    assert abstract["layers"]["wk"].shape == (2, 32, 4, 8)
    assert abstract["layers"]["wk"].sharding.shard_shape((2, 32, 4, 8)) == (1, 32, 1, 8)
    assert abstract["embed"].shape == (56, 32)
    assert abstract["lm_head"].sharding.spec == P(None, ("tensor", "stage"))
