"""Writes checkpoints in Hugging Face's format."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax

from longctx.kernels.fp8 import E4M3
from longctx.models.hf_names import Layout, layouts
from longctx.models.layer_runs import Stacking, layer_runs
from longctx.models.layer_stacks import stacking_of, stacks_of
from longctx.models.llama import Llama
from longctx.models.params import Params, abstract_params
from longctx.models.safetensors_reader import INDEX_FILE, SINGLE_FILE, STORED_DTYPES

# One tensor to write: its name in the file, its layout, the parameter, and the layer if the parameter is a stack.
_Piece = tuple[str, Layout, Any, int | None]


def save_checkpoint(
    directory: str | os.PathLike[str], model: Llama, params: Params, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write `config.json` and safetensors files that `load_checkpoint` and transformers read.

    All files are written to a temporary directory and then renamed, so that each file is replaced as a whole. Peak host
    memory is one file, at most `max_shard_bytes` (or one tensor, if that is larger).

    Args:
      directory: created if missing; its other files (a tokenizer) stay.
      model: the model of the parameters.
      params: parameters with the structure and shapes of `model.abstract_params()`, or as `load_checkpoint` gives them
        for a mesh, if they are not quantised; all float32, all float16 or all bfloat16, but for quantised weights and
        their scales.
      max_shard_bytes: the largest file; more bytes are split into several files with an index.

    Raises:
      ValueError: `params` do not fit the model, or are sharded over several processes.

    Examples:
      >>> from pathlib import Path
      >>> from longctx.models import load_checkpoint, save_checkpoint
      >>> from longctx.models.builtin import TINY  # the directory of a small model
      >>> model, params = load_checkpoint(TINY)
      >>> save_checkpoint("mine", model, params)  # a directory; transformers reads it too
      >>> sorted(path.name for path in Path("mine").iterdir())
      ['config.json', 'model.safetensors']
      >>> _, loaded = load_checkpoint("mine", dtype="bfloat16")
      >>> loaded["embed"].dtype
      dtype(bfloat16)
    """
    dtype = _check_params(model, params)
    directory = Path(directory)
    groups = _group(_pieces(model, params), max_shard_bytes)
    names = [SINGLE_FILE]
    if len(groups) > 1:
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]

    # `torch_dtype` is what `dtype` was called before transformers 4.56.
    config = model.config.to_hf() | {"dtype": dtype.name, "torch_dtype": dtype.name}
    with replacing_files(directory) as staging:
        write_files(
            staging, ((name, dict(map(_read, group))) for name, group in zip(names, groups, strict=True)), config
        )
    # A file that an earlier save left would be read instead of, or beside, the new ones.
    (directory / (INDEX_FILE if len(groups) == 1 else SINGLE_FILE)).unlink(missing_ok=True)


def _check_params(model: Llama, params: Params) -> np.dtype[Any]:
    """Return the dtype of the parameters, which have the structure, the shapes and the dtypes of the model."""
    given = dict(jax.tree.leaves_with_path(params))
    dtype = np.dtype(getattr(params.get("embed"), "dtype", np.float32))
    expected = dict(jax.tree.leaves_with_path(abstract_params(model.config, dtype, _stacking(model, params))))
    if given.keys() != expected.keys():
        different = sorted(map(jax.tree_util.keystr, given.keys() ^ expected.keys()))
        raise ValueError(f"params do not have the model's structure: they differ in {', '.join(different)}")
    if dtype not in STORED_DTYPES:
        raise ValueError(f"params must be all float32, all float16 or all bfloat16, got {dtype}")
    for path, leaf in expected.items():
        own, name = given[path], f"params{jax.tree_util.keystr(path)}"
        if (own.shape, own.dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(f"{name} is {own.dtype} {own.shape}, beside these it must be {leaf.dtype} {leaf.shape}")
        if isinstance(own, jax.Array) and not own.is_fully_addressable:
            raise ValueError(f"{name} is spread over several processes")
    return dtype


def _pieces(model: Llama, params: Params) -> list[_Piece]:
    """Every tensor to write, layer by layer."""
    wanted = layouts(model.config, _stacking(model, params))
    runs = wanted.pop("layers")
    pieces: list[_Piece] = [(layout.names[0], layout, params[key], None) for key, layout in wanted.items()]
    for run, stacks in zip(stacks_of(runs), stacks_of(params["layers"]), strict=True):
        pairs = [*zip(jax.tree.leaves(run), jax.tree.leaves(stacks), strict=True)]
        for i, first in enumerate(run["attn_norm"].names):
            if first is not None:  # a layer of zeros is not part of the model
                pieces += [(layout.names[i], layout, stack, i) for layout, stack in pairs]
    return pieces


def _stacking(model: Llama, params: Params) -> Stacking:
    """Return how the parameters are stacked; for one stage if the model can't be written from there."""
    stacking = stacking_of(params.get("layers"))
    if stacking.stages > model.config.num_layers or any(run.partly for run in layer_runs(model.config, stacking)):
        return stacking._replace(stages=1)
    return stacking


def _group(pieces: list[_Piece], max_bytes: int) -> list[list[_Piece]]:
    groups: list[list[_Piece]] = [[]]
    filled = 0
    for piece in pieces:
        if groups[-1] and filled + _bytes(piece) > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += _bytes(piece)
    return groups


def _bytes(piece: _Piece) -> int:
    _, layout, param, _ = piece
    return int(np.prod(layout.shape)) * param.dtype.itemsize


def _read(piece: _Piece) -> tuple[str, np.ndarray]:
    name, layout, param, layer = piece
    tensor = np.asarray(_file_tensor(layout, param, None if layer is None else np.int32(layer)))
    return name, tensor.view(E4M3) if layout.is_e4m3 else tensor


@functools.partial(jax.jit, static_argnums=0)
def _file_tensor(layout: Layout, param: jax.Array, layer: jax.Array | None) -> jax.Array:
    """One tensor in the file's layout. The layer index is traced, so that one compilation serves all layers."""
    ours = param if layer is None else lax.dynamic_index_in_dim(param, layer, keepdims=False)
    return layout.to_file(ours)


STAGING = ".saving"
"""The temporary directory of `replacing_files`, beside the files that it replaces."""


@contextmanager
def replacing_files(directory: Path) -> Iterator[Path]:
    """A temporary directory to write `config.json` and other files to, which are renamed into `directory` at the end.

    After an error or an interrupt nothing is renamed and nothing stays. What a process left that was killed is removed.
    """
    staging = directory / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        # config.json, which says how the others are read, comes last.
        for path in sorted(staging.iterdir(), key=lambda path: (path.name == "config.json", path.name)):
            # safetensors makes files that only their owner can read.
            shutil.copymode(staging / "config.json", path)
            os.replace(path, directory / path.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_files(directory: Path, files: Iterable[tuple[str, dict[str, np.ndarray]]], config: dict[str, Any]) -> None:
    """Write files of tensors, one after another, their index if there is one, and `config.json`."""
    from safetensors.numpy import save_file

    places, total = dict[str, str](), 0
    for file, tensors in files:
        # transformers rejects files that do not name the framework of their layout.
        save_file(tensors, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
        del tensors  # before the next are made
    contents = {"config.json": config}
    if SINGLE_FILE not in places.values():
        contents[INDEX_FILE] = {"metadata": {"total_size": total}, "weight_map": places}
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
