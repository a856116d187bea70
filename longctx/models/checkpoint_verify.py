"""Checks of a whole checkpoint directory or GGUF file: weights and tokenizer; and fingerprints of files."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from longctx.kernels.fp8 import E4M3
from longctx.models.chat_template import module_process
from longctx.models.checkpoint import tensor_problems
from longctx.models.config import LlamaConfig
from longctx.models.gguf import GgufReader
from longctx.models.gguf_config import config_from_gguf
from longctx.models.hf_names import SCALE_SUFFIX
from longctx.models.safetensors_reader import CheckpointError, SafetensorsReader, TensorReader, list_tensors
from longctx.models.validation import check_directory, is_file, is_gguf, shown

Progress = Callable[[int, int], None]
"""Called with the number of tensors that are read, and of all."""


def verify(directory: str | os.PathLike[str], progress: Progress | None = None) -> list[str]:
    """Check all files of a checkpoint, or a GGUF file, and read all weights once (a part of at most 64 MiB at a time).

    It checks what `load_checkpoint` and `load_tokenizer` check, and goes on after the first problem: config, index,
    headers, and every tensor's name, shape, dtype and place. Beyond that it looks for weights that are NaN or infinite,
    for token ids without an embedding, and renders the chat template.

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
      >>> [problem.split(",")[0] for problem in verify("broken")]
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
    return [" ".join(problem.split()) for problem in problems]


def _gguf_problems(path: Path, progress: Progress | None) -> Iterator[str]:
    config = None
    try:
        reader = GgufReader(path)
    except CheckpointError as error:
        yield str(error)
        return
    try:
        config = config_from_gguf(reader)
        yield from map(str, tensor_problems(reader, config))
    except CheckpointError as error:
        yield str(error)
    yield from _all_value_problems(reader, progress)
    yield from tokenizer_problems(path, None if config is None else config.vocab_size)


def weight_problems(directory: Path, config: LlamaConfig | None, progress: Progress | None = None) -> Iterator[str]:
    """List what is wrong with the safetensors files; without a config, names and shapes are not checked."""
    tensors, broken = list_tensors(directory)
    yield from map(str, broken)
    reader = SafetensorsReader(directory, tensors)
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
    if reader.tensors[name].dtype not in reader.dtypes:
        return
    wrong = total = 0
    try:
        for block in reader.blocks(name):
            if name.endswith(SCALE_SUFFIX):
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


_PLACES, _BYTES = 64, 4096  # number and size of the samples that are read of a file of tensors
_WHOLE = 256 * 2**20  # the most bytes of a JSON file that are read


def checkpoint_fingerprint(directory: str | os.PathLike[str]) -> dict[str, str]:
    """A digest of each file of a checkpoint: all of a JSON file; size and 64 samples of files of tensors.

    The samples of a safetensors file have its header. A GGUF file is the only one of its checkpoint.

    Args:
      directory: a checkpoint directory, or a file `*.gguf`.

    Returns:
      By the name of each file, 16 hexadecimal digits of its digest, blake2b.

    Raises:
      FileNotFoundError: no such directory or GGUF file.
      ValueError: it cannot be read.

    Examples:
      >>> import shutil
      >>> from pathlib import Path
      >>> from longctx.models import checkpoint_fingerprint
      >>> from longctx.models.builtin import TINY  # the directory of a small model
      >>> _ = shutil.copytree(TINY, "copy")  # as if on another host
      >>> _ = Path("copy/config.json").write_text("{}")
      >>> here, there = checkpoint_fingerprint(TINY), checkpoint_fingerprint("copy")
      >>> [name for name in here if here[name] != there[name]]
      ['config.json']
    """
    directory = Path(directory)
    if is_gguf(directory):
        if not is_file(directory):
            raise FileNotFoundError(f"no such file: {directory}")
        return {directory.name: _digest(directory)}
    check_directory(directory)
    paths = sorted([*directory.glob("*.json"), *directory.glob("*.safetensors")])
    return {path.name: _digest(path) for path in paths if is_file(path)}


def _digest(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.blake2b(digest_size=8)
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= (_WHOLE if path.suffix == ".json" else _PLACES * _BYTES):
            digest.update(file.read())
        else:
            for place in range(_PLACES):  # the first sample holds the header
                file.seek(place * (size - _BYTES) // (_PLACES - 1))
                digest.update(file.read(_BYTES))
    return digest.hexdigest()


_MAX_SECONDS = 300


def tokenizer_problems(directory: Path, vocab_size: int | None) -> list[str]:
    """List what is wrong with the tokenizer of a directory or GGUF file, for a model of `vocab_size` (None: unknown).

    The check runs in a process of its own: a damaged `tokenizer.json` can make the `tokenizers` library abort it.
    """
    file = directory if is_gguf(directory) else directory / "tokenizer.json"
    process = module_process("longctx.models.tokenizer", str(directory), json.dumps(vocab_size))
    try:
        child = subprocess.run(**process, capture_output=True, timeout=_MAX_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"{file}: checking it takes more than {_MAX_SECONDS} seconds"]
    if child.returncode:
        return [f"{file}: reading it ended the process with status {child.returncode}"]
    return json.loads(child.stdout)
