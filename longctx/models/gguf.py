"""GGUF files of llama.cpp: a checked header, and tensors under their Hugging Face names, dequantised by `gguf`.

llama.cpp's converter permutes the rows of q and k of the Llama architecture, because its rotary embedding pairs
neighbours; here that is undone.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, number of tensors and of keys,
the keys with their values, a record for each tensor, and the tensors, each at a multiple of the alignment. The header
is read here, because `gguf.GGUFReader` (0.19) believes the counts that it finds: it never returns from an array of
2**40 numbers that is not there. For the header of a vocabulary of 128,256 tokens it takes 28 s and 620 MB, in place of
0.8 s and 30 MB.
"""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from longctx import extras
from longctx.models.safetensors_reader import CheckpointError, StoredTensor, TensorReader
from longctx.models.validation import is_file, shown

ROPE_FREQUENCIES = "rope_freqs.weight"
"""The tensor of factors that frequencies are divided by, which `gguf_config` reads."""

_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
_QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
DTYPES = _PLAIN | dict.fromkeys(_QUANTISED, np.dtype(np.float32))
"""The types that are read, and the dtype that they are read as."""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OWN_TOP = {theirs: own for own, theirs in _TOP.items()}
_OWN_LAYERS = {theirs: own for own, theirs in _LAYERS.items()}
# The architectures whose q and k are permuted, and the keys of their numbers of heads.
_PERMUTED = {"llama": {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}}


class GgufReader(TensorReader):
    """Reads slices of the tensors of a GGUF file, dequantised, under their Hugging Face names.

    The constructor reads the header only, or takes one that was read; it raises as `read_header`.
    """

    dtypes = DTYPES
    source = "the metadata"

    def __init__(self, path: Path, header: GgufHeader | None = None) -> None:
        self.directory = path
        self.header = read_header(path) if header is None else header
        self._stored: dict[str, tuple[str, StoredTensor]] = {}
        for name, tensor in self.header.tensors.items():
            if own_name(name) != name:  # it would be taken for that tensor
                raise CheckpointError(f"{path}: unexpected tensor {shown(name)}: GGUF calls it {own_name(name)}")
            self._stored[hf_name(name)] = name, tensor
        self.tensors = {name: own for name, (_, own) in self._stored.items() if name != ROPE_FREQUENCIES}

    def stored_name(self, name: str) -> str:
        return own_name(name)

    def read(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        """Read the rows that hold a part of the tensor, and dequantise no more than the blocks that do."""
        own, tensor = self._stored[name]
        if len(tensor.shape) == 1:
            return self._rows(own, tensor, 0, 1, *(slices or (slice(None),)))[0]
        inner = math.prod(tensor.shape[1:-1])  # rows of the file in one along the first axis
        begin, end = (inner * place for place in slices[0].indices(tensor.shape[0])[:2])
        head = self._permuted_rows(own, tensor)
        first, last = begin // head * head, -(-end // head) * head  # whole heads
        rows = self._rows(own, tensor, first, last, *slices[1:])
        if head > 1:
            # Row (pair, half) of a head of the file is row (half, pair) of Hugging Face's.
            rows = rows.reshape(-1, head // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        return rows[begin - first : end - first]

    def rows_at_once(self, name: str) -> int:
        return self._permuted_rows(*self._stored[name])

    def _permuted_rows(self, own: str, tensor: StoredTensor) -> int:
        """The number of rows that are permuted among themselves: those of a head, or 1."""
        architecture = self.header.metadata.get("general.architecture")
        kind = own.split(".")[2] if own.startswith("blk.") and own.count(".") == 3 else None
        heads_key = _PERMUTED.get(architecture, {}).get(kind) if isinstance(architecture, str) and kind else None
        if heads_key is None:
            return 1
        metadata = self.header.metadata
        heads = metadata.get(f"{architecture}.{heads_key}", metadata.get(f"{architecture}.attention.head_count"))
        if not isinstance(heads, int) or heads < 1 or tensor.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{self.directory}: tensor {shown(own)} has {tensor.shape[0]} rows, which {shown(heads)} heads of "
                "pairs do not divide"
            )
        return tensor.shape[0] // heads

    def _rows(self, own: str, tensor: StoredTensor, first: int, last: int, columns: slice = slice(None)) -> np.ndarray:
        """Rows `first` to `last`, of a tensor taken as a matrix, and a range of their columns."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        type = GGMLQuantizationType[tensor.dtype]
        block, block_bytes = GGML_QUANT_SIZES[type]
        width = tensor.shape[-1]
        begin, end, _ = columns.indices(width)
        row_bytes = width // block * block_bytes
        data = self._bytes(own, tensor.begin + first * row_bytes, (last - first) * row_bytes)
        first_block, last_block = begin // block, -(-end // block)
        part = data.reshape(last - first, row_bytes)[:, first_block * block_bytes : last_block * block_bytes]
        part = np.ascontiguousarray(part)
        dtype = _PLAIN.get(tensor.dtype)
        with np.errstate(all="ignore"):  # a block of any bytes; `verify` finds values that are not finite
            values = dequantize(part, type) if dtype is None else part.view(dtype)
        return values[:, begin - first_block * block : end - first_block * block]

    def _bytes(self, own: str, begin: int, count: int) -> np.ndarray:
        try:
            with self.directory.open("rb") as file:  # of its own, as several threads read
                file.seek(begin)
                data = np.fromfile(file, np.uint8, count)
        except (OSError, MemoryError) as error:
            raise CheckpointError(f"{self.directory}: cannot read tensor {shown(own)}: {error}") from error
        if data.size != count:
            raise CheckpointError(f"{self.directory}: tensor {shown(own)} has changed since its header was read")
        return data


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; a name that is not one of llama.cpp's stays."""
    layer = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)", name, re.ASCII)
    if layer and layer[2] in _LAYERS:
        return f"model.layers.{layer[1]}.{_LAYERS[layer[2]]}.{layer[3]}"
    return _TOP.get(name, name)


def own_name(name: str) -> str:
    """llama.cpp's name of a tensor that has this Hugging Face name."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)", name)
    if layer and layer[2] in _OWN_LAYERS:
        return f"blk.{layer[1]}.{_OWN_LAYERS[layer[2]]}.{layer[3]}"
    return _OWN_TOP.get(name, name)


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
class GgufHeader:
    """Metadata and tensors of a file. Values are Python's, lists of numbers NumPy arrays; shapes have rows first."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


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
) -> dict[str, StoredTensor]:
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
        tensors[name] = StoredTensor(path, type, shape, begin)
    return tensors


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
