"""The tables that attention to a named shape would read on an H100, made on any machine."""

import functools

import jax
import numpy as np

from benchmarks.kernel_shapes import AttentionShape
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.mosaic_gpu import MosaicGpuPlan, plan_mosaic_gpu
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.mosaic_gpu.adapter import interpreted

MULTIPROCESSORS = 132


@functools.cache
def plan_of(shape: AttentionShape) -> MosaicGpuPlan:
    """The plan for queries that are the last tokens of one segment."""
    queries = np.arange(shape.kv_length - shape.q_length, shape.kv_length, dtype=np.int32)[None]
    keys = np.arange(shape.kv_length, dtype=np.int32)[None]
    queries, keys = (Tokens(x, np.zeros_like(x)) for x in (queries, keys))

    def make(queries: Tokens, keys: Tokens) -> MosaicGpuPlan:
        with interpreted(MULTIPROCESSORS):  # so that it is made for a Hopper GPU
            return plan_mosaic_gpu(shape.q_shape, shape.kv_shape, queries, keys, AttentionRule(True, 1.0))

    # It runs once, so compiling is what takes time.
    return jax.jit(make).lower(queries, keys).compile({"xla_backend_optimization_level": 0})(queries, keys)
