"""Loads Hugging Face checkpoints directly into their sharding.

The host never holds a stack of layers: it reads a slice of one layer and sends it to the device, which writes it into
the stack. Peak host memory is one slice of one tensor.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from longctx.models.config import LlamaConfig
from longctx.models.hf_names import Layout, layouts
from longctx.models.llama import Llama
from longctx.models.params import Params, param_specs
from longctx.models.safetensors_reader import CheckpointError, SafetensorsReader


def load_checkpoint(
    directory: str | os.PathLike[str], mesh: Mesh | None = None, dtype: DTypeLike | None = None
) -> tuple[Llama, Params]:
    """Load a Llama or Qwen2 checkpoint from its `config.json` and safetensors files.

    Qwen2.5-1M checkpoints load too. Their `dual_chunk_attention_config`, an approximation for lengths beyond training,
    is ignored, so they attend densely.

    Args:
      directory: a local directory as `save_pretrained` writes it.
      mesh: the mesh over which the parameters are sharded by `param_specs`. None: one device.
      dtype: dtype of the parameters. None: that of the checkpoint (of its embedding, if mixed).

    Returns:
      The model and its parameters. In a multi-process run each process reads only its own slices.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: an unknown architecture or an unsupported setting in `config.json`.
      CheckpointError: (a ValueError) a tensor is missing, unexpected, or of a wrong shape or dtype, or a file is
        truncated.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"no such directory: {directory}")
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be a floating-point type or None, got {dtype}")
    config = LlamaConfig.from_hf(directory / "config.json")
    wanted = layouts(config)
    with SafetensorsReader(directory) as reader:
        _check_tensors(reader, config, jax.tree.leaves(wanted))
        dtype = reader.check(wanted["embed"].names[0], wanted["embed"].file_shape) if dtype is None else dtype
        params = jax.tree.map(
            lambda layout, sharding: _load_param(reader, layout, sharding, jnp.dtype(dtype)),
            wanted,
            _shardings(config, mesh),
        )
    return Llama(config), params


def _check_tensors(reader: SafetensorsReader, config: LlamaConfig, wanted: Iterable[Layout]) -> None:
    """Check that every tensor of the model exists, and that no tensor is unknown."""
    known = set()
    for layout in wanted:
        for name in layout.names:
            reader.check(name, layout.file_shape)
            known.add(name)
    for name in reader.tensors.keys() - known:
        # Some checkpoints store the tied copy, and old ones a buffer of rotary frequencies.
        tied_copy = config.tie_embeddings and name == "lm_head.weight"
        if not tied_copy and not name.endswith("rotary_emb.inv_freq"):
            file = reader.tensors[name].file
            raise CheckpointError(f"{file}: unexpected tensor {name!r}: not part of this architecture")


def _shardings(config: LlamaConfig, mesh: Mesh | None) -> Any:
    if mesh is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(lambda _: device, layouts(config))
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(config, mesh))


def _load_param(reader: SafetensorsReader, layout: Layout, sharding: Sharding, dtype: np.dtype[Any]) -> jax.Array:
    shape = (len(layout.names), *layout.shape) if layout.stacked else layout.shape
    loaded: dict[tuple[tuple[int, int], ...], jax.Array] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        ranges = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        if ranges not in loaded:
            load_shard = _load_stacked_shard if layout.stacked else _load_single_shard
            loaded[ranges] = load_shard(reader, layout, ranges, dtype, device)
        # A shard is read once: other devices that hold it get a copy of the first device's.
        arrays.append(jax.device_put(loaded[ranges], device))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _load_stacked_shard(
    reader: SafetensorsReader,
    layout: Layout,
    ranges: tuple[tuple[int, int], ...],
    dtype: np.dtype[Any],
    device: jax.Device,
) -> jax.Array:
    layers, *rest = ranges
    shape = tuple(stop - start for start, stop in ranges)
    slices = layout.file_slices(tuple(slice(*part) for part in rest))
    stack = jnp.zeros(shape, dtype, device=device)
    for i, layer in enumerate(range(*layers)):
        tensor = jax.device_put(reader.read(layout.names[layer], slices), device)
        # Without the wait, asynchronous dispatch would keep many slices alive on the host.
        stack = _write_layer(layout, stack, tensor, np.int32(i)).block_until_ready()
    return stack


def _load_single_shard(
    reader: SafetensorsReader,
    layout: Layout,
    ranges: tuple[tuple[int, int], ...],
    dtype: np.dtype[Any],
    device: jax.Device,
) -> jax.Array:
    slices = layout.file_slices(tuple(slice(*part) for part in ranges))
    shape = tuple(stop - start for start, stop in ranges)
    tensor = jax.device_put(reader.read(layout.names[0], slices), device)
    return _convert(layout, tensor, shape, dtype).block_until_ready()


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _write_layer(layout: Layout, stack: jax.Array, tensor: jax.Array, layer: jax.Array) -> jax.Array:
    """Convert one layer on its device, so that the host only moves bytes, and write it into the stack."""
    ours = layout.from_file(tensor, stack.shape[1:]).astype(stack.dtype)
    return lax.dynamic_update_index_in_dim(stack, ours, layer, axis=0)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _convert(layout: Layout, tensor: jax.Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.Array:
    return layout.from_file(tensor, shape).astype(dtype)
