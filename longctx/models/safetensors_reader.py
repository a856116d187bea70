"""Reads tensors of a checkpoint directory, after it has checked that they exist and are complete."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from longctx.models.validation import (
    MAX_JSON_BYTES,
    check_directory,
    check_integer,
    decode,
    is_file,
    parse_json,
    read_json,
    shown,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
STORED_DTYPES = frozenset(_DTYPES.values())
_E4M3 = "F8_E4M3"
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in _DTYPES.items()} | {_E4M3: 1}
_MAX_DIMENSIONS = 32
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
      broken/model.safetensors is truncated, or no safetensors file: its header is incomplete
    """


@dataclass(frozen=True)
class StoredTensor:
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

    def check(self, name: str, shape: tuple[int, ...]) -> np.dtype[Any]:
        """Check that the tensor exists, has this shape and a floating-point dtype, and return the dtype."""
        stored = self._check_shape(name, shape)
        allowed = {name: dtype for name, dtype in self.dtypes.items() if dtype in STORED_DTYPES}
        if stored.dtype not in allowed:
            own, kind = shown(self.stored_name(name)), shown(stored.dtype)
            raise CheckpointError(f"{stored.file}: tensor {own} is {kind}; only {', '.join(allowed)} are supported")
        return allowed[stored.dtype]

    def check_e4m3(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that the tensor exists, has this shape and is e4m3."""
        stored = self._check_shape(name, shape)
        if stored.dtype != _E4M3:
            raise CheckpointError(
                f"{stored.file}: tensor {shown(name)} is {shown(stored.dtype)}, by quantization_config it is {_E4M3}"
            )

    def check_scale(self, name: str, values: np.ndarray) -> None:
        """Check the values of a tensor of scales, which must be positive and finite."""
        wide = values.astype(np.float32)
        wrong = wide.size - int(np.count_nonzero((wide > 0) & (wide < np.inf)))
        if wrong:
            raise CheckpointError(
                f"{self.tensors[name].file}: tensor {shown(name)} has {wrong} scales of {wide.size} that are not "
                "positive and finite"
            )

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        own = shown(self.stored_name(name))
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory} has no tensor {own}")
        stored = self.tensors[name]
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.file}: tensor {own} has shape {stored.shape}, but {self.source} makes it {shape}"
            )
        return stored

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

    The constructor reads headers only, or takes the tensors that `list_tensors` found. Each read maps its tensor anew:
    `safetensors.safe_open` gives NumPy no e4m3 (0.8), and its errors do not name the tensor that is wrong.

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
    try:
        if is_file(single):
            return _read_header(single), []
        if not is_file(index):
            raise FileNotFoundError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        files = _read_index(index)
    except (FileNotFoundError, CheckpointError) as error:
        return {}, [error]
    except ValueError as error:
        return {}, [CheckpointError(str(error))]
    headers: dict[str, dict[str, StoredTensor]] = {}
    problems: list[FileNotFoundError | CheckpointError] = []
    for file in sorted(set(files.values())):
        try:
            if not os.path.isfile(directory / file):
                raise FileNotFoundError(f"{index} names {shown(file)}, which is not in {directory}")
            headers[file] = _read_header(directory / file)
        except (FileNotFoundError, CheckpointError) as error:
            problems.append(error)
    tensors = {}
    for name, file in files.items():
        if file in headers and name in headers[file]:
            tensors[name] = headers[file][name]
        elif file in headers:
            problems.append(CheckpointError(f"{index} puts tensor {shown(name)} in {file!r}, which does not have it"))
    return tensors, problems


def index_files(directory: Path) -> set[str]:
    """The names of the files beside it that a directory's index has; CheckpointError if it is none."""
    return set(_read_index(directory / INDEX_FILE).values())


def _read_index(path: Path) -> dict[str, str]:
    try:
        files = read_json(path).get("weight_map")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(files, dict):
        raise CheckpointError(f"{path} is not an index of safetensors files: it has no object weight_map")
    for name, file in files.items():
        if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", ".."):
            raise CheckpointError(
                f"{path} puts tensor {shown(name)} in {shown(file)}, which is not the name of a file beside it"
            )
    return files


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Parse the header ourselves, because the errors of safetensors do not name the truncated tensor.

    The format: a little-endian uint64 length, that much JSON, then the data, which tensors cover without gaps
    (https://huggingface.co/docs/safetensors).
    """
    try:
        with open(path, "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length = file.read(8)
            if length == _LFS_POINTER:
                raise CheckpointError(f"{path} is a Git LFS pointer; `git lfs pull` fetches the file")
            header_bytes = int.from_bytes(length, "little")
            if file_bytes < 8 or header_bytes > file_bytes - 8:
                raise CheckpointError(f"{path} is truncated, or no safetensors file: its header is incomplete")
            if header_bytes > MAX_JSON_BYTES:
                raise CheckpointError(f"{path}: its header has {header_bytes} bytes, the most is {MAX_JSON_BYTES}")
            header = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        entries = parse_json("its header", decode("its header", header))
    except ValueError as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from error
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path} is no safetensors file: __metadata__ must be an object of strings")
    tensors, places = {}, []
    for name, entry in entries.items():
        tensors[name], begin, end = _parse_entry(path, name, entry, 8 + header_bytes)
        places.append((begin, end, name))
    _check_places(path, sorted(places), file_bytes - 8 - header_bytes)
    return tensors


def _parse_entry(path: Path, name: str, entry: Any, data_begin: int) -> tuple[StoredTensor, int, int]:
    """A tensor, and where its bytes begin and end after the header."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
            raise TypeError(f"dtype is {shown(dtype)}, shape is {shown(shape)}")
        sizes = tuple(check_integer("shape", size, 0, 2**63) for size in shape)
        begin, end = (check_integer("data_offsets", place, 0, 2**63) for place in (begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no safetensors file: tensor {shown(name)}: {error!r}") from error
    if begin > end or (dtype in _ITEM_BYTES and end - begin != math.prod(sizes) * _ITEM_BYTES[dtype]):
        raise CheckpointError(
            f"{path}: tensor {shown(name)}, {dtype} of shape {sizes}, cannot have bytes {begin} to {end}"
        )
    return StoredTensor(path, dtype, sizes, data_begin + begin), begin, end


def _check_places(path: Path, places: list[tuple[int, int, str]], data_bytes: int) -> None:
    covered = 0
    for begin, end, name in places:
        if end > data_bytes:
            raise CheckpointError(f"{path} is truncated: tensor {shown(name)} is incomplete")
        if begin != covered:
            raise CheckpointError(
                f"{path}: tensor {shown(name)} begins at byte {begin}, the one before ends at {covered}"
            )
        covered = end
    if covered != data_bytes:
        raise CheckpointError(f"{path}: the last {data_bytes - covered} bytes belong to no tensor")
