"""Converts between `LlamaConfig` and Hugging Face's `config.json`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longctx.models.config import LlamaConfig
from longctx.models.json_file import read_json
from longctx.models.quantization_config import quantization_from_hf, quantization_to_hf
from longctx.models.rope_config import HF_NAMES, RopeConfig, YarnScaling, rope_from_hf, rope_to_hf
from longctx.models.validation import MAX_INT32, check_integer, check_token_ids, shown

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


def config_from_hf(source: Mapping[str, Any] | str | os.PathLike[str]) -> LlamaConfig:
    """See `LlamaConfig.from_hf`."""
    hf = source if isinstance(source, Mapping) else read_json(Path(source))
    try:
        return _config(hf)
    except (TypeError, ValueError) as error:
        named = re.sub(rf"\b({'|'.join(_KEYS)})\b", lambda field: _KEYS[field[0]], str(error))
        raise ValueError(f"config.json: {named}") from error


def _config(hf: Mapping[str, Any]) -> LlamaConfig:
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


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """See `LlamaConfig.to_hf`."""
    model_type = "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "llama"  # Mistral is written as Llama
    own = {
        "llama": {"attention_bias": False, "mlp_bias": False},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"use_sliding_window": False, "attention_bias": False},
    }
    return {
        "architectures": [_MODEL_TYPES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **own[model_type],
        "max_position_embeddings": config.max_positions,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        **rope_to_hf(config.rope),
        **({} if config.quantization is None else {"quantization_config": quantization_to_hf(config.quantization)}),
    }


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
