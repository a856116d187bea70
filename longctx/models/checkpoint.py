"""Loads Hugging Face checkpoints, and GGUF files of llama.cpp, directly into their sharding.

The host never holds a stack of layers: it reads a slice of one layer and sends it to the device, which writes it into
the stack, or into the array of that layer where layers are apart. Several threads do so, each for a parameter. Peak
host memory is a slice for each, or 2 GiB if that is less, and one slice at least.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from longctx.kernels.fp8 import BITS, from_e4m3_bits
from longctx.models.config import LlamaConfig
from longctx.models.gguf import GgufReader
from longctx.models.gguf_config import config_from_gguf
from longctx.models.hf_names import Layout, layouts
from longctx.models.llama import Llama
from longctx.models.params import Ffn, Params, param_specs, stacking_on
from longctx.models.safetensors_reader import CheckpointError, SafetensorsReader, TensorReader
from longctx.models.validation import check_directory, is_gguf, shown

_MAX_THREADS = 8  # more do not read faster
_MOST_BYTES = 2 << 30  # of slices on the host, as float32
_EMBEDDING, _TIED_COPY = "model.embed_tokens.weight", "lm_head.weight"


def load_checkpoint(
    directory: str | os.PathLike[str],
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
    apart: bool | None = None,
    ffn: Ffn = "tensor",
) -> tuple[Llama, Params]:
    """Load a Llama, Mistral, Qwen2.5, Qwen3 or Gemma 3 checkpoint: `config.json` and safetensors, or a GGUF file.

    Quantised tensors of a GGUF file are dequantised to float32, and then converted to `dtype`.

    Qwen2.5-1M checkpoints load too. Their `dual_chunk_attention_config`, an approximation for lengths beyond training,
    is ignored, so they attend densely.

    Args:
      directory: a local directory as `save_pretrained` writes it, or a file `*.gguf`.
      mesh: the mesh over which the parameters are sharded by `param_specs`. None: one device.
      dtype: dtype of the parameters. None: that of the checkpoint (of its embedding, if mixed; float32 if quantised).
      apart: whether each layer has arrays of its own, as an engine on accelerators needs them; else layers are stacked,
        as training needs them. None: on accelerators, not on CPUs. Everything takes both; an engine and `to_nnx` make
        the form that they need, which takes another copy of the layers until the caller drops the given one.
      ffn: `"all"`: output projections and feed-forward are sharded over `tensor` and `context`, for an engine whose
        `ParallelPlan` has it.

    Returns:
      The model and its parameters. In a multi-process run each process reads only its own slices (and the embedding,
      where the checkpoint has a copy of it that is to be compared).

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the directory or `config.json` cannot be read, or the latter has an unknown architecture or an
        unsupported setting; or the package that reads GGUF files is not installed.
      CheckpointError: (a ValueError) a tensor is missing, unexpected, or of a wrong shape or dtype, or a file is
        truncated or not as it should be.

    Examples:
      >>> import jax.numpy as jnp
      >>> from longctx.models import load_checkpoint, load_tokenizer
      >>> from longctx.models.builtin import TINY  # the directory of a small model
      >>> tokenizer = load_tokenizer(TINY)
      >>> tokens = jnp.array(tokenizer.encode("The secret number is 4711. The secret number is 471"))
      >>> model, params = load_checkpoint(TINY)
      >>> logits = model(params, tokens)
      >>> logits.shape, logits.dtype
      ((52, 258), dtype('float32'))
      >>> tokenizer.decode([int(logits[-1].argmax())])
      '1'
    """
    reader, model, dtype = _open_checkpoint(Path(directory), dtype)
    wanted = layouts(model.config, stacking_on(model.config, mesh, apart))
    if mesh is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        return model, _load_params(reader, dtype, wanted, jax.tree.map(lambda _: device, wanted))
    specs = param_specs(model.config, mesh, apart, ffn)
    return model, _load_params(reader, dtype, wanted, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


def read_model(directory: str | os.PathLike[str], dtype: DTypeLike | None = None) -> tuple[Llama, np.dtype[Any]]:
    """Read the model that `load_checkpoint` would load, and the dtype of its parameters; no weights are read."""
    return _open_checkpoint(Path(directory), dtype, reads_values=False)[1:]


def _open_checkpoint(
    directory: Path, dtype: DTypeLike | None, reads_values: bool = True
) -> tuple[TensorReader, Llama, np.dtype[Any]]:
    """Check a checkpoint by its `config.json` and the headers of its files; see `tensor_problems`."""
    if not is_gguf(directory):
        check_directory(directory)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be a floating-point type or None, got {dtype}")
    reader: TensorReader
    if is_gguf(directory):
        reader = gguf_reader = GgufReader(directory)
        config = config_from_gguf(gguf_reader)
    else:
        config = LlamaConfig.from_hf(directory / "config.json")
        reader = SafetensorsReader(directory)
    for problem in tensor_problems(reader, config, reads_values):
        raise problem
    embedding = layouts(config)["embed"]
    own = reader.check(embedding.names[0], embedding.file_shape)
    return reader, Llama(config), own if dtype is None else jnp.dtype(dtype)


def tensor_problems(reader: TensorReader, config: LlamaConfig, reads_values: bool = True) -> Iterator[CheckpointError]:
    """List why these tensors are not those of the model: missing, unexpected, of a wrong shape or dtype.

    Values are read only to compare a copy of the embedding with it, and only if `reads_values`.
    """
    if config.num_layers > len(reader.tensors):  # before anything is made for each layer
        count = f"num_hidden_layers is {config.num_layers}, but there are {len(reader.tensors)} tensors in all"
        yield CheckpointError(f"{reader.directory}: {count}")
        return
    known = set()
    for layout in jax.tree.leaves(layouts(config)):
        for name in layout.names:
            known.add(name)
            try:
                reader.check(name, layout.file_shape, layout.is_e4m3)
            except CheckpointError as error:
                yield error
    for name in sorted(reader.tensors.keys() - known):
        # Some checkpoints store the tied copy, and old ones a buffer of rotary frequencies.
        if config.tie_embeddings and name == _TIED_COPY:
            if reads_values and not _is_copy(reader):
                file = reader.tensors[name].file
                yield CheckpointError(f"{file}: {name} is not {_EMBEDDING}, but config.json has tie_word_embeddings")
        elif not name.endswith("rotary_emb.inv_freq"):
            file = reader.tensors[name].file
            yield CheckpointError(f"{file}: unexpected tensor {shown(name)}: not part of this architecture")


def _is_copy(reader: TensorReader) -> bool:
    copy, embedding = reader.tensors[_TIED_COPY], reader.tensors.get(_EMBEDDING)
    if embedding is None or (copy.dtype, copy.shape) != (embedding.dtype, embedding.shape):
        return False
    pairs = zip(reader.blocks(_TIED_COPY), reader.blocks(_EMBEDDING), strict=True)
    return all(ours.tobytes() == theirs.tobytes() for ours, theirs in pairs)


class _SlicesInFlight:
    """The slices that threads have on the host: they wait where there are too many bytes of them, or to stop."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._changed = most_bytes, threading.Condition()
        self._num_bytes, self._is_stopped = 0, False

    @contextlib.contextmanager
    def slice(self, num_bytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopped or not self._num_bytes or self._num_bytes + num_bytes <= self._most_bytes
            )
            if self._is_stopped:
                raise InterruptedError("another parameter can't be loaded")
            self._num_bytes += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._num_bytes -= num_bytes
                self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


def _load_params(reader: TensorReader, dtype: np.dtype[Any], layouts: Any, shardings: Any) -> Params:
    """Load all parameters, several at a time. Of several errors, that of the first parameter is raised."""
    slices, threads = _SlicesInFlight(_MOST_BYTES), min(_MAX_THREADS, 2 * (os.cpu_count() or 1))
    leaves, structure = jax.tree.flatten(layouts)
    pool = ThreadPoolExecutor(threads, "load")
    try:
        loading = [
            pool.submit(_load_param, reader, layout, sharding, layout.dtype or dtype, slices)
            for layout, sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
        ]
        return jax.tree.unflatten(structure, [each.result() for each in loading])
    finally:
        slices.stop()
        pool.shutdown(cancel_futures=True)  # waits for the slices that are being read, before their files are closed


def _load_param(
    reader: TensorReader, layout: Layout, sharding: Sharding, dtype: np.dtype[Any], in_flight: _SlicesInFlight
) -> jax.Array:
    shape = (len(layout.names), *layout.shape) if layout.stacked else layout.shape
    loaded: dict[tuple[tuple[int, int], ...], jax.Array] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        ranges = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        if ranges not in loaded:
            loaded[ranges] = _load_shard(reader, layout, ranges, dtype, device, in_flight)
        # A shard is read once: other devices that hold it get a copy of the first device's.
        arrays.append(jax.device_put(loaded[ranges], device))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _load_shard(
    reader: TensorReader,
    layout: Layout,
    ranges: tuple[tuple[int, int], ...],
    dtype: np.dtype[Any],
    device: jax.Device,
    in_flight: _SlicesInFlight,
) -> jax.Array:
    layers, rest = (ranges[0], ranges[1:]) if layout.stacked else ((0, 1), ranges)
    shape = tuple(stop - start for start, stop in rest)
    slices = layout.file_slices(tuple(slice(*part) for part in rest))
    shard = jnp.zeros((layers[1] - layers[0], *shape), dtype, device=device) if layout.stacked else None
    for i, name in enumerate(layout.names[slice(*layers)]):
        if name is None:
            continue
        with in_flight.slice(4 * math.prod(shape)):
            values = reader.read(name, slices)
            if layout.is_scale:
                reader.check_scale(name, values)
            tensor = jax.device_put(values, device)
            del values
            if shard is None:
                shard = _convert(layout, tensor, shape, dtype)
            else:
                shard = _write_layer(layout, shard, tensor, np.int32(i))
            # Without the wait, asynchronous dispatch would keep many slices alive on the host.
            shard.block_until_ready()
            del tensor
    assert shard is not None
    return shard


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _write_layer(layout: Layout, stack: jax.Array, tensor: jax.Array, layer: jax.Array) -> jax.Array:
    """Convert one layer on its device, so that the host only moves bytes, and write it into the stack."""
    if tensor.dtype == BITS != stack.dtype:  # a quantised layer in a stack that is not
        tensor = from_e4m3_bits(tensor, stack.dtype)
    ours = layout.from_file(tensor, stack.shape[1:]).astype(stack.dtype)
    return lax.dynamic_update_index_in_dim(stack, ours, layer, axis=0)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _convert(layout: Layout, tensor: jax.Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.Array:
    return layout.from_file(tensor, shape).astype(dtype)
