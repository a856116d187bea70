"""Parameters of a module that are sharded over the ranks of a sequence."""

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from longctx.models import Llama, LlamaConfig
from longctx.nnx import LlamaModule, from_nnx, to_nnx
from longctx.parallel import make_mesh

CONFIG = LlamaConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
)


def loss_and_gradient(module: LlamaModule) -> tuple[jax.Array, dict]:
    tokens = np.random.default_rng(0).integers(0, 100, 43)

    def loss(module: LlamaModule) -> jax.Array:
        total, count = module.loss(tokens)
        return total / count

    value, gradient = nnx.jit(nnx.value_and_grad(loss))(module)
    return value, nnx.to_pure_dict(gradient)["params"]


def test_parameters_and_gradients_are_sharded_and_equal_those_of_one_device() -> None:
    model = Llama(CONFIG)
    params = model.init(jax.random.key(0), initializer_range=0.2)
    module = to_nnx(model, params, make_mesh(context=4, tensor=2), fsdp=True, remat=True, chunk_size=5)
    value, gradient = loss_and_gradient(module)
    expected, wanted = loss_and_gradient(to_nnx(model, params))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, wanted)

    specs = {
        "wq": P(None, "context", "tensor", None),
        "wo": P(None, "tensor", "context", None),
        "w_down": P(None, "tensor", "context"),
        "attn_norm": P(),
    }
    _, ours = from_nnx(module)
    for tree in (ours, gradient):
        for name, spec in specs.items():
            leaf = tree["layers"][name]
            assert leaf.sharding.is_equivalent_to(jax.NamedSharding(module.plan.mesh, spec), leaf.ndim), name
        assert tree["embed"].sharding.shard_shape(tree["embed"].shape) == (25, 32)
