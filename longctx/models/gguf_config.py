"""The configuration of the model in a GGUF file, from its metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from longctx.models.config import LlamaConfig
from longctx.models.gguf import ROPE_FREQUENCIES, GgufReader
from longctx.models.rope_config import Llama3Scaling, RopeConfig
from longctx.models.safetensors_reader import CheckpointError
from longctx.models.validation import check_integer, check_real, shown

_GEMMA = "gemma3"
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    _GEMMA: "Gemma3ForCausalLM",
}
# The keys of config.json and those of GGUF, which stand after the architecture.
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
}
# Keys of Gemma 3; of the latter two llama.cpp has its own defaults, which are those of all published models.
_GEMMA_KEYS = {
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_local_base_freq": "rope.freq_base_swa",
}
_LAYERS_OF_27B = 62  # whose scores are divided by the square root of D / heads
_OPTIONAL = ("num_key_value_heads", "head_dim", "rope_theta", "sliding_window_pattern", "rope_local_base_freq")
_SCALING_KEYS = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
# Keys of which only this value is supported: others mean a different computation.
_ONLY = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scale_linear": 1.0,
}
# Control tokens that end a generation, whatever the metadata say: those of Llama 3, Qwen2, SmolLM2, Gemma.
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<end_of_turn>")
_CONTROL = 3
_MOST_FREQUENCIES = 2**11


def config_from_gguf(reader: GgufReader) -> LlamaConfig:
    """Return the configuration of the model in an open GGUF file; CheckpointError: it has none that is supported."""
    path = reader.directory
    try:
        architecture = _architecture(reader.metadata)
        values = _values(reader, architecture)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
    try:
        return LlamaConfig.from_hf(values)
    except ValueError as error:
        names = {key: f"{architecture}.{name}" for key, name in (_KEYS | _GEMMA_KEYS | _SCALING_KEYS).items()}
        text = str(error).removeprefix("config.json: ")
        named = re.sub(rf"(?<![\w.])({'|'.join(names)})\b", lambda key: names[key[0]], text)
        raise CheckpointError(f"{path}: {named}") from error


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids that end a generation: of the end of a sequence, turn and message, and of tokens known for that."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    known = []
    if isinstance(tokens, list) and isinstance(types, np.ndarray):
        known = [
            id
            for id, (token, type) in enumerate(zip(tokens, types, strict=False))
            if token in _ENDS and type == _CONTROL
        ]
    return list(dict.fromkeys(id for id in [*named, *known] if id is not None))


def _architecture(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ValueError(
            f"unknown architecture: general.architecture is {shown(name)}; supported: {', '.join(_ARCHITECTURES)}"
        )
    parts = metadata.get("split.count", 0)
    if not isinstance(parts, int) or parts > 1:
        raise ValueError(f"it is one of {shown(parts)} parts of a model; `llama-gguf-split --merge` joins them")
    return name


def _values(reader: GgufReader, architecture: str) -> dict[str, Any]:
    """The contents of a config.json that says the same."""
    metadata = reader.metadata
    own = {key.removeprefix(f"{architecture}."): _decimal(value) for key, value in metadata.items()}
    keys = _KEYS | (_GEMMA_KEYS if architecture == _GEMMA else {})
    for key, supported in _ONLY.items():
        value = supported if key in keys.values() else own.get(key, supported)
        if isinstance(value, list | np.ndarray) or value != supported:
            raise ValueError(f"{architecture}.{key} = {shown(value)} is not supported, only {supported!r}")
    values = {key: own.get(name) for key, name in keys.items()}
    for key in values:
        if values[key] is None and key not in _OPTIONAL:
            raise ValueError(f"it has no key {architecture}.{keys[key]}")
    layers = check_integer("num_hidden_layers", values["num_hidden_layers"], 1)
    if layers > len(reader.tensors):  # before anything is made for each layer
        raise ValueError(f"{architecture}.block_count is {layers}, but there are {len(reader.tensors)} tensors in all")
    embedding = reader.tensors.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError("it has no tensor 'token_embd.weight' of two axes")
    head_dim = _head_dim(own, architecture)
    if architecture == _GEMMA:
        values["query_pre_attn_scalar"] = head_dim
        if layers == _LAYERS_OF_27B:
            hidden, heads = (check_integer(key, values[key], 1) for key in ("hidden_size", "num_attention_heads"))
            values["query_pre_attn_scalar"] = hidden // heads
    return {
        **values,
        "num_key_value_heads": own.get("attention.head_count_kv", values["num_attention_heads"]),
        "architectures": [_ARCHITECTURES[architecture]],
        "vocab_size": embedding.shape[0],
        "head_dim": head_dim,
        "tie_word_embeddings": "lm_head.weight" not in reader.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(metadata),
        "rope_scaling": _rope_scaling(reader, own, architecture),
    }


def _decimal(value: Any) -> Any:
    """A float32 as the shortest decimal number that is rounded to it, as it stood in config.json: 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _head_dim(own: Mapping[str, Any], architecture: str) -> int | None:
    sizes = {
        key: own[key]
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
        if own.get(key) is not None
    }
    if not sizes:
        return None
    if len({shown(size) for size in sizes.values()}) > 1:
        raise ValueError(f"{architecture} must have one size of heads, got {sizes}")
    return next(iter(sizes.values()))


def _rope_scaling(reader: GgufReader, own: Mapping[str, Any], architecture: str) -> dict[str, Any] | None:
    given = {key: own[name] for key, name in _SCALING_KEYS.items() if own.get(name) is not None}
    kind = given.pop("rope_type", "linear")  # llama.cpp's default, with the factor 1
    if kind == "none" or (kind == "linear" and "factor" not in given):
        return _llama3_scaling(reader, own) if reader.rope_frequencies is not None else None
    if reader.rope_frequencies is not None:
        raise ValueError(f"it has both {architecture}.rope.scaling.factor and a tensor {shown(ROPE_FREQUENCIES)}")
    return {"rope_type": kind, "factor": given["factor"]} if kind == "linear" else {"rope_type": kind, **given}


def _llama3_scaling(reader: GgufReader, own: Mapping[str, Any]) -> dict[str, Any]:
    """Find the scaling of Llama 3.1 whose factors, one for each frequency, the file has in float32.

    Angles far into a context need more digits: the factor is the largest, low_freq_factor and high_freq_factor are 1
    and 4 in all models.
    """
    tensor = reader.rope_frequencies
    assert tensor is not None
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MOST_FREQUENCIES:
        raise ValueError(f"tensor {shown(ROPE_FREQUENCIES)} is {tensor.dtype} of shape {tensor.shape}")
    factors = reader.read(ROPE_FREQUENCIES, (slice(None),)).astype(np.float64)
    theta = check_real("rope.freq_base", own.get("rope.freq_base", 1e4), 1.0, 1e15)
    plain = RopeConfig(theta).inverse_frequencies(2 * factors.size)
    factor = _decimal(check_real(f"the largest value of {ROPE_FREQUENCIES}", float(factors.max()), 1.0, 1e6))
    for log_original in range(4, 31):
        scaling = Llama3Scaling(factor, 1.0, 4.0, 2**log_original)
        if np.allclose(plain / scaling.scale(plain, theta), factors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 2**log_original,
            }
    raise ValueError(f"tensor {shown(ROPE_FREQUENCIES)} does not hold the factors of a rotary scaling of Llama 3.1")
