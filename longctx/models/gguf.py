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
from collections.abc import Mapping
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
# Norms of Gemma: after attention, before and after the feed-forward.
_GEMMA_LAYERS = _LAYERS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA = "gemma3"
_OWN_TOP = {theirs: own for own, theirs in _TOP.items()}
# The weights of the architecture `llama` whose rows are permuted, and the keys of their numbers of heads.
_PERMUTED = {"q_proj.weight": "llama.attention.head_count", "k_proj.weight": "llama.attention.head_count_kv"}


class GgufReader(TensorReader):
    """Reads slices of the tensors of a GGUF file, dequantised, under their Hugging Face names.

    The constructor reads the header only, and raises as `read_header`.
    """

    dtypes = DTYPES
    source = "the metadata"

    def __init__(self, path: Path) -> None:
        self.directory = path
        self.metadata, tensors = read_header(path)
        self._is_gemma = self.metadata.get("general.architecture") == _GEMMA
        layers = _GEMMA_LAYERS if self._is_gemma else _LAYERS
        self._own_layers = {theirs: own for own, theirs in layers.items()}
        for name in tensors:
            own = self.stored_name(name)
            if own != name:  # it would be taken for that tensor
                raise CheckpointError(f"{path}: unexpected tensor {shown(name)}: GGUF calls it {own}")
        self._stored = {_hf_name(name, layers): tensor for name, tensor in tensors.items()}
        self.tensors = {name: tensor for name, tensor in self._stored.items() if name != ROPE_FREQUENCIES}
        self.rope_frequencies = self._stored.get(ROPE_FREQUENCIES)

    def stored_name(self, name: str) -> str:
        """llama.cpp's name of a tensor that has this Hugging Face name."""
        layer = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)", name)
        if layer and layer[2] in self._own_layers:
            return f"blk.{layer[1]}.{self._own_layers[layer[2]]}.{layer[3]}"
        return _OWN_TOP.get(name, name)

    def read(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        """Read the rows that hold a part of the tensor, and dequantise no more than the blocks that do."""
        own, tensor = self.stored_name(name), self._stored[name]
        if len(tensor.shape) == 1:
            values = self._rows(own, tensor, 0, 1, *(slices or (slice(None),)))[0]
            # llama.cpp's converter adds the 1 that norms of Gemma add to their weights.
            return values - 1 if self._is_gemma and name.endswith("norm.weight") else values
        inner = math.prod(tensor.shape[1:-1])  # rows of the file in one along the first axis
        begin, end = (inner * place for place in slices[0].indices(tensor.shape[0])[:2])
        head = self.rows_at_once(name)
        first, last = begin // head * head, -(-end // head) * head  # whole heads
        rows = self._rows(own, tensor, first, last, *slices[1:])
        if head > 1:
            # Row (pair, half) of a head of the file is row (half, pair) of Hugging Face's.
            rows = rows.reshape(-1, head // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        return rows[begin - first : end - first]

    def rows_at_once(self, name: str) -> int:
        """The number of rows that are permuted among themselves: those of a head, or 1."""
        metadata, heads_key = self.metadata, _PERMUTED.get(name.partition(".self_attn.")[2])
        if heads_key is None or metadata.get("general.architecture") != "llama":
            return 1
        num_rows = self._stored[name].shape[0]
        heads = metadata.get(heads_key, metadata.get("llama.attention.head_count"))
        if not isinstance(heads, int) or heads < 1 or num_rows % (2 * heads):
            raise CheckpointError(
                f"{self.directory}: tensor {shown(self.stored_name(name))} has {num_rows} rows, which {shown(heads)} "
                "heads of pairs do not divide"
            )
        return num_rows // heads

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


def _hf_name(name: str, layers: Mapping[str, str]) -> str:
    """The Hugging Face name of a tensor; a name that is not one of llama.cpp's stays."""
    layer = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)", name, re.ASCII)
    if layer and layer[2] in layers:
        return f"model.layers.{layer[1]}.{layers[layer[2]]}.{layer[3]}"
    return _TOP.get(name, name)


MAX_HEADER_BYTES = 256 * 2**20
"""Largest header that is read; that of a vocabulary of 256,000 tokens has some 20 MB."""

MAX_STRINGS = 2**22
"""Most strings of a list; 128,256 tokens have 280,147 merges."""

_MAX_DIMENSIONS = 4
_LFS_POINTER = b"version "
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    **{0: np.uint8, 1: np.int8, 2: np.uint16, 3: np.int16, 4: np.uint32, 5: np.int32, 6: np.float32, _BOOL: np.uint8},
    **{10: np.uint64, 11: np.int64, 12: np.float64},
}
_NUMBERS = {type: np.dtype(scalar).newbyteorder("<") for type, scalar in _SCALARS.items()}


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Read and check the metadata and the tensors of a GGUF file.

    Values are Python's, lists of numbers NumPy arrays; shapes have rows first.

    Raises:
      FileNotFoundError: no such file.
      CheckpointError: it is no GGUF file, is truncated, or contradicts itself; the message names the key or tensor.
      ValueError: the file cannot be read, or the `gguf` package is not installed.
    """
    if not is_file(path):
        raise FileNotFoundError(f"no such file: {path}")
    with extras.needed("gguf", "a GGUF file"):
        import gguf  # noqa: F401
    try:
        with path.open("rb") as file:
            cursor = _Cursor(path, file)
            num_tensors, num_keys = _read_start(cursor)
            metadata: dict[str, Any] = {}
            for i in range(num_keys):  # no more are read than the file has bytes
                key = cursor.string(f"the name of key {i}")
                if key in metadata:
                    raise CheckpointError(f"{path} has the key {shown(key)} twice")
                metadata[key] = _read_value(cursor, f"the value of {shown(key)}")
            tensors = _read_records(cursor, num_tensors)
            file_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment > 2**20 or alignment & (alignment - 1):
        raise CheckpointError(
            f"{path}: general.alignment must be a power of two, of 8 to {2**20}, got {shown(alignment)}"
        )
    return metadata, _place(tensors, cursor.position, file_bytes, alignment)


class _Cursor:
    """Takes bytes from the front of a file, and never more than the file, or a header, has."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file, self.position = path, file, 0
        self._end = min(os.fstat(file.fileno()).st_size, MAX_HEADER_BYTES)

    def take(self, count: int, what: str) -> bytes:
        """Take bytes; `what` they are stands in the error."""
        data = self._file.read(count) if self.position + count <= self._end else b""
        if len(data) != count:
            raise CheckpointError(
                f"{self.path} is truncated: {what} is incomplete (or its header has more than {MAX_HEADER_BYTES} bytes)"
            )
        self.position += count
        return data

    def uint32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def uint64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str) -> str:
        data = self.take(self.uint64(what), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8: {error}") from error


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """The numbers of tensors and of keys."""
    start = cursor.take(8, "its beginning")
    if start == _LFS_POINTER:
        raise CheckpointError(f"{cursor.path} is a Git LFS pointer; `git lfs pull` fetches the file")
    if start not in (b"GGUF\2\0\0\0", b"GGUF\3\0\0\0"):
        raise CheckpointError(f"{cursor.path} is no little-endian GGUF of version 2 or 3: it begins with {start!r}")
    return cursor.uint64("the number of tensors"), cursor.uint64("the number of keys")


def _read_value(cursor: _Cursor, what: str) -> Any:
    """A value, or an array of numbers or strings."""
    type, count = cursor.uint32(what), 1
    if is_array := type == _ARRAY:
        type, count = cursor.uint32(what), cursor.uint64(what)
    if type == _STRING:
        if count > MAX_STRINGS:
            raise CheckpointError(f"{cursor.path}: {what} has {count} strings, the most is {MAX_STRINGS}")
        strings = [cursor.string(what) for _ in range(count)]
        return strings if is_array else strings[0]
    if type not in _NUMBERS:
        raise CheckpointError(f"{cursor.path}: {what} has the unknown type {type}")
    numbers = np.frombuffer(cursor.take(count * _NUMBERS[type].itemsize, what), _NUMBERS[type])
    if is_array:
        return numbers
    return bool(numbers[0]) if type == _BOOL else numbers[0].item()


def _read_records(cursor: _Cursor, count: int) -> list[tuple[str, StoredTensor]]:
    """Names and tensors, whose bytes begin at offsets from an end of the header that is not known yet."""
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
        records[name] = StoredTensor(cursor.path, type, shape, offset)
    return sorted(records.items(), key=lambda record: record[1].begin)


def _place(
    records: list[tuple[str, StoredTensor]], header_bytes: int, file_bytes: int, alignment: int
) -> dict[str, StoredTensor]:
    """Check that the tensors lie one after another, aligned and inside the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    def align(position: int) -> int:
        return -(-position // alignment) * alignment

    end = data_begin = align(header_bytes)
    tensors = {}
    for name, (path, type, shape, offset) in records:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
        if 0 in shape or shape[-1] % block:
            raise CheckpointError(f"{path}: tensor {shown(name)}, {type}, cannot have shape {shape}")
        begin = data_begin + offset
        if begin != align(end):
            raise CheckpointError(
                f"{path}: tensor {shown(name)} begins at byte {begin}, the one before ends at {end} "
                f"(with alignment {alignment})"
            )
        end = begin + math.prod(shape) // block * block_bytes
        if end > file_bytes:
            raise CheckpointError(f"{path} is truncated: tensor {shown(name)} is incomplete")
        tensors[name] = StoredTensor(path, type, shape, begin)
    return tensors
