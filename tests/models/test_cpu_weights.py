"""Parameters as they are arranged for the CPU: the same model, and copies only where the arrangement says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longctx.models import Llama, LlamaConfig
from longctx.models.cpu_weights import arrange_for_cpu


@pytest.mark.parametrize(
    ("dtype", "tied", "rows"), [(jnp.float32, False, 41), (jnp.float32, True, 100), (jnp.bfloat16, False, 41)]
)
def test_the_same_logits_from_both_arrangements(dtype: type, tied: bool, rows: int) -> None:
    """Of few rows and of many, whose products differ."""
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_positions": 256}
    model = Llama(LlamaConfig(90, 32, 48, **sizes, tie_embeddings=tied))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.4, x.shape), dtype), model.abstract_params(dtype))
    arranged = arrange_for_cpu(params)
    if dtype == jnp.bfloat16:  # views of the same memory
        for name, stack in params["layers"].items():
            assert arranged["layers"][name].unsafe_buffer_pointer() == stack.unsafe_buffer_pointer()
    else:
        first = arranged["layers"][0]["attn_norm"]
        assert first.unsafe_buffer_pointer() == params["layers"]["attn_norm"].unsafe_buffer_pointer()
    logits = jax.jit(model.__call__)
    tokens = np.arange(rows) * 7 % 90
    ours, theirs = logits(arranged, tokens), logits(params, tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 if dtype == jnp.float32 else 0.2)
