"""A Llama whose arrays are sharded by JAX: only weights and partial sums travel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.models import Llama, LlamaConfig, param_specs
from longctx.parallel import make_mesh

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
MODEL = Llama(CONFIG)
PARAMS = MODEL.init(jax.random.key(0), initializer_range=0.2)
TOKENS = np.random.default_rng(0).integers(0, 64, (4, 24), np.int32)


def loss(params, tokens):  # type: ignore[no-untyped-def]
    return jnp.mean(jnp.sin(MODEL(params, tokens)))


def fsdp(x: jax.Array) -> P:
    """The first dimension that 4 devices divide, over all of them."""
    at = min((i for i, n in enumerate(x.shape) if n % 4 == 0), default=None)
    return P() if at is None else P(*(None,) * at, "data")


def place(tree, spec_of):  # type: ignore[no-untyped-def]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec_of(x))), tree)


def test_data_parallelism_only_sums_gradients() -> None:
    params, tokens = place(PARAMS, lambda x: P()), place(TOKENS, lambda x: P("data"))
    step = jax.jit(jax.value_and_grad(loss))
    compiled = step.lower(params, tokens).compile()
    assert {x.opcode for x in collectives(compiled.as_text(), 4)} == {"all-reduce"}
    got, want = compiled(params, tokens), step(PARAMS, TOKENS)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2e-5)


def test_tensor_parallelism_only_sums_activations() -> None:
    """Each layer sums the results of attention and of its feed-forward; the embedding is summed too."""
    mesh = make_mesh(tensor=2)
    specs = param_specs(CONFIG, mesh, apart=False)
    params = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), PARAMS, specs)
    compiled = jax.jit(MODEL.__call__).lower(params, TOKENS).compile()
    found = collectives(compiled.as_text(), 2)
    assert [x.opcode for x in found] == ["all-reduce"] * 3
    assert sum("body of 2" in x.within for x in found) == 2
    assert {x.sent for x in found} == {TOKENS.size * CONFIG.hidden_size * 4}
    np.testing.assert_allclose(np.asarray(compiled(params, TOKENS)), MODEL(PARAMS, TOKENS), rtol=0, atol=2e-5)


@pytest.mark.parametrize("other", [AxisType.Explicit, AxisType.Auto])
def test_data_parallelism_with_explicit_axes_is_exact(other: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit, other))
    with jax.set_mesh(mesh):
        params, tokens = (
            jax.device_put(PARAMS, NamedSharding(mesh, P())),
            jax.device_put(TOKENS, NamedSharding(mesh, P("data"))),
        )
        logits = jax.jit(MODEL.__call__)(params, tokens)
    assert jax.typeof(logits).sharding.spec[0] == "data"
    np.testing.assert_allclose(np.asarray(logits), MODEL(PARAMS, TOKENS), rtol=0, atol=2e-5)


def test_fsdp_gathers_weights_alone() -> None:
    tokens = np.tile(TOKENS, (1, 4))  # queries, keys and values are then larger than the weights
    params = place(PARAMS, fsdp)
    compiled = jax.jit(MODEL.__call__).lower(params, place(tokens, lambda x: P("data"))).compile()
    found = collectives(compiled.as_text(), 4)
    assert {x.opcode for x in found} == {"all-gather"}
    assert sum(x.sent for x in found) <= 4 * sum(x.size for x in jax.tree.leaves(PARAMS))
    got, want = compiled(params, place(tokens, lambda x: P("data"))), MODEL(PARAMS, tokens)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=2e-5)
