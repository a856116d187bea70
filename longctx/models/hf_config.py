"""Converts between `LlamaConfig` and Hugging Face's `config.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longctx.models.config import LlamaConfig
from longctx.models.rope_config import RopeConfig, YarnScaling, rope_from_hf, rope_to_hf

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
_MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Keys of which only this value is supported: others mean a different computation.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "use_sliding_window": False,
    "quantization_config": None,
}


def config_from_hf(source: Mapping[str, Any] | str | os.PathLike[str]) -> LlamaConfig:
    """See `LlamaConfig.from_hf`."""
    hf = source if isinstance(source, Mapping) else _read_json(Path(source))
    architecture = _architecture(hf)
    for key in _REQUIRED:
        if not isinstance(hf.get(key), int):
            raise ValueError(f"config.json: `{key}` must be an integer, got {hf.get(key)!r}")
    for key, supported in _ONLY.items():
        if hf.get(key, supported) not in (supported, None):
            raise ValueError(f"config.json: `{key}` = {hf[key]!r} is not supported, only {supported!r}")
    if any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
        raise ValueError("config.json: `layer_types` other than full_attention are not supported")

    qwen2 = architecture == "Qwen2ForCausalLM"
    heads = hf["num_attention_heads"]
    max_positions = _get(hf, "max_position_embeddings", 32768 if qwen2 else 2048)
    rope = rope_from_hf({**hf, "max_position_embeddings": max_positions})
    return LlamaConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=_get(hf, "num_key_value_heads", heads),
        head_dim=_get(hf, "head_dim", hf["hidden_size"] // heads),
        rope=rope,
        norm_eps=_get(hf, "rms_norm_eps", 1e-6),
        tie_embeddings=bool(_get(hf, "tie_word_embeddings", False)),
        qkv_bias=qwen2,
        max_positions=_stretched(max_positions, rope),
        bos_id=hf.get("bos_token_id"),
        eos_ids=_ids(hf.get("eos_token_id")),
    )


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """See `LlamaConfig.to_hf`."""
    qwen2 = config.qkv_bias
    return {
        "architectures": ["Qwen2ForCausalLM" if qwen2 else "LlamaForCausalLM"],
        "model_type": "qwen2" if qwen2 else "llama",
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
        **({"use_sliding_window": False} if qwen2 else {"attention_bias": False, "mlp_bias": False}),
        "max_position_embeddings": config.max_positions,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        **rope_to_hf(config.rope),
    }


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds {type(contents).__name__}, not a JSON object")
    return contents


def _architecture(hf: Mapping[str, Any]) -> str:
    architectures = hf.get("architectures") or [_MODEL_TYPES.get(hf.get("model_type", ""))]
    if architectures[0] not in _ARCHITECTURES:
        named, supported = hf.get("architectures") or hf.get("model_type"), ", ".join(_ARCHITECTURES)
        raise ValueError(f"config.json: unknown architecture {named!r}; supported: {supported}")
    return architectures[0]


def _get(hf: Mapping[str, Any], key: str, default: Any) -> Any:
    value = hf.get(key)
    return default if value is None else value


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _stretched(max_positions: int, rope: RopeConfig) -> int:
    """The context length with YaRN: Qwen2.5 adds YaRN to config.json and leaves `max_position_embeddings` at 32k."""
    if isinstance(rope.scaling, YarnScaling):
        return max(max_positions, round(rope.scaling.factor * rope.scaling.original_max_positions))
    return max_positions
