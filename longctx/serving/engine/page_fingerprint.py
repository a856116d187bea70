"""Fingerprint of a model's pages beyond an engine: a digest of its parameters and of its configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.models.config import LlamaConfig
from longctx.models.layer_runs import layer_runs
from longctx.models.layer_stacks import stacking_of, stacks_of
from longctx.models.params import Params
from longctx.serving.kv_cache.page_layout import PageLayout

# Of a configuration: what neither keys nor values follow from.
_WITHOUT_EFFECT = ("max_positions", "bos_id", "eos_ids", "tie_embeddings")
# Settings that came later: models without them keep the fingerprint that their pages on disk have.
_LATER = (
    "out_bias",
    "query_pre_attn_scalar",
    "attention_sinks",
    "gemma_style",
    "sliding_window",
    "sliding_layers",
    "local_rope_theta",
)


def page_fingerprint(config: LlamaConfig, params: Params, layout: PageLayout) -> bytes:
    """Compute a digest that is equal for two engines if they have the same model, dtype and page size, and only then.

    It is of every element that keys and values follow from, and the same under any mesh, in any process; but for a
    model whose layers are quantised in some stages only, which has another one for each number of stages.

    Args:
      params: of one device, or on a mesh; numpy arrays are fine. Every process of a mesh has to call it.
    """
    stacks = stacks_of(params["layers"])
    embed = _digests(params["embed"][None])
    weights = {f"embed{path}": digest.hex() for path, (digest,) in embed}
    for run, stack in zip(layer_runs(config, stacking_of(params["layers"])), stacks, strict=True):
        for path, digests in _digests(stack):
            for layer, digest in zip(run.layers, digests, strict=True):
                if layer is not None:
                    weights[f"layer {layer}{path}"] = digest.hex()
    fields = [field for field in dataclasses.fields(config) if field.name not in _WITHOUT_EFFECT]
    settings = {field.name: getattr(config, field.name) for field in fields}
    for field in fields:
        if field.name in _LATER and settings[field.name] == field.default:
            del settings[field.name]
    text = json.dumps(
        {"layout": layout._asdict(), "weights": weights, "settings": settings}, sort_keys=True, default=repr
    )
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"kv pages").digest()


def _digests(stack: Any) -> list[tuple[str, list[bytes]]]:
    """The path of each array `[layers, ...]` of a pytree, and of each layer what its bits sum up to, by place."""
    stack = jax.tree.map(jnp.asarray, stack)
    meshes = [x.sharding.mesh for x in jax.tree.leaves(stack) if isinstance(x.sharding, NamedSharding)]
    replicated = NamedSharding(meshes[0], P()) if meshes else None
    sums = jax.jit(_sums_of_all, out_shardings=replicated)(stack)
    digests = []
    for (path, x), rows in zip(jax.tree_util.tree_leaves_with_path(stack), jax.tree.leaves(sums), strict=True):
        name = f"{x.dtype} {x.shape[1:]}".encode()
        rows = [hashlib.blake2b(name + row.tobytes(), digest_size=16).digest() for row in np.asarray(rows)]
        digests.append((jax.tree_util.keystr(path), rows))
    return digests


def _sums_of_all(stack: Any) -> Any:
    return jax.tree.map(_sums, stack)


def _sums(x: jax.Array) -> jax.Array:
    """Two sums of the bits of each layer of `x` `[layers, ...]`, modulo 2^32: `[layers, 2]` uint32.

    Integers give the same sum in whichever order they are added, so it doesn't depend on how `x` is sharded.
    """
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape[1:], 1):
        place = place * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    sums = []
    for multiplier in (2654435761, 2246822519):
        weights = place * np.uint32(multiplier)
        weights = (weights ^ (weights >> np.uint32(15))) | np.uint32(1)
        sums.append(jnp.sum(bits * weights, axis=tuple(range(1, x.ndim)), dtype=jnp.uint32))
    return jnp.stack(sums, axis=-1)
