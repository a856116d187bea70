"""`LlamaConfig`, its conversion from and to Hugging Face's `config.json`, and the published sizes by name."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longctx.annotations import Real
from longctx.models.quantization_config import RowwiseFp8, quantization_from_hf, quantization_to_hf
from longctx.models.rope_config import HF_NAMES, Llama3Scaling, RopeConfig, YarnScaling, rope_from_hf, rope_to_hf
from longctx.models.validation import (
    MAX_INT32,
    MAX_LAYERS,
    check_bool,
    check_integer,
    check_real,
    check_token_ids,
    read_json,
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
      sliding_window: tokens that a query of a sliding layer sees, itself included. None: no layer is sliding.
      sliding_layers: whether each layer is sliding; by default all of them are in a model with a `sliding_window`.
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
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
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
        self._check_sliding()
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

    def _check_sliding(self) -> None:
        """Check the sliding layers, and fill in those of a model with a window that names none."""
        if not isinstance(self.sliding_layers, tuple):
            raise TypeError(f"sliding_layers must be a tuple, got {shown(self.sliding_layers)}")
        for is_sliding in self.sliding_layers:
            check_bool("sliding_layers", is_sliding)
        if self.sliding_window is None:
            if any(self.sliding_layers):
                raise ValueError("sliding_layers has sliding layers, which need a sliding_window")
            object.__setattr__(self, "sliding_layers", ())
            return
        check_integer("sliding_window", self.sliding_window, 1, MAX_INT32)
        if not self.sliding_layers:
            object.__setattr__(self, "sliding_layers", (True,) * self.num_layers)
        elif len(self.sliding_layers) != self.num_layers:
            raise ValueError(f"sliding_layers is of {len(self.sliding_layers)} layers, num_layers {self.num_layers}")
        elif not any(self.sliding_layers):
            raise ValueError("sliding_layers has no sliding layer: sliding_window must be None then")

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
        hf = source if isinstance(source, Mapping) else read_json(Path(source))
        try:
            return _config_from_hf(hf)
        except (TypeError, ValueError) as error:
            named = re.sub(rf"\b({'|'.join(_KEYS)})\b", lambda field: _KEYS[field[0]], str(error))
            raise ValueError(f"config.json: {named}") from error

    def to_hf(self) -> dict[str, Any]:
        """The contents of a `config.json` that `from_hf` and every version of transformers read."""
        model_type = "qwen2" if self.qkv_bias else "qwen3" if self.qk_norm else "llama"  # Mistral is written as Llama
        own = {
            "llama": {"attention_bias": False, "mlp_bias": False},
            "qwen2": {"use_sliding_window": False},
            "qwen3": {"use_sliding_window": False, "attention_bias": False},
        }
        return {
            "architectures": [_MODEL_TYPES[model_type]],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            **own[model_type],
            "max_position_embeddings": self.max_positions,
            "bos_token_id": self.bos_id,
            "eos_token_id": list(self.eos_ids) or None,
            **rope_to_hf(self.rope),
            **({} if self.quantization is None else {"quantization_config": quantization_to_hf(self.quantization)}),
        }

    @staticmethod
    def preset(name: str) -> LlamaConfig:
        """The configuration of a published model: `llama-3-8b`, `qwen3-32b` and so on.

        Raises:
          ValueError: no such preset; the message lists them.
        """
        if name not in PRESETS:
            raise ValueError(f"no preset named {name!r}; there are: {', '.join(PRESETS)}")
        return PRESETS[name]


_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What an absent key of an architecture means, as in transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Keys of which only this value is supported: others mean a different computation.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "use_sliding_window": False,
}


# The keys of fields whose names differ.
_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
    "bos_id": "bos_token_id",
    "eos_ids": "eos_token_id",
    "quantization": "quantization_config",
    "theta": "rope_theta",
    **HF_NAMES,
}


def _config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    architecture = _architecture(hf)
    hf = {**_DEFAULTS[architecture], **hf}
    if architecture == "MistralForCausalLM" and hf["sliding_window"] is not None:
        window = shown(hf["sliding_window"])
        raise ValueError(f"sliding_window = {window} is not supported, only Mistral without one (null)")
    for key, supported in _ONLY.items():
        if hf.get(key, supported) not in (supported, None):
            raise ValueError(f"{key} = {shown(hf[key])} is not supported, only {supported!r}")
    layer_types = hf.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise ValueError("layer_types other than full_attention are not supported")

    vocab_size, hidden, intermediate, layers, heads = (_integer(hf, key) for key in _REQUIRED)
    max_positions = _integer(hf, "max_position_embeddings", _DEFAULTS[architecture]["max_position_embeddings"])
    rope = rope_from_hf({**hf, "max_position_embeddings": max_positions})
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_integer(hf, "num_key_value_heads", heads),
        head_dim=_integer(hf, "head_dim", hidden // heads),
        rope=rope,
        norm_eps=_get(hf, "rms_norm_eps", 1e-6),
        tie_embeddings=_get(hf, "tie_word_embeddings", False),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        max_positions=_stretched(max_positions, rope),
        bos_id=hf.get("bos_token_id"),
        eos_ids=check_token_ids("eos_token_id", hf.get("eos_token_id"), vocab_size),
        quantization=quantization_from_hf(hf.get("quantization_config"), layers),
    )


def _architecture(hf: Mapping[str, Any]) -> str:
    named = hf.get("architectures")
    if named in (None, []):
        model_type = hf.get("model_type")
        named = [_MODEL_TYPES.get(model_type, model_type) if isinstance(model_type, str) else model_type]
    if not isinstance(named, list) or named[0] not in _MODEL_TYPES.values():
        supported = ", ".join(_MODEL_TYPES.values())
        raise ValueError(f"unknown architecture: architectures or model_type is {shown(named)}; supported: {supported}")
    return named[0]


def _get(hf: Mapping[str, Any], key: str, default: Any) -> Any:
    value = hf.get(key)
    return default if value is None else value


def _integer(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    return check_integer(key, _get(hf, key, default), 1, MAX_INT32)


def _stretched(max_positions: int, rope: RopeConfig) -> int:
    """The context length with YaRN: Qwen2.5 adds YaRN to config.json and leaves `max_position_embeddings` at 32k."""
    if isinstance(rope.scaling, YarnScaling):
        return max(max_positions, round(rope.scaling.factor * rope.scaling.original_max_positions))
    return max_positions


def _sized(family: LlamaConfig, layers: int, hidden: int, intermediate: int, heads: int, **others: Any) -> LlamaConfig:
    return dataclasses.replace(
        family, num_layers=layers, hidden_size=hidden, intermediate_size=intermediate, num_heads=heads, **others
    )


_LLAMA2 = LlamaConfig(32000, 4096, 11008, 32, 32, 32, 128, max_positions=4096, bos_id=1, eos_ids=(2,))
_LLAMA3 = LlamaConfig(
    128256, 4096, 14336, 32, 32, 8, 128, RopeConfig(500000.0), bos_id=128000, eos_ids=(128001, 128009)
)
# From 3.1 to 3.3, the rotary embedding is stretched to 128k tokens.
_LLAMA31, _LLAMA32 = (
    dataclasses.replace(
        _LLAMA3,
        rope=RopeConfig(500000.0, Llama3Scaling(stretch, 1.0, 4.0, 8192)),
        max_positions=131072,
        eos_ids=(128001, 128008, 128009),
        tie_embeddings=is_tied,
    )
    for stretch, is_tied in ((8.0, False), (32.0, True))
)
_QWEN3 = LlamaConfig(
    *(151936, 4096, 12288, 36, 32, 8, 128, RopeConfig(1000000.0), 1e-6),
    qk_norm=True,
    max_positions=40960,
    bos_id=151643,
    eos_ids=(151645, 151643),
)
PRESETS: dict[str, LlamaConfig] = {
    "llama-2-7b": _LLAMA2,
    "llama-2-13b": _sized(_LLAMA2, 40, 5120, 13824, 40, num_kv_heads=40),
    "llama-2-70b": _sized(_LLAMA2, 80, 8192, 28672, 64, num_kv_heads=8),
    "llama-3-8b": _LLAMA3,
    "llama-3-70b": _sized(_LLAMA3, 80, 8192, 28672, 64),
    "llama-3.1-8b": _LLAMA31,
    "llama-3.1-70b": _sized(_LLAMA31, 80, 8192, 28672, 64),
    "llama-3.1-405b": _sized(_LLAMA31, 126, 16384, 53248, 128),
    "llama-3.2-1b": _sized(_LLAMA32, 16, 2048, 8192, 32, head_dim=64),
    "llama-3.2-3b": _sized(_LLAMA32, 28, 3072, 8192, 24),
    "llama-3.3-70b": _sized(_LLAMA31, 80, 8192, 28672, 64),
    "mistral-7b-v0.3": LlamaConfig(
        32768, 4096, 14336, 32, 32, 8, 128, RopeConfig(1000000.0), max_positions=32768, bos_id=1, eos_ids=(2,)
    ),
    "qwen3-0.6b": _sized(_QWEN3, 28, 1024, 3072, 16, tie_embeddings=True),
    "qwen3-8b": _QWEN3,
    "qwen3-32b": _sized(_QWEN3, 64, 5120, 25600, 64),
}
