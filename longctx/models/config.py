"""The shape of a Llama: `LlamaConfig`, and the published sizes by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longctx.models.rope_config import Llama3Scaling, RopeConfig


@dataclass(frozen=True)
class LlamaConfig:
    """The configuration of a Llama 3 decoder, or of Qwen2.5 (`qkv_bias=True`). Hashable, so it can be static under jit.

    `max_positions` is the longest sequence that the model accepts; each of `eos_ids` ends a generation.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    max_positions: int = 8192
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")

    @staticmethod
    def from_hf(source: Mapping[str, Any] | str | os.PathLike[str]) -> LlamaConfig:
        """Read a Hugging Face `config.json`, given as its path or its contents.

        Raises:
          ValueError: it has a setting that this library does not support; the message names the key.
        """
        from longctx.models.hf_config import config_from_hf

        return config_from_hf(source)

    def to_hf(self) -> dict[str, Any]:
        """The contents of a `config.json` that `from_hf` and every version of transformers read."""
        from longctx.models.hf_config import config_to_hf

        return config_to_hf(self)

    @staticmethod
    def preset(name: str) -> LlamaConfig:
        """The configuration of a published model: `llama-3-8b`, `llama-3.1-405b` and so on.

        Raises:
          ValueError: no such preset; the message lists them.
        """
        if name not in PRESETS:
            raise ValueError(f"no preset named {name!r}; there are: {', '.join(PRESETS)}")
        return PRESETS[name]


def _llama3(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    head_dim: int = 128,
    stretch: float | None = None,
    tied: bool = False,
) -> LlamaConfig:
    """Llama 3 (`stretch` None, 8k tokens), or 3.1 and 3.2 (rotary embedding stretched to 128k tokens)."""
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


PRESETS: dict[str, LlamaConfig] = {
    "llama-3-8b": _llama3(32, 4096, 14336, 32),
    "llama-3-70b": _llama3(80, 8192, 28672, 64),
    "llama-3.1-8b": _llama3(32, 4096, 14336, 32, stretch=8.0),
    "llama-3.1-70b": _llama3(80, 8192, 28672, 64, stretch=8.0),
    "llama-3.1-405b": _llama3(126, 16384, 53248, 128, stretch=8.0),
    "llama-3.2-1b": _llama3(16, 2048, 8192, 32, head_dim=64, stretch=32.0, tied=True),
    "llama-3.2-3b": _llama3(28, 3072, 8192, 24, stretch=32.0, tied=True),
}
