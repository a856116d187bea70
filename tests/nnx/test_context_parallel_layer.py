"""`ContextParallelAttention` computes dense attention over any mesh, in training and from its cache."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hlo import collectives
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.kernels import attention
from longctx.models import RopeConfig
from longctx.models.rope import apply_rope, rope_cos_sin, rope_table
from longctx.nnx import ContextParallelAttention
from longctx.parallel import make_mesh, shard_sequence

WIDTH, HEADS, SIZE = 16, 4, 8
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((2, 11, WIDTH)), jnp.float32)
SEGMENTS = np.repeat([[0, 1, -1], [0, 0, 2]], [4, 5, 2], 1).astype(np.int32)


def layer(mesh: Any, kv_heads: int = 2, **options: Any) -> ContextParallelAttention:
    """All that a layer can have; the same parameters for all meshes, random biases and norms among them."""
    own = {"rope": RopeConfig(), "use_bias": True, "qk_norm": True, "norm_eps": 1e-6} | options
    made = ContextParallelAttention(WIDTH, HEADS, kv_heads, SIZE, mesh=mesh, rngs=nnx.Rngs(0), **own)
    rng = np.random.default_rng(1)
    for name in ("bq", "bk", "bv", "q_norm", "k_norm", "sinks"):
        param = getattr(made, name)
        if param is not None:
            param[...] = jnp.asarray(rng.standard_normal(param.shape), jnp.float32)
    return made


@nnx.jit(static_argnames="causal")
def reference(layer: ContextParallelAttention, x: Array, segments: Any = None, causal: bool = True) -> Array:
    """The same in plain JAX, on one device."""

    def normed(x: Array, weight: Any) -> Array:
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight[...].reshape(1, 1, 1, -1)

    def projected(weight: Any, bias: Any) -> Array:
        return jnp.einsum("btd,dnh->btnh", x, weight[...], precision="highest") + bias[...][None, None]

    positions = jnp.broadcast_to(jnp.arange(x.shape[1])[None], x.shape[:2])
    rope = rope_cos_sin(rope_table(RopeConfig(), SIZE), positions)
    q, k = (
        apply_rope(normed(projected(weight, bias), norm), *rope)
        for weight, bias, norm in ((layer.wq, layer.bq, layer.q_norm), (layer.wk, layer.bk, layer.k_norm))
    )
    v = projected(layer.wv, layer.bv)
    out, _ = attention(
        q,
        k,
        v,
        q_positions=positions,
        kv_positions=positions,
        q_segment_ids=segments,
        kv_segment_ids=segments,
        causal=causal,
        window=layer.window,
        sinks=None if layer.sinks is None else layer.sinks[...],
        logits_soft_cap=layer.logits_soft_cap,
        implementation="reference",
    )
    return jnp.einsum("btnh,nhd->btd", out, layer.wo[...], precision="highest")


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "options"),
    [
        (3, 2, {}),
        pytest.param(1, 1, {}, marks=pytest.mark.slow),
        pytest.param(2, 4, {"layout": "striped"}, marks=pytest.mark.slow),
        pytest.param(5, 1, {"method": "pass_q"}, marks=pytest.mark.slow),
        pytest.param(8, 2, {"method": "all_gather", "causal": False}, marks=pytest.mark.slow),
        pytest.param(8, 4, {"method": "kvp", "layout": "contiguous"}, marks=pytest.mark.slow),
        (2, 2, {"window": 3, "use_sinks": True, "logits_soft_cap": 2.0}),
    ],
)
def test_equals_dense_attention(ranks: int, kv_heads: int, options: Any) -> None:
    module = layer(make_mesh(context=ranks), kv_heads, **options)
    got = module(X, segment_ids=SEGMENTS)
    want = reference(module, X, SEGMENTS, options.get("causal", True))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_arranged_tokens_are_computed_where_they_stand() -> None:
    """Positions tell which tokens they are. Between ranks move keys and values round the ring, and nothing else."""
    mesh = make_mesh(context=3)
    module = layer(mesh, layout="contiguous", method="pass_kv")
    arranged = shard_sequence(X, 3, "zigzag")
    positions = shard_sequence(np.arange(11)[None], 3, "zigzag")[0]
    segments = shard_sequence(np.zeros((1, 11), np.int32), 3, "zigzag", pad_value=-1)[0]
    want = shard_sequence(reference(module, X), 3, "zigzag")
    real = np.asarray(segments) >= 0
    graph, state = nnx.split(module)
    x = jax.device_put(arranged, NamedSharding(mesh, P(None, "context")))
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x, positions, segments)).lower(state, x).compile()
    np.testing.assert_allclose(np.asarray(run(state, x))[:, real], np.asarray(want)[:, real], atol=1e-5)
    keys_and_values = 2 * 4 * 2 * 2 * SIZE * 4  # of two sequences of 4 tokens, 2 heads each
    sent = [(c.opcode, c.sent) for c in collectives(run.as_text(), 3)]
    assert sorted(sent) == [("all-gather", 2 * 2 * 4 * 4), *[("collective-permute", keys_and_values)] * 2]


@nnx.jit
def decode(module: ContextParallelAttention, x: Array, segments: Any = None) -> Array:
    return module(x, segment_ids=segments, decode=True)


@pytest.mark.parametrize(
    ("ranks", "options", "chunks"),
    [
        (3, {}, (7, 1, 1, 2)),
        pytest.param(3, {"window": 4, "use_sinks": True}, (7, 1, 3), marks=pytest.mark.slow),
        pytest.param(1, {}, (11,), marks=pytest.mark.slow),
        pytest.param(2, {"method": "kvp"}, (1,) * 11, marks=pytest.mark.slow),
        pytest.param(5, {"method": "pass_q"}, (2, 9), marks=pytest.mark.slow),
        pytest.param(8, {"method": "pass_kv"}, (9, 1, 1), marks=pytest.mark.slow),
    ],
)
def test_prefill_and_decode_equal_dense_attention(ranks: int, options: Any, chunks: tuple[int, ...]) -> None:
    """The cache is full at the end, so all ranks have filled their slots evenly."""
    module = layer(make_mesh(context=ranks), **options)
    module.init_cache(2, 11)
    cut = np.cumsum((0, *chunks))
    outs = [decode(module, X[:, first:last], SEGMENTS[:, first:last]) for first, last in itertools.pairwise(cut)]
    np.testing.assert_allclose(jnp.concatenate(outs, 1), reference(module, X, SEGMENTS), atol=1e-5)
    assert module.cache is not None
    key = module.cache["key"][...]
    assert key.sharding.shard_shape(key.shape)[1] == -(-11 // ranks)
    if 11 % ranks == 0:
        with pytest.raises(ValueError, match="no room for 1 more"):
            module(X[:, :1], decode=True)
        assert np.isnan(decode(module, X[:, :1])).all()


def test_a_decode_sends_states_alone_and_updates_the_cache_in_place() -> None:
    module = layer(make_mesh(context=3))
    module.init_cache(2, 3000, jnp.float32)
    graph, state = nnx.split(module)

    def step(state: Any, x: Array) -> Any:
        module = nnx.merge(graph, state)
        return module(x, decode=True), nnx.state(module)

    program = jax.jit(step, donate_argnums=0).lower(state, X[:, :1]).compile()
    sent = [(c.opcode, c.sent) for c in collectives(program.as_text(), 3)]
    assert sent == [("all-gather", 2 * 2 * HEADS * (SIZE + 1) * 4)]
    own_cache = 2 * 1000 * (2 * 2 * SIZE * 4 + 8)  # bytes of one rank's keys, values, positions and segments
    assert program.memory_analysis().alias_size_in_bytes >= own_cache


E, A = AxisType.Explicit, AxisType.Auto
AXIS_TYPES = [(E, E), *(pytest.param(types, marks=pytest.mark.slow) for types in ((A, A), (E, A), (A, E)))]


@pytest.mark.parametrize("types", AXIS_TYPES, ids=str)
def test_mesh_of_set_mesh_with_data_parallelism(types: tuple[AxisType, ...]) -> None:
    mesh = jax.make_mesh((2, 3), ("data", "context"), axis_types=types, devices=jax.devices()[:6])
    x = jnp.concatenate([X, X[:, :1]], 1)
    want = reference(layer(None), x)
    with jax.set_mesh(mesh):
        module = layer(None, batch_axis="data")
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
        np.testing.assert_allclose(module(put(x, "data", "context")), want, atol=1e-5)
        module.init_cache(2, 12)
        prefill = decode(module, put(x[:, :9], "data", "context"))
        tokens = [decode(module, put(x[:, i : i + 1], "data")) for i in (9, 10, 11)]
    parts = [np.asarray(part) for part in (prefill, *tokens)]
    np.testing.assert_allclose(np.concatenate(parts, 1), want, atol=1e-5)


@pytest.mark.parametrize("types", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("jitted", [False, True])
def test_parameters_are_sharded_by_head_from_their_creation(types: tuple[AxisType, ...], jitted: bool) -> None:
    mesh = jax.make_mesh((2, 2), ("context", "tensor"), axis_types=types, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        make = functools.partial(
            ContextParallelAttention, WIDTH, HEADS, 2, SIZE, rope=RopeConfig(), use_bias=True, qk_norm=True
        )
        module = (nnx.jit(make) if jitted else make)(rngs=nnx.Rngs(0))
        shards = {name: x[...].sharding.shard_shape(x.shape) for name, x in nnx.to_flat_state(nnx.state(module))}
        assert shards == {
            ("wq",): (WIDTH, 2, SIZE),
            ("wk",): (WIDTH, 1, SIZE),
            ("wv",): (WIDTH, 1, SIZE),
            ("wo",): (2, SIZE, WIDTH),
            ("bq",): (2, SIZE),
            ("bk",): (1, SIZE),
            ("bv",): (1, SIZE),
            ("q_norm",): (SIZE,),
            ("k_norm",): (SIZE,),
        }
        out = nnx.jit(lambda module, x: module(x))(module, X)
        gradient = nnx.grad(lambda module: jnp.sum(module(X) ** 2))(module)
        assert gradient["wo"][...].sharding.shard_shape(gradient["wo"].shape) == (2, SIZE, WIDTH)
    plain = make(rngs=nnx.Rngs(0))
    nnx.update(plain, jax.tree.map(np.asarray, nnx.state(module)))
    np.testing.assert_allclose(out, reference(plain, X), atol=1e-5)


@pytest.mark.parametrize("types", [pytest.param(AxisType.Explicit, marks=pytest.mark.slow), AxisType.Auto])
def test_the_cache_can_be_made_inside_of_jit(types: AxisType) -> None:
    mesh = jax.make_mesh((3,), ("context",), axis_types=(types,), devices=jax.devices()[:3])
    init = nnx.jit(lambda module: module.init_cache(2, 12))
    with jax.set_mesh(mesh):
        module = layer(None)
        init(module)
    modules = [module]
    if types == AxisType.Auto:
        modules.append(layer(mesh))
        init(modules[1])
    for module in modules:
        assert module.cache["key"].sharding.shard_shape((2, 12, 2, SIZE)) == (2, 4, 2, SIZE)


@pytest.mark.slow
def test_scan_and_remat_over_layers() -> None:
    """Gradients of four scanned and rematerialised layers are those of the plain reference, one after the other."""

    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> ContextParallelAttention:
        options: Any = {"rope": RopeConfig(), "use_bias": True, "qk_norm": True}
        return ContextParallelAttention(WIDTH, HEADS, 2, SIZE, mesh=make_mesh(context=3), rngs=rngs, **options)

    stack = make(nnx.Rngs(0))

    def total(stack: ContextParallelAttention, compute: Any) -> Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def body(x: Array, layer: ContextParallelAttention) -> Array:
            return x + compute(layer, x)

        return jnp.sum(jnp.sin(body(X, stack)))

    ours, theirs = (
        nnx.jit(nnx.value_and_grad(functools.partial(total, compute=compute)))(stack)
        for compute in (nnx.remat(lambda layer, x: layer(x)), reference)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), ours, theirs)


def test_wrong_arguments_are_refused_by_name() -> None:
    mesh = make_mesh(context=2)
    for arguments, message in (
        ((16, 4, 3), "must be a multiple of num_kv_heads"),
        ((16, 3), "head_dim must be given"),
        ((0, 4), "hidden_size must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            ContextParallelAttention(*arguments, rngs=nnx.Rngs(0))
    for options, error, message in (
        ({"head_dim": 0}, ValueError, "head_dim must be an integer of at least 1"),
        ({"num_kv_heads": True}, TypeError, "num_kv_heads must be an integer"),
        ({"rope": 10_000.0}, TypeError, r"rope must be a longctx\.models\.RopeConfig or None, got float"),
        ({"norm_eps": -1}, ValueError, "norm_eps must be finite and 0 to inf"),
        ({"dtype": jnp.int32}, TypeError, "dtype must be floating point, got int32"),
        ({"param_dtype": int}, TypeError, "param_dtype must be floating point"),
    ):
        with pytest.raises(error, match=message):
            ContextParallelAttention(16, np.int64(4), rngs=nnx.Rngs(0), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_dim must be even"):
        ContextParallelAttention(15, 5, rope=RopeConfig(), rngs=nnx.Rngs(0))
    module = layer(mesh)
    with pytest.raises(ValueError, match="x must be"):
        module(X[..., :3])
    for x, message in ((X.tolist(), "x must be a jax.Array or numpy.ndarray"), (X.astype(int), "x must be floating")):
        with pytest.raises(TypeError, match=message):
            module(x)
    with pytest.raises(ValueError, match="positions must have the shape"):
        module(X, positions=np.arange(3))
    with pytest.raises(ValueError, match="no cache, call init_cache first"):
        module(X, decode=True)
    with pytest.raises(ValueError, match="max_length must be"):
        module.init_cache(2, 0)
    for sizes, message in (
        ((2, True), "max_length must be an integer"),
        ((2.0, 8), "batch_shape must be an integer"),
        ((2, 8, jnp.int32), "dtype must be floating point"),
    ):
        with pytest.raises(TypeError, match=message):
            module.init_cache(*sizes)  # type: ignore[arg-type]
    module.init_cache(2, 8)
    with pytest.raises(ValueError, match="must have the batch of the cache, 2"):
        module(X[:1, :1], decode=True)
    with pytest.raises(ValueError, match=r"mesh must be given, or set by jax\.set_mesh"):
        layer(None)(X)
    with pytest.raises(ValueError, match="method must be 'auto' or one of"):
        layer(mesh, method="ring")(X)
