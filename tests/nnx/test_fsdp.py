"""Parameters of a module that are sharded over the ranks of a sequence."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hlo import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.models import Llama, LlamaConfig
from longctx.nnx import LlamaModule, attention_fn, from_nnx, to_nnx
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
    module = to_nnx(model, params, make_mesh(context=2, tensor=2), fsdp=True, remat=True, chunk_size=5)
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
        assert tree["embed"].sharding.shard_shape(tree["embed"].shape) == (50, 32)


def of_heads(path: Any, x: jax.Array) -> P:
    """Tensor parallelism: heads are the first axis of the output projection, and the last but one elsewhere."""
    if x.ndim == 1:
        return P()
    return P("data") if "'out'" in jax.tree_util.keystr(path) else P(*(None,) * (x.ndim - 2), "data")


@pytest.mark.parametrize(
    ("batch", "spec_of"),
    [
        pytest.param(P("data"), lambda path, x: P(), marks=pytest.mark.slow),
        (P("data"), lambda path, x: P("data") if x.shape[0] % 4 == 0 else P()),
        pytest.param(P(), of_heads, marks=pytest.mark.slow),
    ],
    ids=["data", "fsdp", "tensor"],
)
def test_a_module_of_flax_exchanges_what_it_does_with_the_attention_of_jax(
    batch: P, spec_of: Callable[[Any, jax.Array], P]
) -> None:
    mesh = jax.make_mesh((4, 1), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    x = np.random.default_rng(0).standard_normal((8, 24, 32), np.float32)

    def compile_gradient(**options: Any) -> tuple[list[tuple[str, float]], Any]:
        module = nnx.MultiHeadAttention(num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0), **options)
        graph, state = nnx.split(module)
        state = jax.tree_util.tree_map_with_path(
            lambda path, x: jax.device_put(x, NamedSharding(mesh, spec_of(path, x))), state
        )
        inputs = state, jax.device_put(x, NamedSharding(mesh, batch))
        loss = jax.grad(lambda state, x: jnp.sum(nnx.merge(graph, state)(x) ** 2))
        compiled = jax.jit(loss).lower(*inputs).compile()
        return sorted((c.opcode, c.sent) for c in collectives(compiled.as_text(), 4)), compiled(*inputs)

    head_axis = "data" if batch == P() else None
    found, gradient = compile_gradient(attention_fn=attention_fn(mesh, head_axis=head_axis))
    wanted, expected = compile_gradient()
    assert found == wanted
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradient, expected)
