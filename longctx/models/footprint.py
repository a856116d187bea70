"""Bytes of a model on each device, by arithmetic: neither JAX nor arrays are needed."""

from __future__ import annotations

import math

from longctx.models.config import LlamaConfig
from longctx.models.layer_runs import layer_runs, layers_per_stage

_SCALE = 4  # bytes; a quantised weight itself has 1


def weight_bytes(config: LlamaConfig, stage: int = 1, tensor: int = 1, dtype_bytes: int = 2) -> int:
    """Bytes of the weights on each of `stage * tensor` devices, with as many layers as the largest stage has.

    Args:
      stage: at most the model's layers.
      tensor: divides the heads, and the KV heads or is a multiple of them.
      dtype_bytes: of a number that is not quantised.
    """
    hidden, size = config.hidden_size, config.head_dim
    heads, ffn = config.num_heads * size // tensor, config.intermediate_size // tensor
    kv_heads = max(1, config.num_kv_heads // tensor) * size
    matrices = {  # outputs and inputs on a device
        "wq": (heads, hidden),
        "wk": (kv_heads, hidden),
        "wv": (kv_heads, hidden),
        "wo": (hidden, heads),
        "w_gate": (ffn, hidden),
        "w_up": (ffn, hidden),
        "w_down": (hidden, ffn),
    }
    biases = heads + 2 * kv_heads if config.qkv_bias else 0
    head_norms = 2 * size if config.qk_norm else 0
    total = hidden * dtype_bytes  # the last norm
    for run in layer_runs(config, stage):
        layer = (2 * hidden + biases + head_norms) * dtype_bytes
        for name, (outputs, inputs) in matrices.items():
            layer += outputs * inputs * (1 if name in run.quantized else dtype_bytes)
            layer += outputs * _SCALE if name in run.quantized | run.partly else 0
        total += len(run.layers) // stage * layer
    parts = stage * tensor
    vocab = math.ceil(config.vocab_size / parts) * parts
    head = 0 if config.tie_embeddings and parts == 1 else vocab // parts
    return total + (vocab // tensor + head) * hidden * dtype_bytes


def cache_bytes(config: LlamaConfig, tokens: int, stage: int = 1, tensor: int = 1, dtype_bytes: int = 2) -> int:
    """Bytes of the keys and values of `tokens` tokens on each of `stage * tensor` devices, as `weight_bytes` counts."""
    layers, kv_heads = layers_per_stage(config.num_layers, stage), max(1, config.num_kv_heads // tensor)
    return 2 * layers * kv_heads * config.head_dim * dtype_bytes * tokens
