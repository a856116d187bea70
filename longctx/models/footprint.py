"""Bytes of a model on each device, by arithmetic: neither JAX nor arrays are needed."""

from __future__ import annotations

import math
from typing import TypeVar

from longctx.models.config import LlamaConfig
from longctx.models.layer_runs import Stacking, layer_runs, sliding_places
from longctx.models.validation import check_kv_dtype

KV_SCALE_BYTES = 4
_Bytes = TypeVar("_Bytes", int, float)
_SCALE = 4  # bytes; a quantised weight itself has 1


def weight_bytes(config: LlamaConfig, stage: int = 1, tensor: int = 1, dtype_bytes: int = 2, ffn_ranks: int = 1) -> int:
    """Compute the bytes of the weights on each of `stage * tensor` devices, with the layers of the largest stage.

    Args:
      config: sizes of the model.
      stage: pipeline stages, at most the model's layers.
      tensor: divides the heads, and the KV heads or is a multiple of them.
      dtype_bytes: bytes of a number that is not quantised.
      ffn_ranks: context ranks that output projections and feed-forward are sharded over (`ParallelPlan.ffn`).

    Returns:
      Bytes on each device.

    Examples:
      >>> from longctx.models import LlamaConfig, weight_bytes
      >>> weight_bytes(LlamaConfig.preset("llama-3-8b"), tensor=8) / 1e9  # GB
      2.008031232
    """
    hidden, size = config.hidden_size, config.head_dim
    heads, ffn = config.num_heads * size // tensor, config.intermediate_size // (tensor * ffn_ranks)
    kv_heads = max(1, config.num_kv_heads // tensor) * size
    matrices = {  # outputs and inputs on a device
        "wq": (heads, hidden),
        "wk": (kv_heads, hidden),
        "wv": (kv_heads, hidden),
        "wo": (hidden, heads // ffn_ranks),
        "w_gate": (ffn, hidden),
        "w_up": (ffn, hidden),
        "w_down": (hidden, ffn),
    }
    vectors = hidden * (4 if config.gemma_style else 2)  # norms
    vectors += heads + 2 * kv_heads if config.qkv_bias else 0
    vectors += hidden if config.out_bias else 0
    vectors += 2 * size if config.qk_norm else 0
    vectors += config.num_heads // tensor if config.attention_sinks else 0
    total = hidden * dtype_bytes  # the last norm
    for run in layer_runs(config, Stacking(stage)):
        layer = vectors * dtype_bytes
        for name, (outputs, inputs) in matrices.items():
            layer += outputs * inputs * (1 if name in run.quantized else dtype_bytes)
            layer += outputs * _SCALE if name in run.quantized | run.partly else 0
        total += len(run.layers) // stage * layer
    parts = stage * tensor
    vocab = math.ceil(config.vocab_size / parts) * parts
    head = 0 if config.tie_embeddings and parts == 1 else vocab // parts
    return total + (vocab // tensor + head) * hidden * dtype_bytes


def cache_bytes(
    config: LlamaConfig,
    tokens: int,
    stage: int = 1,
    tensor: int = 1,
    dtype_bytes: int = 2,
    kv_dtype: str | None = None,
) -> int:
    """Compute the bytes of keys and values on each of `stage * tensor` devices, with the layers of the largest stage.

    Layers with a sliding window keep those of the last `sliding_window` tokens.

    Args:
      config: sizes of the model.
      tokens: tokens of one sequence, whose keys and values are kept.
      stage, tensor: as for `weight_bytes`.
      dtype_bytes: bytes of a number of the cache, unless `kv_dtype` says.
      kv_dtype: dtype of the cache, as in `EngineConfig`.

    Returns:
      Bytes on each device.

    Examples:
      >>> from longctx.models import LlamaConfig, cache_bytes
      >>> cache_bytes(LlamaConfig.preset("llama-3-8b"), 1_000_000, tensor=8) / 1e9  # GB
      16.384
    """
    seen = tokens if config.sliding_window is None else min(tokens, config.sliding_window)
    full, sliding = layer_cache_bytes(config, stage, tensor, dtype_bytes, kv_dtype)
    return full * tokens + sliding * seen


def layer_cache_bytes(
    config: LlamaConfig, stage: int = 1, tensor: int = 1, dtype_bytes: int = 2, kv_dtype: str | None = None
) -> tuple[int, int]:
    """Compute the bytes of a token's keys and values in the layers without a window, and in those with one.

    Of each kind these are the layers of the stage that has most, as all devices keep as many.

    Args:
      config, stage, tensor, dtype_bytes, kv_dtype: as for `cache_bytes`.

    Returns:
      Bytes on each device, of each kind.
    """
    sliding = sliding_places(config, stage)
    row = 2 * max(1, config.num_kv_heads // tensor) * kv_row_bytes(config.head_dim, dtype_bytes, kv_dtype)
    return row * int((~sliding).sum(1).max()), row * int(sliding.sum(1).max())


def kv_row_bytes(head_dim: int, dtype_bytes: _Bytes, kv_dtype: str | None = None) -> _Bytes:
    """Compute the bytes of a token's key, or of its value, in one KV head; ValueError: kv_dtype is not known."""
    check_kv_dtype(kv_dtype)
    return head_dim * dtype_bytes if kv_dtype is None else head_dim + KV_SCALE_BYTES
