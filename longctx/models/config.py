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
from longctx.models.architectures import (
    BIASES,
    DEFAULTS,
    FEATURES,
    FEATURES_OF,
    LAYER_TYPES,
    MODEL_TYPES,
    ONLY_OF,
    TYPES,
    architecture_of,
    integer_of,
    ropes_from_hf,
    sliding_from_hf,
    value_or,
)
from longctx.models.quantization_config import RowwiseFp8, quantization_from_hf, quantization_to_hf
from longctx.models.rope_config import (
    HF_NAMES,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
    check_theta,
    rope_from_hf,
    rope_to_hf,
)
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
    """The configuration of a Llama, Mistral, Qwen2.5, Qwen3 or Gemma 3 decoder. Hashable: it can be static under jit.

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
      out_bias: whether the output of attention has one too, as in gpt-oss.
      qk_norm: whether each head's queries and keys have an RMS norm, as in Qwen3 and Gemma 3.
      query_pre_attn_scalar: scores are divided by its square root. None: by that of `head_dim`.
      attention_sinks: whether each head has a logit that takes part in its softmax, as in gpt-oss.
      gemma_style: whether layers are those of Gemma 3: norms multiply by 1 + weight and come after attention and
        feed-forward too, gates are GELU's, and embeddings are multiplied by the square root of D.
      sliding_window: tokens that a query of a sliding layer sees, itself included. None: no layer is sliding.
      sliding_layers: whether each layer is sliding; by default all of them are in a model with a `sliding_window`.
      local_rope_theta: the base of the frequencies of sliding layers, which are not scaled. None: they have `rope`.
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
    out_bias: bool = False
    qk_norm: bool = False
    query_pre_attn_scalar: Real | None = None
    attention_sinks: bool = False
    gemma_style: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    local_rope_theta: Real | None = None
    max_positions: int = 8192
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    quantization: RowwiseFp8 | None = None

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            check_integer(name, getattr(self, name), 1, limit)
        check_real("norm_eps", self.norm_eps, 1e-30, 1.0)  # in float32 less would be 0, which makes NaN
        for name in ("tie_embeddings", *FEATURES):
            check_bool(name, getattr(self, name))
        if self.qkv_bias and self.qk_norm:
            raise ValueError("qkv_bias and qk_norm can't both be true: no supported architecture has both")
        if self.query_pre_attn_scalar is not None:
            check_real("query_pre_attn_scalar", self.query_pre_attn_scalar, 1e-3, 1e6)
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
        if self.local_rope_theta is not None:
            check_theta("local_rope_theta", self.local_rope_theta)
            if self.sliding_window is None:
                raise ValueError("local_rope_theta is of sliding layers, which need a sliding_window")
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
        """The contents of a `config.json` that `from_hf` and every version of transformers read.

        Raises:
          ValueError: no architecture of transformers has this combination of features.
        """
        return _config_to_hf(self)

    @staticmethod
    def preset(name: str) -> LlamaConfig:
        """The configuration of a published model: `llama-3-8b`, `qwen3-32b` and so on.

        Raises:
          ValueError: no such preset; the message lists them.
        """
        if name not in PRESETS:
            raise ValueError(f"no preset named {name!r}; there are: {', '.join(PRESETS)}")
        return PRESETS[name]


_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

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
    "local_rope_theta": "rope_local_base_freq",
    "sliding_layers": "layer_types",
    **HF_NAMES,
}


def _config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    architecture = architecture_of(hf)
    hf = {**DEFAULTS[architecture], **hf}
    for key, supported in ONLY_OF[architecture].items():
        if hf.get(key, supported) not in (supported, None):
            raise ValueError(f"{key} = {shown(hf[key])} is not supported, only {supported!r}")
    vocab_size, hidden, intermediate, layers, heads = (integer_of(hf, key) for key in _REQUIRED)
    max_positions = integer_of(hf, "max_position_embeddings", DEFAULTS[architecture]["max_position_embeddings"])
    head_dim = integer_of(hf, "head_dim", hidden // heads)
    is_gemma, features = architecture == "Gemma3ForCausalLM", FEATURES_OF[architecture]
    if architecture == "LlamaForCausalLM" and hf.get("attention_bias") is not None:
        check_bool("attention_bias", hf["attention_bias"])
        features = BIASES if hf["attention_bias"] else ()
    window, sliding = sliding_from_hf(architecture, hf, layers)
    hf["max_position_embeddings"] = max_positions
    rope, local_theta = ropes_from_hf(hf) if is_gemma else (rope_from_hf(hf), None)
    scalar = hf.get("query_pre_attn_scalar") if is_gemma else None
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=integer_of(hf, "num_key_value_heads", heads),
        head_dim=integer_of(hf, "head_dim", hidden // heads),
        rope=rope,
        norm_eps=value_or(hf, "rms_norm_eps", 1e-6),
        tie_embeddings=value_or(hf, "tie_word_embeddings", is_gemma),
        query_pre_attn_scalar=None if scalar == head_dim else scalar,
        sliding_window=window,
        sliding_layers=sliding,
        local_rope_theta=None if window is None else local_theta,
        max_positions=_stretched(max_positions, rope),
        bos_id=hf.get("bos_token_id"),
        eos_ids=check_token_ids("eos_token_id", hf.get("eos_token_id"), vocab_size),
        quantization=quantization_from_hf(hf.get("quantization_config"), layers),
        **dict.fromkeys(features, True),
    )


def _config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    model_type, sliding = _model_type(config), {}
    window, types = config.sliding_window, [LAYER_TYPES[is_sliding] for is_sliding in config.sliding_layers]
    if window is not None:
        # Older versions of transformers read a number of layers in place of their types.
        sliding = {"sliding_window": window, "layer_types": types, "max_window_layers": types.index(LAYER_TYPES[1])}
    own: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": config.qkv_bias, "mlp_bias": False},
        "mistral": {"sliding_window": window},
        "qwen2": {"use_sliding_window": window is not None, **sliding},
        "qwen3": {"use_sliding_window": window is not None, **sliding, "attention_bias": False},
    }
    activation = {"hidden_act": "silu"}
    if model_type == "gemma3_text":
        activation = {"hidden_activation": "gelu_pytorch_tanh"}
        types = types or [LAYER_TYPES[0]] * config.num_layers
        own["gemma3_text"] = {
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_dim,
            "layer_types": types,
            "sliding_window": window or config.max_positions,
            "sliding_window_pattern": [*types, LAYER_TYPES[0]].index(LAYER_TYPES[0]) + 1,  # older versions' key
            "rope_local_base_freq": config.local_rope_theta or config.rope.theta,
        }
    return {
        "architectures": [MODEL_TYPES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        **activation,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **own[model_type],
        "max_position_embeddings": config.max_positions,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        **rope_to_hf(config.rope),
        **({} if config.quantization is None else {"quantization_config": quantization_to_hf(config.quantization)}),
    }


def _model_type(config: LlamaConfig) -> str:
    """The type of the architecture that computes what this configuration says; ValueError: there is none."""
    features = tuple(name for name in FEATURES if getattr(config, name))
    model_type = next((TYPES[name] for name, own in FEATURES_OF.items() if own == features), None)
    if features == BIASES:
        model_type = "llama"
    is_mixed = not all(config.sliding_layers)
    if model_type == "llama" and config.sliding_window is not None:  # Mistral without a window is written as Llama
        model_type = None if is_mixed or features else "mistral"
    if model_type != "gemma3_text" and (config.local_rope_theta, config.query_pre_attn_scalar) != (None, None):
        model_type = None
    if model_type is None:
        layers = "some layers sliding" if is_mixed else "sliding layers"
        had = [*features, *([layers] if config.sliding_window is not None else [])]
        had += [name for name in ("local_rope_theta", "query_pre_attn_scalar") if getattr(config, name) is not None]
        raise ValueError(f"no architecture of transformers that is supported has {', '.join(had)}")
    return model_type


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
_GEMMA3 = LlamaConfig(
    *(262144, 640, 2048, 18, 4, 1, 256, RopeConfig(1000000.0), 1e-6),
    tie_embeddings=True,
    qk_norm=True,
    gemma_style=True,
    sliding_window=512,
    sliding_layers=(*(True,) * 5, False) * 3,
    local_rope_theta=10000.0,
    max_positions=32768,
    bos_id=2,
    eos_ids=(1, 106),
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
    "gemma3-270m": _GEMMA3,
    "gemma3-1b": _sized(_GEMMA3, 26, 1152, 6912, 4, sliding_layers=(*(*(True,) * 5, False) * 4, True, True)),
    "qwen3-0.6b": _sized(_QWEN3, 28, 1024, 3072, 16, tie_embeddings=True),
    "qwen3-8b": _QWEN3,
    "qwen3-32b": _sized(_QWEN3, 64, 5120, 25600, 64),
}
