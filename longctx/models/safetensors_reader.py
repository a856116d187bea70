"""Reads tensors of a checkpoint directory, after it has checked that they exist and are complete."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
STORED_DTYPES = frozenset(_DTYPES.values())


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. The message names the file and the tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its file describes it; `dtype` is the name that safetensors uses."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class SafetensorsReader:
    """Reads slices of a directory's tensors, from one file or from several with an index.

    The constructor reads headers only. Use it as a context manager, which closes the files at the end.

    Raises:
      FileNotFoundError: the directory or a required file does not exist.
      CheckpointError: a file is truncated or no safetensors file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors = _list_tensors(directory)
        self._open_files: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open_files.clear()
        self._stack.close()

    def check(self, name: str, shape: tuple[int, ...]) -> np.dtype[Any]:
        """Check that the tensor exists, has this shape and a supported dtype, and return the dtype."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory} has no tensor {name!r}")
        stored = self.tensors[name]
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} has shape {stored.shape}, but config.json makes it {shape}"
            )
        if stored.dtype not in _DTYPES:
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} is {stored.dtype}; only {', '.join(_DTYPES)} are supported"
            )
        return _DTYPES[stored.dtype]

    def read(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        """Read a part of the tensor, and nothing else of it."""
        path = self.tensors[name].file
        try:
            if path not in self._open_files:
                self._open_files[path] = self._stack.enter_context(safe_open(path, framework="numpy"))
            return self._open_files[path].get_slice(name)[slices]
        except SafetensorError as error:
            raise CheckpointError(f"{path}: cannot read tensor {name!r}: {error}") from error


def _list_tensors(directory: Path) -> dict[str, StoredTensor]:
    if not directory.is_dir():
        raise FileNotFoundError(f"no such directory: {directory}")
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return _read_header(single)
    if not index.is_file():
        raise FileNotFoundError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    files = _read_index(index)
    headers = {}
    for file in sorted(set(files.values())):
        if not (directory / file).is_file():
            raise FileNotFoundError(f"{index} names {file!r}, which is not in {directory}")
        headers[file] = _read_header(directory / file)
    for name, file in files.items():
        if name not in headers[file]:
            raise CheckpointError(f"{index} puts tensor {name!r} in {file!r}, which does not have it")
    return {name: headers[file][name] for name, file in files.items()}


def _read_index(path: Path) -> dict[str, str]:
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files: {error!r}") from error


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Parse the header ourselves, because the error of safetensors does not name the truncated tensor.

    The format: a little-endian uint64 length, that much JSON, then the data
    (https://huggingface.co/docs/safetensors).
    """
    file_bytes = os.path.getsize(path)
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or header_bytes > file_bytes - 8:
            raise CheckpointError(f"{path} is truncated, or no safetensors file: its header is incomplete")
        header = file.read(header_bytes)
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        ends = {name: entry["data_offsets"][1] for name, entry in entries.items()}
        tensors = {name: StoredTensor(path, entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error!r}") from error
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if end > file_bytes - 8 - header_bytes:
            raise CheckpointError(f"{path} is truncated: tensor {name!r} is incomplete")
    return tensors
