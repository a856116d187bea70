"""Reads tensors of a checkpoint directory, after it has checked that they exist and are complete."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from longctx.models.validation import check_directory, is_file, read_json, shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
STORED_DTYPES = frozenset(_DTYPES.values())
_E4M3 = "F8_E4M3"
_LFS_POINTER = b"version "  # the first 8 bytes of the text that git has where LFS has the file
_BLOCK_BYTES = 64 * 2**20  # `TensorReader.blocks` reads at most so much at a time


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. The message names the file and the tensor.

    Examples:
      >>> from pathlib import Path
      >>> from longctx.models import CheckpointError, load_checkpoint, save_checkpoint
      >>> from longctx.models.builtin import TINY
      >>> save_checkpoint("broken", *load_checkpoint(TINY))
      >>> _ = Path("broken/model.safetensors").write_bytes(b"")
      >>> try:
      ...     load_checkpoint("broken")
      ... except CheckpointError as error:
      ...     print(error)
      broken/model.safetensors is truncated, or no safetensors file: Error while deserializing header: header too small
    """


class StoredTensor(NamedTuple):
    """Tensor as the header of its file describes it.

    `dtype` is the name that the format uses; `begin` is where its bytes begin in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0


class TensorReader:
    """Base of readers of a checkpoint's tensors, by their Hugging Face names.

    Attributes:
      directory: of the checkpoint, or its file.
      tensors: by name.
      dtypes: the types that `read` takes, and the dtype that it gives.
      source: what says which shapes tensors have.
    """

    directory: Path
    tensors: dict[str, StoredTensor]
    dtypes: Mapping[str, np.dtype[Any]]
    source = "config.json"

    def read(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        """Read a part of the tensor, and nothing else of it; of an e4m3 tensor its bits."""
        raise NotImplementedError

    def stored_name(self, name: str) -> str:
        """The name of the tensor in its file."""
        return name

    def rows_at_once(self, name: str) -> int:
        """The number of rows of the tensor that can only be read together."""
        return 1

    def check(self, name: str, shape: tuple[int, ...], is_e4m3: bool = False) -> np.dtype[Any]:
        """Check that the tensor exists, has this shape, and is floating point or e4m3, and return the dtype."""
        own = shown(self.stored_name(name))
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory} has no tensor {own}")
        stored = self.tensors[name]
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.file}: tensor {own} has shape {stored.shape}, but {self.source} makes it {shape}"
            )
        allowed = [_E4M3] if is_e4m3 else [name for name, dtype in self.dtypes.items() if dtype in STORED_DTYPES]
        if stored.dtype not in allowed:
            raise CheckpointError(
                f"{stored.file}: tensor {own} is {stored.dtype}, by {self.source} it must be {', '.join(allowed)}"
            )
        return self.dtypes[stored.dtype]

    def check_scale(self, name: str, values: np.ndarray) -> None:
        """Check the values of a tensor of scales, which must be positive and finite."""
        wide = values.astype(np.float32)
        wrong = wide.size - int(np.count_nonzero((wide > 0) & (wide < np.inf)))
        if wrong:
            raise CheckpointError(
                f"{self.tensors[name].file}: tensor {shown(name)} has {wrong} scales of {wide.size} that are not "
                "positive and finite"
            )

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """Read the tensor, of a supported dtype, in parts of at most 64 MiB or of the fewest rows that can be read."""
        stored = self.tensors[name]
        if not stored.shape:
            yield self.read(name, ())
        if not stored.shape or 0 in stored.shape:
            return
        together, rest = self.rows_at_once(name), stored.shape[1:]
        step = max(1, _BLOCK_BYTES // (math.prod(rest) * self.dtypes[stored.dtype].itemsize * together)) * together
        for begin in range(0, stored.shape[0], step):
            yield self.read(name, (slice(begin, min(begin + step, stored.shape[0])),))


class SafetensorsReader(TensorReader):
    """Reads slices of a directory's tensors, from one file or from several with an index.

    The constructor reads headers only, or takes the tensors that `list_tensors` found. Each read maps its tensor anew,
    as `safetensors.safe_open` (0.8) gives NumPy no e4m3, and copies while it holds Python's lock.

    Raises:
      FileNotFoundError: the directory or a required file does not exist.
      CheckpointError: a file is truncated or no safetensors file.
    """

    dtypes = _DTYPES | {_E4M3: np.dtype(np.uint8)}

    def __init__(self, directory: Path, tensors: dict[str, StoredTensor] | None = None) -> None:
        self.directory = directory
        if tensors is None:
            tensors, problems = list_tensors(directory)
            if problems:
                raise problems[0]
        self.tensors = tensors
        self._stamps = {stored.file: _stamp(stored.file) for stored in tensors.values()}

    def read(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        stored = self.tensors[name]
        try:
            if _stamp(stored.file) != self._stamps[stored.file]:
                raise CheckpointError(f"{stored.file}: tensor {shown(name)} has changed since its header was read")
            # Numpy copies without Python's lock.
            dtype = self.dtypes[stored.dtype]
            bits = np.dtype(f"u{dtype.itemsize}")
            values = np.array(np.memmap(stored.file, bits, "r", stored.begin, stored.shape or (1,))[slices])
            return values.view(dtype).reshape(values.shape if stored.shape else ())
        except CheckpointError:
            raise
        except (OSError, MemoryError, ValueError) as error:  # ValueError: a file cut off since
            raise CheckpointError(f"{stored.file}: cannot read tensor {shown(name)}: {error}") from error


def _stamp(path: Path) -> tuple[int, int, int]:
    """Numbers that are others after a file has changed."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def list_tensors(directory: Path) -> tuple[dict[str, StoredTensor], list[FileNotFoundError | CheckpointError]]:
    """The tensors of a directory by name, and every problem of its files; with none, these tensors can be read."""
    check_directory(directory)
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    problems: list[FileNotFoundError | CheckpointError] = []
    headers: dict[str, dict[str, StoredTensor]] = {}
    try:
        if is_file(single):
            return _read_header(single), []
        if not is_file(index):
            raise FileNotFoundError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        files = read_index(index)
    except (FileNotFoundError, ValueError) as error:
        return {}, [error if isinstance(error, FileNotFoundError | CheckpointError) else CheckpointError(str(error))]
    for file in sorted(set(files.values())):
        try:
            if not os.path.isfile(directory / file):
                raise FileNotFoundError(f"{index} names {shown(file)}, which is not in {directory}")
            headers[file] = _read_header(directory / file)
        except (FileNotFoundError, CheckpointError) as error:
            problems.append(error)
    tensors = {}
    for name, file in files.items():
        if name in headers.get(file, ()):
            tensors[name] = headers[file][name]
        elif file in headers:
            problems.append(CheckpointError(f"{index} puts tensor {shown(name)} in {file!r}, which does not have it"))
    return tensors, problems


def read_index(path: Path) -> dict[str, str]:
    """Read the files of tensors by their names; raise CheckpointError if one is not the name of a file beside it."""
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path} is not an index of safetensors files: it has no object weight_map")
    for name, file in files.items():
        if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", ".."):
            raise CheckpointError(
                f"{path} puts tensor {shown(name)} in {shown(file)}, which is not the name of a file beside it"
            )
    return files


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a file, once `safetensors` has checked its header and that they cover the rest."""
    from safetensors import SafetensorError, safe_open

    try:
        with open(path, "rb") as file:
            start = file.read(8)
            if start == _LFS_POINTER:
                raise CheckpointError(f"{path} is a Git LFS pointer; `git lfs pull` fetches the file")
            with safe_open(path, "numpy"):
                length = int.from_bytes(start, "little")
            entries = json.loads(file.read(length))
    except SafetensorError as error:
        raise CheckpointError(f"{path} is truncated, or no safetensors file: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    entries.pop("__metadata__", None)
    return {
        name: StoredTensor(path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in entries.items()
    }
