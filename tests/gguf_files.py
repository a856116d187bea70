"""Writes random models of transformers as GGUF files, as llama.cpp's converter does, for tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Type = gguf.GGMLQuantizationType
# Types that the package can read, but not write: the largest scale of a random block, and where its scales are.
SCALES = {
    Type.Q2_K: (5e-3, 80, 82),
    Type.Q3_K: (2e-3, 108),
    Type.Q4_K: (2e-4, 0, 2),
    Type.Q5_K: (2e-4, 0, 2),
    Type.Q6_K: (2e-4, 208),
    Type.IQ4_NL: (2e-3, 0),
    Type.IQ4_XS: (2e-4, 0),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def own_name(name: str, architecture: str) -> str:
    """llama.cpp's name of a tensor of transformers."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, kind = stem.removeprefix("model.layers.").partition(".")
        names = NAMES | (GEMMA_NAMES if architecture == "gemma3" else {})
        return f"blk.{layer}.{names[kind]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def row_order(name: str, config: Any) -> np.ndarray | slice:
    """The rows of transformers' tensor in the order of the file: pairs (i, i + half) of a head become neighbours."""
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    count = heads.get(".".join(name.split(".")[-2:]))
    if config.model_type not in ("llama", "mistral") or count is None:
        return slice(None)
    rows = count * config.head_dim
    halves = np.arange(rows).reshape(count, 2, config.head_dim // 2)
    return np.stack([halves[:, 0], halves[:, 1]], axis=-1).ravel()


def encode(rng: np.random.Generator, tensor: np.ndarray, type: Type) -> np.ndarray:
    """The bytes (or numbers) of a tensor in the file; random ones where the package has no quantisation."""
    if type == Type.BF16:
        return torch.tensor(tensor).bfloat16().view(torch.uint8).numpy()
    if type not in SCALES:
        return gguf.quantize(tensor, type)
    block, block_bytes = gguf.GGML_QUANT_SIZES[type]
    blocks = rng.integers(256, size=(tensor.size // block, block_bytes), dtype=np.uint8)
    for at in SCALES[type][1:]:
        scale = rng.uniform(0.5, 1.0, size=len(blocks)).astype(np.float16) * np.float16(SCALES[type][0])
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*tensor.shape[:-1], -1)


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    type: Type = Type.F32,
    types: Mapping[str, Type] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    **changes: Any,
) -> None:
    """Write the model, whose weights become those that the file's dequantised ones are.

    Args:
      type: of all matrices; vectors are float32, as llama.cpp has them.
      types: of single tensors, by their names in the file.
      tokenizer: metadata below `tokenizer.`.
      changes: metadata below the architecture, to add or replace; None leaves a key out.
    """
    config, rng = model.config, np.random.default_rng(0)
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    is_gemma = architecture == "gemma3"
    writer = gguf.GGUFWriter(path, architecture)
    rope = config.rope_parameters
    if is_gemma:
        rope, local_rope = rope["full_attention"], rope["sliding_attention"]
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if is_gemma:
        pattern = [*config.layer_types, "full_attention"].index("full_attention") + 1
        keys |= {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": pattern}
        keys["rope.freq_base_swa"] = float(local_rope["rope_theta"])
    if getattr(config, "head_dim", None) is not None:
        keys |= dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim)
    for key, value in (keys | changes).items():
        add(writer, f"{architecture}.{key}", value)
    for key, value in (tokenizer or {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2}).items():
        add(writer, f"tokenizer.{key}", value)
    if rope["rope_type"] == "llama3":
        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
        plain = rope["rope_theta"] ** (-np.arange(0, 2 * scaled.size, 2) / (2 * scaled.size))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    tied = config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if tied and name == "lm_head.weight":
                continue
            tensor, order, own = parameter.float().numpy(), row_order(name, config), own_name(name, architecture)
            added = np.float32(is_gemma and name.endswith("norm.weight"))  # which Gemma's norms add to their weights
            kind = (types or {}).get(own, Type.F32 if tensor.ndim == 1 else type)
            data = encode(rng, tensor[order] + added, kind)
            writer.add_tensor(own, np.ascontiguousarray(data), raw_dtype=kind)
            dequantised = np.empty_like(tensor)
            dequantised[order] = gguf.dequantize(data, kind)
            parameter.copy_(torch.tensor(dequantised - added))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add metadata of the type that llama.cpp's converter has for such a value."""
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def write_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Path:
    """Write a file without tensors, and return its path; `metadata` stand below `tokenizer.`."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add(writer, f"tokenizer.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
