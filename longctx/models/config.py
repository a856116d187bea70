"""The shape of a Llama: `LlamaConfig`, and the published sizes by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longctx.annotations import Real
from longctx.models.quantization_config import RowwiseFp8
from longctx.models.rope_config import Llama3Scaling, RopeConfig
from longctx.models.validation import (
    MAX_INT32,
    MAX_LAYERS,
    check_bool,
    check_integer,
    check_real,
    check_token_ids,
    shown,
)

# The largest sizes that are accepted, far above those of published models: a file must not ask for endless work.
_LIMITS = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_layers": MAX_LAYERS,
    "num_heads": 2**14,
    "num_kv_heads": 2**14,
    "head_dim": 2**12,
    "max_positions": MAX_INT32,
}


@dataclass(frozen=True)
class LlamaConfig:
    """The configuration of a Llama, Mistral, Qwen2.5 or Qwen3 decoder. Hashable, so it can be static under jit.

    Attributes:
      vocab_size: token ids, 0 to `vocab_size` - 1.
      hidden_size: D, of a token's hidden state.
      intermediate_size: of the feed-forward.
      num_layers: how many.
      num_heads, num_kv_heads: N query heads and K key heads, N a multiple of K.
      head_dim: H, even.
      rope: the frequencies of the rotary embedding.
      norm_eps: what RMS norms add to the mean square.
      tie_embeddings: whether the embedding is the output head too.
      qkv_bias: whether queries, keys and values have biases, as in Qwen2.5.
      qk_norm: whether each head's queries and keys have an RMS norm, as in Qwen3.
      max_positions: tokens of the longest sequence that the model accepts.
      bos_id: the token that begins a text. None: there is none.
      eos_ids: tokens each of which ends a generation.
      quantization: which weights are FP8 (docs/fp8.md). None: no one.

    Raises:
      TypeError, ValueError: a value is of a wrong type or out of range; the message names it.

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> LlamaConfig.preset("llama-3.1-8b").num_kv_heads
      8
      >>> sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2}
      >>> small = LlamaConfig(**sizes, num_heads=4, num_kv_heads=2, head_dim=16)
      >>> LlamaConfig.from_hf(small.to_hf()) == small  # the contents of a config.json
      True
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_eps: Real = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 8192
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    quantization: RowwiseFp8 | None = None

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            check_integer(name, getattr(self, name), 1, limit)
        check_real("norm_eps", self.norm_eps, 1e-30, 1.0)  # in float32 less would be 0, which makes NaN
        check_bool("tie_embeddings", self.tie_embeddings)
        check_bool("qkv_bias", self.qkv_bias)
        check_bool("qk_norm", self.qk_norm)
        if self.qkv_bias and self.qk_norm:
            raise ValueError("qkv_bias and qk_norm can't both be true: no supported architecture has both")
        check_token_ids("eos_ids", self.eos_ids, self.vocab_size)
        if self.bos_id is not None:
            check_integer("bos_id", self.bos_id, 0, self.vocab_size - 1)
        if not isinstance(self.quantization, RowwiseFp8 | None):
            raise TypeError(f"quantization must be a RowwiseFp8 or None, got {shown(self.quantization)}")
        if self.quantization is not None and len(self.quantization.layers) != self.num_layers:
            raise ValueError(f"quantization is of {len(self.quantization.layers)} layers, num_layers {self.num_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")

    @staticmethod
    def from_hf(source: Mapping[str, Any] | str | os.PathLike[str]) -> LlamaConfig:
        """Read a Hugging Face `config.json`, given as its path or its contents.

        Returns:
          The configuration, with the defaults of transformers for what the file leaves out.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is no JSON object, lacks a key, or has a setting that this library does not support; the
            message names the key.
        """
        from longctx.models.hf_config import config_from_hf

        return config_from_hf(source)

    def to_hf(self) -> dict[str, Any]:
        """The contents of a `config.json` that `from_hf` and every version of transformers read."""
        from longctx.models.hf_config import config_to_hf

        return config_to_hf(self)

    @staticmethod
    def preset(name: str) -> LlamaConfig:
        """The configuration of a published model: `llama-3-8b`, `qwen3-32b` and so on.

        Raises:
          ValueError: no such preset; the message lists them.
        """
        if name not in PRESETS:
            raise ValueError(f"no preset named {name!r}; there are: {', '.join(PRESETS)}")
        return PRESETS[name]


def _llama2(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        max_positions=4096,
        bos_id=1,
        eos_ids=(2,),
    )


def _llama3(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    head_dim: int = 128,
    stretch: Real | None = None,
    tied: bool = False,
) -> LlamaConfig:
    """Llama 3 (`stretch` None, 8k tokens), or 3.1 to 3.3 (rotary embedding stretched to 128k tokens)."""
    scaling = None if stretch is None else Llama3Scaling(stretch, 1.0, 4.0, 8192)
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        rope=RopeConfig(500000.0, scaling),
        tie_embeddings=tied,
        max_positions=8192 if stretch is None else 131072,
        bos_id=128000,
        eos_ids=(128001, 128009) if stretch is None else (128001, 128008, 128009),
    )


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rope=RopeConfig(1000000.0),
        norm_eps=1e-6,
        tie_embeddings=tied,
        qk_norm=True,
        max_positions=40960,
        bos_id=151643,
        eos_ids=(151645, 151643),
    )


PRESETS: dict[str, LlamaConfig] = {
    "llama-2-7b": _llama2(32, 4096, 11008, 32, 32),
    "llama-2-13b": _llama2(40, 5120, 13824, 40, 40),
    "llama-2-70b": _llama2(80, 8192, 28672, 64, 8),
    "llama-3-8b": _llama3(32, 4096, 14336, 32),
    "llama-3-70b": _llama3(80, 8192, 28672, 64),
    "llama-3.1-8b": _llama3(32, 4096, 14336, 32, stretch=8.0),
    "llama-3.1-70b": _llama3(80, 8192, 28672, 64, stretch=8.0),
    "llama-3.1-405b": _llama3(126, 16384, 53248, 128, stretch=8.0),
    "llama-3.2-1b": _llama3(16, 2048, 8192, 32, head_dim=64, stretch=32.0, tied=True),
    "llama-3.2-3b": _llama3(28, 3072, 8192, 24, stretch=32.0, tied=True),
    "llama-3.3-70b": _llama3(80, 8192, 28672, 64, stretch=8.0),
    "mistral-7b-v0.3": LlamaConfig(
        32768, 4096, 14336, 32, 32, 8, 128, RopeConfig(1000000.0), max_positions=32768, bos_id=1, eos_ids=(2,)
    ),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
}
