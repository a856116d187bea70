"""A checkpoint with random weights of a very small model, for tests of commands."""

from pathlib import Path

import jax
import numpy as np

from longctx.models import Llama, LlamaConfig, save_checkpoint

MODEL = Llama(LlamaConfig(50, 16, 24, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, max_positions=128))


def save_small_checkpoint(directory: Path, seed: int = 0) -> Path:
    """Write it to a directory, and return that."""
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), MODEL.abstract_params())
    save_checkpoint(directory, MODEL, params)
    return directory
