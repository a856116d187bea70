"""Checks a checkpoint directory, or a GGUF file, whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from longctx.kernels.fp8 import E4M3
from longctx.models.checkpoint import TensorReader, tensor_problems
from longctx.models.checksums import checksum_problems
from longctx.models.config import LlamaConfig
from longctx.models.gguf import GgufReader
from longctx.models.gguf_config import config_from_gguf
from longctx.models.gguf_header import require_gguf
from longctx.models.hf_names import SCALE_SUFFIX
from longctx.models.json_file import check_directory, is_gguf
from longctx.models.safetensors_reader import CheckpointError, SafetensorsReader, list_tensors
from longctx.models.tokenizer_check import tokenizer_problems
from longctx.models.validation import shown

Progress = Callable[[int, int], None]
"""Called with the number of tensors that are read, and of all."""


def verify(directory: str | os.PathLike[str], progress: Progress | None = None) -> list[str]:
    """Check all files of a checkpoint, or a GGUF file, and read all weights once (a part of at most 64 MiB at a time).

    It checks what `load_checkpoint` and `load_tokenizer` check, and goes on after the first problem: config, index,
    headers, and every tensor's name, shape, dtype and place. Beyond that it looks for weights that are NaN or infinite,
    for token ids without an embedding, renders the chat template, and compares the SHA-256 sums that a directory has.

    Args:
      directory: a local directory as `save_pretrained` writes it, or a file `*.gguf`.
      progress: called with the number of tensors that are read, and of all. None: nothing is called.

    Returns:
      A line for each problem, which names the file; none: the checkpoint is sound.

    Raises:
      FileNotFoundError: no such directory or GGUF file.
      ValueError: it cannot be read, or the package that reads GGUF files is not installed.

    Examples:
      >>> from pathlib import Path
      >>> from longctx.models import load_checkpoint, save_checkpoint, verify
      >>> from longctx.models.builtin import TINY  # the directory of a small model
      >>> verify(TINY)  # sound
      []
      >>> save_checkpoint("broken", *load_checkpoint(TINY))
      >>> _ = Path("broken/model.safetensors").write_bytes(Path("broken/model.safetensors").read_bytes()[:-1])
      >>> [problem.partition(":")[0] for problem in verify("broken")]
      ['broken/model.safetensors is truncated', 'broken has no tokenizer.json (other tokenizer formats are not read)']
    """
    directory = Path(directory)
    if is_gguf(directory):
        return [" ".join(problem.split()) for problem in _gguf_problems(directory, progress)]
    check_directory(directory)
    config, problems = None, []
    try:
        config = LlamaConfig.from_hf(directory / "config.json")
    except (FileNotFoundError, ValueError) as error:
        problems.append(str(error))
    problems += weight_problems(directory, config, progress)
    problems += tokenizer_problems(directory, None if config is None else config.vocab_size)
    problems += checksum_problems(directory)
    return [" ".join(problem.split()) for problem in problems]


def _gguf_problems(path: Path, progress: Progress | None) -> Iterator[str]:
    require_gguf()
    config = None
    try:
        reader = GgufReader(path)
    except CheckpointError as error:
        yield str(error)
        return
    with reader:
        try:
            config = config_from_gguf(reader)
            yield from map(str, tensor_problems(reader, config))
        except CheckpointError as error:
            yield str(error)
        yield from _all_value_problems(reader, progress)
    yield from tokenizer_problems(path, None if config is None else config.vocab_size)


def weight_problems(directory: Path, config: LlamaConfig | None, progress: Progress | None = None) -> Iterator[str]:
    """What is wrong with the safetensors files; with no config, the names and shapes of tensors are not checked."""
    tensors, broken = list_tensors(directory)
    yield from map(str, broken)
    with SafetensorsReader(directory, tensors) as reader:
        if config is not None and not broken:  # the tensors of a broken file would all be missing
            try:
                yield from map(str, tensor_problems(reader, config))
            except CheckpointError as error:
                yield str(error)
        yield from _all_value_problems(reader, progress)


def _all_value_problems(reader: TensorReader, progress: Progress | None) -> Iterator[str]:
    for done, name in enumerate(reader.tensors, 1):
        yield from _value_problems(reader, name)
        if progress is not None:
            progress(done, len(reader.tensors))


def _value_problems(reader: TensorReader, name: str) -> Iterator[str]:
    if not reader.is_supported(name):
        return
    wrong = total = 0
    try:
        for block in reader.blocks(name):
            if isinstance(reader, SafetensorsReader) and name.endswith(SCALE_SUFFIX):
                reader.check_scale(name, block)
            if block.dtype == np.uint8:
                block = block.view(E4M3)
            wrong += block.size - int(np.count_nonzero(np.isfinite(block)))
            total += block.size
    except CheckpointError as error:
        yield str(error)
    if wrong:
        file = reader.tensors[name].file
        yield f"{file}: tensor {shown(name)} has {wrong} values of {total} that are NaN or infinite"
