"""Parameters sharded over a mesh: the same model, and no needless copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from longctx.models import Llama, LlamaConfig, param_specs, weight_bytes
from longctx.models.attend import dense_attend
from longctx.models.sharded_params import (
    abstract_sharded_params,
    device_config,
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
    arranged = shard_params(params, config, make_mesh())
    tokens = jnp.arange(rows) * 7 % 90
    ours, theirs = jax.jit(logits_of, static_argnums=0)(model, arranged, tokens), model(params, tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 if dtype == jnp.float32 else 0.2)


def logits_of(model: Llama, arranged: dict, tokens: jax.Array) -> jax.Array:
    """Logits by parameters of `shard_params` for one device."""
    positions = jnp.arange(len(tokens))
    attend, rope = dense_attend(model.config, arranged["embed"].dtype, positions), model.rope(positions)
    x, layers = arranged["embed"][tokens], arranged["layers"]
    for index, layer in enumerate(layers):
        weights = jax.tree.map(lambda weight: weight[0], layer)
        x, _ = model.layer(weights, jnp.int32(index), x, rope, attend, None)
    return model.logits(arranged, model.norm(arranged, x))


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
    fused, query_rows = layer["wq wk wv"].matrix, heads[0] * 8 // tensor
    kv_rows = wanted.num_kv_heads * 8 // tensor
    assert fused.sharding.shard_shape(fused.shape) == (1, query_rows + 2 * kv_rows, 32)
    repeats = wanted.num_kv_heads // heads[1]
    by_device = np.asarray(fused).reshape(stages, tensor, -1, 32)[:, :, query_rows : query_rows + kv_rows]
    of_stage = by_device.reshape(stages, -1, 8, 32)
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


@pytest.mark.parametrize("apart", [False, True])
def test_context_ranks_share_output_projections_and_feed_forward(apart: bool) -> None:
    """Each device has the heads and columns of its place, `tensor` first, and as many bytes as arithmetic says."""
    config = LlamaConfig(56, 32, 48, **(SIZES | {"num_heads": 8, "num_kv_heads": 2}))
    mesh, params = make_mesh(1, 4, 2), make_params(config, jnp.float32)
    sharded = shard_params(params, config, mesh, apart=apart or None, ffn="all")
    layer = sharded["layers"].stacks[0] if apart else sharded["layers"][0]
    wo, down = (layer[name] if apart else layer[name].matrix for name in ("wo", "w_down"))
    for name, mine in (("wo", wo), ("w_down", down)):
        whole = np.asarray(params["layers"][name][0]).reshape(-1, 32)
        parts = np.split(whole, 8)
        for shard in mine.addressable_shards:
            (at,) = np.argwhere(mesh.devices[0] == shard.device)
            found = np.asarray(shard.data).reshape(parts[0].shape if apart else parts[0].T.shape)
            np.testing.assert_array_equal(found if apart else found.T, parts[at[1] * 4 + at[0]])
    of_each = dict.fromkeys(mesh.devices.flat, 0)
    for x in jax.tree.leaves(sharded):
        for shard in x.addressable_shards:
            of_each[shard.device] += shard.data.nbytes
    assert {*of_each.values()} == {weight_bytes(config, 1, 2, 4, ffn_ranks=4)}
    assert weight_bytes(config, 1, 2, 4, ffn_ranks=4) < 0.6 * weight_bytes(config, 1, 2, 4)


def test_ffn_is_one_of_its_names() -> None:
    with pytest.raises(ValueError, match="ffn must be one of tensor, all, got 'context'"):
        param_specs(LlamaConfig(50, 32, 48, **SIZES), make_mesh(), ffn="context")  # type: ignore[arg-type]
