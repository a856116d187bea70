"""Reads the header of a GGUF file: its metadata, and the type, shape and place of each tensor.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, number of tensors and of keys,
the keys with their values, a record for each tensor, and the tensors, each at a multiple of the alignment. The reader
of the `gguf` package believes all sizes and counts that it finds; this one compares them with the file.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from longctx import extras
from longctx.models.json_file import is_file
from longctx.models.safetensors_reader import CheckpointError
from longctx.models.validation import shown

MAX_HEADER_BYTES = 256 * 2**20
"""Largest header that is read; that of a vocabulary of 256,000 tokens has some 20 MB."""

MAX_STRINGS = 2**22
"""Most strings of a list; 128,256 tokens have 280,147 merges."""

_MAX_DIMENSIONS = 4
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_LFS_POINTER = b"version "
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    **{0: np.uint8, 1: np.int8, 2: np.uint16, 3: np.int16, 4: np.uint32, 5: np.int32, 6: np.float32, _BOOL: np.uint8},
    **{10: np.uint64, 11: np.int64, 12: np.float64},
}
_NUMBERS = {type: np.dtype(scalar).newbyteorder("<") for type, scalar in _SCALARS.items()}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    `type` is ggml's name of its type, `shape` has rows first, as Hugging Face's, and `begin` is the place of its first
    byte in the file.
    """

    type: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of a file. Values are Python's, lists of numbers are numpy arrays."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def require_gguf() -> None:
    """Raise MissingExtra, a ValueError, if the `gguf` package, which dequantises, is not installed."""
    with extras.needed("gguf", "a GGUF file"):
        import gguf  # noqa: F401


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file.

    Raises:
      FileNotFoundError: no such file.
      CheckpointError: it is no GGUF file, is truncated, or contradicts itself; the message names the key or tensor.
      ValueError: the file cannot be read, or the `gguf` package is not installed.
    """
    if not is_file(path):
        raise FileNotFoundError(f"no such file: {path}")
    require_gguf()
    try:
        with path.open("rb") as file:
            cursor = _Cursor(path, file)
            num_tensors, num_keys = _read_start(cursor)
            metadata = _read_metadata(cursor, num_keys)
            records = _read_records(cursor, num_tensors)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment > 2**20 or alignment & (alignment - 1):
        raise CheckpointError(
            f"{path}: general.alignment must be a power of two, of 8 to {2**20}, got {shown(alignment)}"
        )
    return GgufHeader(path, metadata, _place(cursor, records, alignment))


class _Cursor:
    """Takes bytes from the front of a file, and never more than the file, or a header, has."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.file_bytes = os.fstat(file.fileno()).st_size
        self.position = 0

    def check(self, count: int, what: str) -> None:
        """Check that `count` more bytes may be taken; `what` they are stands in the error."""
        if self.position + count > self.file_bytes:
            raise CheckpointError(f"{self.path} is truncated: {what} is incomplete")
        if self.position + count > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.path}: its header has more than {MAX_HEADER_BYTES} bytes, at {what}")

    def take(self, count: int, what: str) -> bytes:
        self.check(count, what)
        data = self.file.read(count)
        if len(data) != count:
            raise CheckpointError(f"{self.path} is truncated: {what} is incomplete")
        self.position += count
        return data

    def uint32(self, what: str) -> int:
        return struct.unpack("<I", self.take(4, what))[0]

    def uint64(self, what: str) -> int:
        return struct.unpack("<Q", self.take(8, what))[0]

    def string(self, what: str) -> str:
        data = self.take(self.uint64(what), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8: {error}") from error


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """The numbers of tensors and of keys."""
    path = cursor.path
    start = cursor.file.read(8)
    cursor.position = len(start)
    if start == _LFS_POINTER:
        raise CheckpointError(f"{path} is a Git LFS pointer; `git lfs pull` fetches the file")
    if start[:4] != _MAGIC:
        raise CheckpointError(f"{path} is no GGUF file: it begins with {start[:4]!r}, not {_MAGIC!r}")
    if len(start) < 8:
        raise CheckpointError(f"{path} is truncated: its version is incomplete")
    version = struct.unpack("<I", start[4:])[0]
    if version not in _VERSIONS:
        swapped = struct.unpack(">I", start[4:])[0] in _VERSIONS
        reason = "it is big-endian" if swapped else f"its version is {version}"
        raise CheckpointError(f"{path}: {reason}; only little-endian GGUF of version 2 or 3 is supported")
    return cursor.uint64("the number of tensors"), cursor.uint64("the number of keys")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(count):  # no more are read than the file has bytes
        key = cursor.string(f"the name of key {i}")
        if key in metadata:
            raise CheckpointError(f"{cursor.path} has the key {shown(key)} twice")
        metadata[key] = _read_value(cursor, f"the value of {shown(key)}")
    return metadata


def _read_value(cursor: _Cursor, what: str) -> Any:
    type = cursor.uint32(what)
    if type == _STRING:
        return cursor.string(what)
    if type == _ARRAY:
        return _read_array(cursor, what)
    if type not in _NUMBERS:
        raise CheckpointError(f"{cursor.path}: {what} has the unknown type {type}")
    number = np.frombuffer(cursor.take(_NUMBERS[type].itemsize, what), _NUMBERS[type])[0].item()
    return bool(number) if type == _BOOL else number


def _read_array(cursor: _Cursor, what: str) -> Any:
    type, count = cursor.uint32(what), cursor.uint64(what)
    if type in _NUMBERS:
        return np.frombuffer(cursor.take(count * _NUMBERS[type].itemsize, what), _NUMBERS[type])
    if type != _STRING:
        raise CheckpointError(f"{cursor.path}: {what} is an array of type {type}; only numbers and strings are read")
    if count > MAX_STRINGS:
        raise CheckpointError(f"{cursor.path}: {what} has {count} strings, the most is {MAX_STRINGS}")
    cursor.check(8 * count, what)
    return [cursor.string(what) for _ in range(count)]


def _read_records(cursor: _Cursor, count: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """The type, shape and offset of each tensor."""
    from gguf import GGMLQuantizationType

    records = {}
    for i in range(count):
        name = cursor.string(f"the name of tensor {i}")
        what = f"the record of tensor {shown(name)}"
        if name in records:
            raise CheckpointError(f"{cursor.path} has the tensor {shown(name)} twice")
        dimensions = cursor.uint32(what)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(
                f"{cursor.path}: tensor {shown(name)} must have 1 to {_MAX_DIMENSIONS} axes, got {dimensions}"
            )
        shape = tuple(cursor.uint64(what) for _ in range(dimensions))[::-1]
        number, offset = cursor.uint32(what), cursor.uint64(what)
        try:
            type = GGMLQuantizationType(number).name
        except ValueError:
            raise CheckpointError(f"{cursor.path}: tensor {shown(name)} has the unknown type {number}") from None
        records[name] = (type, shape, offset)
    return records


def _place(
    cursor: _Cursor, records: dict[str, tuple[str, tuple[int, ...], int]], alignment: int
) -> dict[str, GgufTensor]:
    """Check that the tensors lie one after another, aligned and inside the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    path = cursor.path
    data_begin = _align(cursor.position, alignment)
    end = data_begin
    tensors = {}
    for name, (type, shape, offset) in sorted(records.items(), key=lambda item: item[1][2]):
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
        if 0 in shape or shape[-1] % block:
            raise CheckpointError(f"{path}: tensor {shown(name)}, {type}, cannot have shape {shape}")
        begin, num_bytes = data_begin + offset, math.prod(shape) // block * block_bytes
        if begin != _align(end, alignment):
            raise CheckpointError(
                f"{path}: tensor {shown(name)} begins at byte {begin}, the one before ends at {end} "
                f"(with alignment {alignment})"
            )
        end = begin + num_bytes
        if end > cursor.file_bytes:
            raise CheckpointError(f"{path} is truncated: tensor {shown(name)} is incomplete")
        tensors[name] = GgufTensor(type, shape, begin, num_bytes)
    return tensors


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
