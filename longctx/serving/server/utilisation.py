"""Utilisation of the devices' arithmetic and memory bandwidth: MFU and MBU.

Only work that the model needs counts, without padding and replicated rows: two operations for each
weight and row, four for each pair of a query's and a key's element; and the bytes of all weights, once a step on each
context rank, and of the keys and values attended to, once a chunk.

Source: Mnemosyne, section 3.1 (equations 1 to 4), and PaLM (Chowdhery et al. 2022), appendix B, for MFU.
"""

import math
from typing import NamedTuple

import jax

from longctx.models.config import LlamaConfig
from longctx.models.footprint import kv_row_bytes
from longctx.models.params import Params
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.metrics import StepMetrics
from longctx.serving.predictor.roofline import data_sheet


class Peak(NamedTuple):
    """Peak of all devices together: FLOP/s and bytes/s."""

    flops: float
    bandwidth: float

    @classmethod
    def of(cls, engine: Engine) -> "Peak | None":
        """Return the peak of an engine's devices by their data sheet; None if there is none."""
        mesh = engine.mesh
        sheet = None if mesh is None else data_sheet(mesh.devices.flat[0])
        if mesh is None or sheet is None:
            return None
        return cls(sheet.peak_flops * mesh.size, sheet.memory_bandwidth * mesh.size)


class ModelCost:
    """Operations and bytes of a model's steps.

    Args:
      weight_bytes: of all weights that a step reads, on all devices together.
      element: bytes of an element of keys and values, unless `kv_dtype` says.
    """

    def __init__(self, model: LlamaConfig, weight_bytes: int, element: int, kv_dtype: str | None = None) -> None:
        attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
        self._per_row = 2 * model.num_layers * model.hidden_size * (attention + 3 * model.intermediate_size)
        self._per_sample = 2 * model.vocab_size * model.hidden_size
        self._per_pair = 4 * model.num_layers * model.num_heads * model.head_dim
        self._per_key = 2 * model.num_layers * model.num_kv_heads * kv_row_bytes(model.head_dim, element, kv_dtype)
        self._weight_bytes = weight_bytes

    @classmethod
    def of(cls, engine: Engine) -> "ModelCost":
        """Return the cost of an engine's model; weights count nothing where an executor simulates and has none."""
        params: Params | None = getattr(getattr(engine._executor, "runner", None), "params", None)
        kv_dtype = engine.config.kv_dtype
        if params is None:
            return cls(engine.model.config, 0, 2, kv_dtype)
        leaves = jax.tree.leaves({name: params[name] for name in ("layers", "lm_head")})
        return cls(engine.model.config, sum(map(_bytes, leaves)), params["embed"].dtype.itemsize, kv_dtype)

    def flops(self, step: StepMetrics) -> float:
        """Return the operations of a step."""
        rows, pairs = step.decodes, step.decode_keys
        for start, count in step.chunks:
            rows += count
            pairs += count * start + count * (count + 1) // 2
        return self._per_row * rows + self._per_sample * step.samples + self._per_pair * pairs

    def bytes(self, step: StepMetrics) -> float:
        """Return the bytes that a step reads."""
        keys = step.decode_keys + sum(start + count for start, count in step.chunks)
        return self._weight_bytes + self._per_key * keys


def _bytes(x: jax.Array) -> int:
    """Return the bytes of an array on all devices together."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * len(x.sharding.device_set)
