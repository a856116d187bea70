"""Differences between the architectures of transformers, as their `config.json` says them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longctx.annotations import Real
from longctx.models.rope_config import RopeConfig, rope_from_hf
from longctx.models.validation import MAX_INT32, MAX_LAYERS, check_bool, check_integer, shown

# Fields that say how layers differ from those of Llama.
FEATURES = ("qkv_bias", "out_bias", "qk_norm", "attention_sinks", "gemma_style")
BIASES = ("qkv_bias", "out_bias")  # of Llama with attention_bias
FEATURES_OF: dict[str, tuple[str, ...]] = {
    "LlamaForCausalLM": (),
    "MistralForCausalLM": (),
    "Qwen2ForCausalLM": ("qkv_bias",),
    "Qwen3ForCausalLM": ("qk_norm",),
    "Gemma3ForCausalLM": ("qk_norm", "gemma_style"),
}
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
TYPES = {architecture: model_type for model_type, architecture in MODEL_TYPES.items()}
LAYER_TYPES = ("full_attention", "sliding_attention")
_QWEN = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# What an absent key of an architecture means, as in transformers.
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {**_QWEN},
    "Qwen3ForCausalLM": {**_QWEN, "head_dim": 128},
    "Gemma3ForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
}

# Keys of which only this value is supported: others mean a different computation.
_ONLY: dict[str, Any] = {"hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1}
_NO_BIAS, _NO_WINDOW = {"attention_bias": False}, {"use_sliding_window": False}
ONLY_OF: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _ONLY | _NO_WINDOW,
    "MistralForCausalLM": _ONLY | _NO_BIAS | _NO_WINDOW,
    **dict.fromkeys(("Qwen2ForCausalLM", "Qwen3ForCausalLM"), _ONLY | _NO_BIAS),
    "Gemma3ForCausalLM": {
        **_NO_BIAS,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
}


def architecture_of(hf: Mapping[str, Any]) -> str:
    """The architecture that `config.json` names, or that of its `model_type`; ValueError: it is not supported."""
    named = hf.get("architectures")
    if named in (None, []):
        model_type = hf.get("model_type")
        named = [MODEL_TYPES.get(model_type, model_type) if isinstance(model_type, str) else model_type]
    if not isinstance(named, list) or named[0] not in MODEL_TYPES.values():
        supported = ", ".join(MODEL_TYPES.values())
        raise ValueError(f"unknown architecture: architectures or model_type is {shown(named)}; supported: {supported}")
    return named[0]


def sliding_from_hf(architecture: str, hf: Mapping[str, Any], layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The window, and whether each layer has it; (None, ()) if no layer has."""
    check_integer("num_hidden_layers", layers, 1, MAX_LAYERS)  # before anything is made for each layer
    types, window = hf.get("layer_types"), hf.get("sliding_window")
    if types is not None and not (isinstance(types, list) and all(kind in LAYER_TYPES for kind in types)):
        raise ValueError(f"layer_types must be a list of {' and '.join(LAYER_TYPES)}, got {shown(types)}")
    if architecture == "Gemma3ForCausalLM":
        pattern = integer_of(hf, "sliding_window_pattern", 6)
        sliding = tuple((layer + 1) % pattern > 0 for layer in range(layers))
    elif architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        check_bool("use_sliding_window", value_or(hf, "use_sliding_window", False))
        window = window if hf.get("use_sliding_window") else None
        first = check_integer("max_window_layers", value_or(hf, "max_window_layers", 28), 0, MAX_INT32)
        sliding = tuple(window is not None and layer >= first for layer in range(layers))
    else:
        window = window if architecture == "MistralForCausalLM" else None
        sliding = (window is not None,) * layers
    if types is not None:
        if len(types) != layers:
            raise ValueError(f"layer_types is of {len(types)} layers, num_hidden_layers {layers}")
        named = tuple(kind == "sliding_attention" for kind in types)
        if architecture in ("LlamaForCausalLM", "MistralForCausalLM") and named != sliding:
            raise ValueError(f"layer_types of {architecture} must be those of all of its layers, which are alike")
        sliding = named
    if not any(sliding):
        return None, ()
    return check_integer("sliding_window", window, 1, MAX_INT32), sliding


def ropes_from_hf(hf: dict[str, Any]) -> tuple[RopeConfig, Real]:
    """The rotary frequencies of Gemma's full layers, and the base of those of its sliding layers."""
    theta, local_theta = value_or(hf, "rope_theta", 1e6), value_or(hf, "rope_local_base_freq", 1e4)
    given = hf.get("rope_parameters")
    if given in (None, {}):
        return rope_from_hf({**hf, "rope_theta": theta}), local_theta
    if not isinstance(given, Mapping) or not given.keys() <= set(LAYER_TYPES):
        raise ValueError(f"rope_parameters must have {' and '.join(LAYER_TYPES)}, got {shown(given)}")
    full, local = (
        rope_from_hf({**hf, "rope_theta": base, "rope_parameters": given.get(kind), "rope_scaling": None})
        for kind, base in zip(LAYER_TYPES, (theta, local_theta), strict=True)
    )
    if local.scaling is not None:
        raise ValueError("rope_parameters.sliding_attention has a scaling, which is not supported")
    return full, local.theta


def value_or(hf: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a key, or the default if it is absent or null."""
    value = hf.get(key)
    return default if value is None else value


def integer_of(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The positive integer of a key, or the default; TypeError or ValueError: it is none."""
    return check_integer(key, value_or(hf, key, default), 1, MAX_INT32)
