"""Reads the tensors of a GGUF file of llama.cpp under their Hugging Face names, dequantised.

The `gguf` package dequantises. llama.cpp's converter permutes the rows of q and k of the Llama architecture, because
its rotary embedding pairs neighbours; here that is undone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from longctx.models.gguf_header import GgufHeader, GgufTensor, read_header
from longctx.models.safetensors_reader import CheckpointError, StoredTensor
from longctx.models.validation import shown

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
_BLOCK_BYTES = 64 * 2**20


class GgufReader:
    """Reads slices of the tensors of a GGUF file; see `SafetensorsReader`, whose interface this is.

    The constructor reads the header only, or takes one that was read. Use it as a context manager.

    Raises:
      FileNotFoundError, CheckpointError, ValueError: as `read_header`.
    """

    def __init__(self, path: Path, header: GgufHeader | None = None) -> None:
        self.directory = path
        self.header = read_header(path) if header is None else header
        self._stored: dict[str, tuple[str, GgufTensor]] = {}
        for name, tensor in self.header.tensors.items():
            if own_name(name) != name:  # it would be taken for that tensor
                raise CheckpointError(f"{path}: unexpected tensor {shown(name)}: GGUF calls it {own_name(name)}")
            self._stored[hf_name(name)] = name, tensor
        self.tensors = {
            name: StoredTensor(path, own.type, own.shape)
            for name, (_, own) in self._stored.items()
            if name != ROPE_FREQUENCIES
        }

    def __enter__(self) -> GgufReader:
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing: no file is open between reads."""

    def check(self, name: str, shape: tuple[int, ...]) -> np.dtype[Any]:
        """Check that the tensor exists, has this shape and a supported type, and return the dtype it is read as."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory} has no tensor {shown(own_name(name))}")
        stored, own = self.tensors[name], shown(self._stored[name][0])
        if stored.shape != shape:
            raise CheckpointError(
                f"{self.directory}: tensor {own} has shape {stored.shape}, but the metadata makes it {shape}"
            )
        if stored.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.directory}: tensor {own} is {stored.dtype}; only {', '.join(DTYPES)} are supported"
            )
        return DTYPES[stored.dtype]

    def is_supported(self, name: str) -> bool:
        """Whether the tensor has a type that can be read."""
        return self.tensors[name].dtype in DTYPES

    def read(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        """Read a part of the tensor, from the rows that hold it, and dequantise no more than the blocks that do."""
        own, tensor = self._stored[name]
        if len(tensor.shape) == 1:
            return self._rows(own, tensor, 0, 1, *(slices or (slice(None),)))[0]
        begin, end, _ = slices[0].indices(math.prod(tensor.shape[:-1]))
        head = self._permuted_rows(own, tensor)
        first, last = begin // head * head, -(-end // head) * head  # whole heads
        rows = self._rows(own, tensor, first, last, *slices[1:])
        if head > 1:
            # Row (pair, half) of a head of the file is row (half, pair) of Hugging Face's.
            rows = rows.reshape(-1, head // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        return rows[begin - first : end - first]

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """Read the tensor, of a supported type, in parts of at most 64 MiB or one row (or head of q and k)."""
        own, tensor = self._stored[name]
        if len(tensor.shape) == 1:
            yield self.read(name, (slice(None),))
            return
        head = self._permuted_rows(own, tensor)
        row_bytes = tensor.shape[-1] * DTYPES[tensor.type].itemsize
        step = max(1, _BLOCK_BYTES // (row_bytes * head)) * head
        for begin in range(0, math.prod(tensor.shape[:-1]), step):
            yield self.read(name, (slice(begin, begin + step),))

    def _permuted_rows(self, own: str, tensor: GgufTensor) -> int:
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

    def _rows(self, own: str, tensor: GgufTensor, first: int, last: int, columns: slice = slice(None)) -> np.ndarray:
        """Rows `first` to `last`, of a tensor taken as a matrix, and a range of their columns."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        type = GGMLQuantizationType[tensor.type]
        block, block_bytes = GGML_QUANT_SIZES[type]
        width = tensor.shape[-1]
        begin, end, _ = columns.indices(width)
        row_bytes = width // block * block_bytes
        data = self._bytes(own, tensor.begin + first * row_bytes, (last - first) * row_bytes)
        first_block, last_block = begin // block, -(-end // block)
        part = data.reshape(last - first, row_bytes)[:, first_block * block_bytes : last_block * block_bytes]
        part = np.ascontiguousarray(part)
        dtype = _PLAIN.get(tensor.type)
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
