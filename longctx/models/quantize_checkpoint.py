"""Writes a checkpoint with FP8 row-wise weights from one without."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from longctx.kernels.fp8 import E4M3, quantize_rows
from longctx.models.checkpoint import tensor_problems
from longctx.models.checkpoint_save import STAGING, replacing_files, write_files
from longctx.models.config import LlamaConfig
from longctx.models.hf_names import SCALE_SUFFIX, layouts
from longctx.models.quantization_config import RowwiseFp8, quantization_to_hf
from longctx.models.safetensors_reader import CheckpointError, SafetensorsReader
from longctx.models.validation import check_directory, is_file, is_gguf, read_json, shown

# Files beside the weights that a model needs to be served, as transformers names them.
_COPIED = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
)

Progress = Callable[[int, int], None]
"""Called with the number of tensors that are written, and of all."""


def quantize_checkpoint(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    modules: str = "ffn",
    progress: Progress | None = None,
) -> None:
    """Quantise a checkpoint's weights to e4m3 with a scale an output row, and write it in the form fbgemm_fp8.

    Each file of weights becomes one of the same name; peak memory is one of them as written, and one tensor. Other
    tensors keep their bytes. Tokenizer, chat template and generation settings are copied.

    Args:
      directory: what `load_checkpoint` reads, but no GGUF file.
      out: a directory that is empty or does not exist. What a killed call left there is removed.
      modules: `"ffn"`, the feed-forward of all layers but the first and the last; `"all"`, all projections.
      progress: called with the number of tensors that are written, and of all. None: nothing is called.

    Raises:
      FileNotFoundError, ValueError, CheckpointError: as `load_checkpoint`; or the model is quantised already, nothing
        of it would be, `out` is not empty, or a weight is not finite.

    Source:
      Context parallelism paper, 4.1 (row-wise FP8 weights of the feed-forward).

    Examples:
      >>> from longctx.models import load_checkpoint, quantize_checkpoint
      >>> from longctx.models.builtin import TINY  # the directory of a small model
      >>> quantize_checkpoint(TINY, "tiny-fp8")
      >>> model, params = load_checkpoint("tiny-fp8")
      >>> model.config.quantization.layers
      ((), ('w_gate', 'w_up', 'w_down'), ('w_gate', 'w_up', 'w_down'), ())
    """
    directory, out = Path(directory), Path(out)
    if is_gguf(directory) and is_file(directory):
        raise ValueError(f"{directory} is a GGUF file: only a checkpoint in safetensors files can be quantised")
    check_directory(directory)
    config = LlamaConfig.from_hf(directory / "config.json")
    if config.quantization is not None:
        raise ValueError(f"{directory} is quantised already")
    quantization = RowwiseFp8.of(config.num_layers, modules)
    if not any(quantization.layers):
        raise ValueError(
            f"{directory} has {config.num_layers} layers: no feed-forward is between the first and the last"
        )
    if out.exists() and (not out.is_dir() or {*out.iterdir()} - {out / STAGING}):
        raise ValueError(f"{out} must be a directory that is empty or does not exist")
    chosen = _weights(dataclasses.replace(config, quantization=quantization))
    reader = SafetensorsReader(directory)
    for problem in tensor_problems(reader, config, reads_values=False):
        raise problem
    config_json = read_json(directory / "config.json") | {"quantization_config": quantization_to_hf(quantization)}
    with replacing_files(out) as staging:
        write_files(staging, _quantized_files(reader, chosen, progress), config_json)
        for name in _COPIED:
            if (directory / name).is_file():
                shutil.copyfile(directory / name, staging / name)


def _weights(config: LlamaConfig) -> set[str]:
    """The names of the weights that a configuration quantises."""
    return {name for layout in jax.tree.leaves(layouts(config)) if layout.is_e4m3 for name in layout.names}


def _quantized_files(
    reader: SafetensorsReader, chosen: set[str], progress: Progress | None
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The names of files, and their tensors, of which those that are chosen are quantised."""
    names_of, done = dict[str, list[str]](), itertools.count(1)
    for name, stored in reader.tensors.items():
        names_of.setdefault(stored.file.name, []).append(name)

    def read(name: str) -> dict[str, np.ndarray]:
        whole = (slice(None),) * len(reader.tensors[name].shape)
        tensors = _quantized(reader, name) if name in chosen else {name: reader.read(name, whole)}
        if progress is not None:
            progress(next(done), len(reader.tensors))
        return tensors

    for file, names in names_of.items():
        yield file, {name: tensor for own in names for name, tensor in read(own).items()}


def _quantized(reader: SafetensorsReader, name: str) -> dict[str, np.ndarray]:
    """A weight `[outputs, inputs]` as e4m3, and its scales `[outputs, 1]`."""
    values: list[np.ndarray] = []
    scales: list[np.ndarray] = []
    for block in reader.blocks(name):
        if not np.isfinite(block).all():
            file = reader.tensors[name].file
            raise CheckpointError(f"{file}: tensor {shown(name)} has values that are NaN or infinite")
        for parts, part in zip((values, scales), _quantize(block), strict=True):
            parts.append(np.asarray(part))
    return {name: np.concatenate(values).view(E4M3), name + SCALE_SUFFIX: np.concatenate(scales)[:, None]}


_quantize = jax.jit(quantize_rows)
