"""Context-parallel attention of whole arrays on all kinds of meshes, against the oracle."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.kernels import attention
from longctx.parallel import H100_RDMA, context_parallel_attention, layout_hops, make_mesh, shard_sequence
from longctx.parallel.reshard import padded_length, reshard_to_contiguous, reshard_to_layout
from longctx.parallel.topology import hardware_of

METHODS = ("pass_kv", "pass_q", "all_gather", "kvp", "ulysses")


def arrays(heads: int, kv_heads: int, new: int, cached: int, batch: tuple[int, ...] = ()) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    lengths = ((new, heads), (new + cached, kv_heads), (new + cached, kv_heads))
    return [jax.random.normal(key, (*batch, *shape, 8)) for key, shape in zip(keys, lengths, strict=True)]


def compare(mesh: jax.sharding.Mesh, q: jax.Array, k: jax.Array, v: jax.Array, **arguments: object) -> None:
    """Values and gradients, under jit."""
    names = "positions", "ids", "first", "last", "window", "soft_cap", "sinks", "causal", "bias"
    masks = {name: x for name, x in arguments.items() if name.endswith(names)}

    def loss(compute, q: jax.Array, k: jax.Array, v: jax.Array):  # type: ignore[no-untyped-def]
        out = compute(q, k, v)
        return jnp.sum(jnp.sin(out)), out

    def run(compute, *arrays: jax.Array):  # type: ignore[no-untyped-def]
        gradients, out = jax.jit(jax.grad(functools.partial(loss, compute), (0, 1, 2), has_aux=True))(*arrays)
        return out, *gradients

    got = run(functools.partial(context_parallel_attention, mesh=mesh, **arguments), q, k, v)
    unsharded = (jnp.asarray(np.asarray(x)) for x in (q, k, v))
    want = run(lambda q, k, v: attention(q, k, v, **masks, implementation="reference")[0], *unsharded)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "method", ["pass_q", *(pytest.param(x, marks=pytest.mark.slow) for x in (*METHODS, "auto") if x != "pass_q")]
)
def test_one_axis_and_a_cached_prefix(method: str) -> None:
    """37 new tokens, of which 5 ranks get 8 at most, after 21 cached ones."""
    positions = {"q_positions": 21 + np.arange(37), "kv_positions": np.arange(58)}
    heads = 10 if method == "ulysses" else 4
    compare(make_mesh(context=5), *arrays(heads, 2, 37, 21), method=method, layout="zigzag", **positions)


@pytest.mark.parametrize(
    ("layout", "window"),
    [
        ("contiguous", (6, 0)),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("zigzag", (4, 0)), ("striped", (2, 1)))),
    ],
)
def test_window(layout: str, window: tuple[int, int]) -> None:
    """Few hops of the ring are left; heads are sharded, too, and sinks with them."""
    q, k, v = arrays(4, 2, 45, 0)
    options = {"window": window, "causal": window[1] == 0, "sinks": jnp.linspace(-1, 2, 4), "logits_soft_cap": 2.0}
    assert len(layout_hops(45, 4, layout, causal=window[1] == 0, window=window)) < 5 - (layout != "striped")
    compare(make_mesh(context=4, tensor=2), q, k, v[..., :3], method="pass_kv", layout=layout, **options)


@pytest.mark.parametrize("lengths", [(8, 48), pytest.param((48, 8), marks=pytest.mark.slow)])
def test_a_window_over_keys_of_another_length_than_the_queries(lengths: tuple[int, int]) -> None:
    """A rank's queries and its keys are then at other positions, also those of ranks that are not beside each other."""
    q, k = (jnp.sin(jnp.arange(n * 32.0)).reshape(n, 4, 8) for n in lengths)
    compare(
        make_mesh(context=4), q, k, k[..., ::-1], method="pass_kv", layout="contiguous", window=(1, 0), causal=False
    )


def test_a_window_of_more_hops_than_are_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of seven hops are left, of which a loop takes those in the middle."""
    monkeypatch.setattr("longctx.parallel.ring.MOST_UNROLLED", 4)
    assert layout_hops(21, 7, "contiguous", window=(13, 0)) == (0, 1, 2, 3, 4, 5)
    q, k, v = arrays(2, 1, 21, 0)
    compare(make_mesh(context=7), q, k, v, method="pass_kv", layout="contiguous", window=(13, 0))


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("pass_kv", "zigzag"),
        *(pytest.param(x, "striped", marks=pytest.mark.slow) for x in METHODS if x != "pass_kv"),
    ],
)
def test_first_and_last_position_of_each_query(method: str, layout: str) -> None:
    """Chunks of one sequence, and a prefix of the other one; queries that pad the shards have limits too."""
    positions = np.arange(29)
    first = np.stack([positions // 8 * 8, 0 * positions])
    limits = {"q_first": first, "q_last": np.maximum(positions, 11), "causal": False}
    compare(make_mesh(context=4), *arrays(4, 2, 29, 0, (2,)), method=method, layout=layout, **limits)


def test_the_choice_is_for_the_devices_of_the_mesh(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is logged names the hardware that was found, an unknown one with a warning, or the one that was given."""
    mesh, (q, k, v) = make_mesh(context=2), arrays(4, 2, 8, 0)
    caplog.set_level("INFO", "longctx.parallel")

    def hardware(**arguments: object) -> str:
        caplog.clear()
        jax.eval_shape(lambda: context_parallel_attention(q, k, v, mesh=mesh, **arguments))
        return caplog.messages[-1].splitlines()[1]

    assert hardware().startswith("hardware: cpu, memory: ")
    assert hardware(hardware=H100_RDMA).startswith("hardware: H100 (500 W), RDMA: ")
    of_kind = lambda kind: lambda *_: hardware_of(SimpleNamespace(platform="gpu", device_kind=kind), True)  # noqa: E731
    monkeypatch.setattr("longctx.parallel.context_parallel.hardware_of", of_kind("NVIDIA A100-SXM4-80GB"))
    assert hardware().startswith("hardware: A100, nvlink-a100: ")
    monkeypatch.setattr("longctx.parallel.context_parallel.hardware_of", of_kind("NVIDIA L4"))
    with pytest.warns(UserWarning, match="no figures of the device 'NVIDIA L4' are known"):
        assert hardware().startswith("hardware: H100, assumed for NVIDIA L4, nvlink-h100: ")


@pytest.mark.parametrize(
    ("method", "layout", "kv_heads"),
    [
        ("pass_kv", "striped", 2),
        pytest.param("pass_q", "contiguous", 8, marks=pytest.mark.slow),
        pytest.param("all_gather", "zigzag", 2, marks=pytest.mark.slow),
        ("kvp", "striped", 2),
        ("ulysses", "striped", 2),
    ],
)
def test_composes_with_tensor(method: str, layout: str, kv_heads: int) -> None:
    """One ring for each KV head group; with fewer KV heads than tensor ranks, they are repeated."""
    compare(make_mesh(context=2, tensor=4), *arrays(8, kv_heads, 27, 0, (2,)), method=method, layout=layout)


def test_ranks_of_both_axes_have_their_heads_of_biases_and_sinks() -> None:
    """Of 8 heads those of a tensor rank are divided once more."""
    options = {"bias": cases.alibi, "sinks": jnp.linspace(-1, 2, 8), "window": (9, 0)}
    compare(make_mesh(context=2, tensor=2), *arrays(8, 2, 27, 0, (2,)), method="ulysses", **options)


@pytest.mark.parametrize("kv_heads", [8, 6])
def test_auto_takes_ulysses_where_it_sends_less(kv_heads: int, caplog: pytest.LogCaptureFixture) -> None:
    """Over a slow link, with all heads distinct; 4 ranks don't divide 6 heads."""
    q, k, v = arrays(kv_heads, kv_heads, 64, 0)
    slow = dataclasses.replace(H100_RDMA, bandwidth=1e6, latency=0.0)
    caplog.set_level("INFO", "longctx.parallel")
    jax.eval_shape(lambda: context_parallel_attention(q, k, v, mesh=make_mesh(context=4), hardware=slow))
    assert caplog.messages[-1].startswith("ulysses, by predicted") == (kv_heads == 8)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_reshard_to_layout_and_back(layout: str, ranks: int) -> None:
    """Resharding inside `shard_map` gives the order of `shard_sequence`."""
    length = padded_length(50, ranks, layout)
    x = jnp.arange(2 * length * 3).reshape(2, length, 3)

    def local(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        shard = reshard_to_layout(x, "context", layout)
        return shard, reshard_to_contiguous(shard, "context", layout)

    spec = P(None, "context")
    mapped = jax.shard_map(local, mesh=make_mesh(context=ranks), in_specs=spec, out_specs=(spec, spec))
    shards, back = jax.jit(mapped)(x)
    np.testing.assert_array_equal(shards, shard_sequence(x, ranks, layout))
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_no_rank_holds_a_whole_sequence(layout: str) -> None:
    """Only positions and segments are gathered, 8 bytes a token; keys travel round once, and shards there and back."""
    ranks, length = 4, 4096
    mesh = make_mesh(context=ranks)
    shapes = [(length, heads, 16) for heads in (8, 2, 2)]
    sharding = NamedSharding(mesh, P("context"))
    shards = [jax.ShapeDtypeStruct(shape, "f4", sharding=sharding) for shape in shapes]
    attend = functools.partial(context_parallel_attention, mesh=mesh, method="pass_kv", layout=layout)
    found = collectives(jax.jit(attend, out_shardings=sharding).lower(*shards).compile().as_text(), ranks)
    assert sum(x.sent for x in found if x.opcode == "all-gather") <= 8 * length
    kv_shard, q_shard = (length // ranks * heads * 16 * 4 for heads in (4, 8))
    moved = 0 if layout == "contiguous" else 2 * q_shard + kv_shard + 4 * 8 * length / ranks
    assert sum(x.sent for x in found) <= (ranks - 1) * kv_shard + moved + 8 * length


def test_packed_sequences() -> None:
    segments = np.repeat([0, 1, 2, -1], [11, 1, 20, 4])
    positions = np.concatenate([np.arange(n) for n in (11, 1, 20, 4)])
    tokens = {
        f"{side}_{name}": x for side in ("q", "kv") for name, x in (("positions", positions), ("segment_ids", segments))
    }
    compare(make_mesh(context=3), *arrays(4, 4, 36, 0), method="pass_kv", **tokens)


@pytest.mark.parametrize("length", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_positions_that_equal_segments_are_padded_apart(length: int) -> None:
    """One array twice in a program, padded with 0 and with -1. A single token has position 0 and segment 0."""
    index = np.arange(length)
    names = ("q_positions", "kv_positions", "q_segment_ids", "kv_segment_ids") if length > 1 else ()
    compare(make_mesh(context=3), *arrays(4, 2, length, 0), method="pass_kv", **dict.fromkeys(names, index))


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)])
def test_a_sharded_batch_stays_sharded_without_batch_axis(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(kind,) * 2)
    q, k, v = arrays(4, 2, 24, 0, (2,))
    sharding = NamedSharding(mesh, P("data"))
    sharded = [jax.device_put(x, sharding) for x in (q, k, v)]
    compute = functools.partial(context_parallel_attention, mesh=mesh, method="pass_kv", layout="contiguous")
    compiled = jax.jit(compute).lower(*sharded).compile()
    over_data = [x for x in collectives(compiled.as_text(), 2) if "data" in x.axes({"data": 2, "context": 2})]
    assert all(x.sent <= 8 for x in over_data)  # a number at most
    assert compiled.output_shardings.spec[0] == "data"
    np.testing.assert_allclose(compiled(*sharded), attention(q, k, v, implementation="reference")[0], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("use_mesh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_explicit_axes(use_mesh: bool) -> None:
    """Inputs whose types carry their sharding: the result's type carries the queries'."""
    mesh = jax.make_mesh((2, 2), ("context", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    sharded = [jax.device_put(x, NamedSharding(mesh, P("context", "tensor"))) for x in arrays(4, 2, 32, 0)]
    with jax.set_mesh(mesh) if use_mesh else jax.enable_x64(False):
        compare(mesh, *sharded, method="pass_kv")
        out = jax.jit(functools.partial(context_parallel_attention, mesh=mesh))(*sharded)
        assert out.sharding.spec == P("context", "tensor", None)


def test_outside_of_jit_and_in_float64() -> None:
    with jax.enable_x64(True):
        q, k, v = (x.astype(jnp.float64) for x in arrays(4, 2, 19, 0))
        out = context_parallel_attention(q, k, v, mesh=make_mesh(context=2))
        want = attention(q, k, v, implementation="reference")[0]
        np.testing.assert_allclose(out, want, rtol=0, atol=1e-13)


def test_no_queries_or_no_keys() -> None:
    q, k = jnp.ones((0, 4, 8)), jnp.ones((5, 2, 8))
    mesh = make_mesh(context=4)
    assert context_parallel_attention(q, k, k, mesh=mesh, causal=False).shape == (0, 4, 8)
    out = context_parallel_attention(jnp.ones((5, 4, 8)), k[:0], k[:0], mesh=mesh, causal=False)
    assert not out.any()


@pytest.mark.slow
def test_half_precision_stays_wide_until_the_last_merge() -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays(4, 2, 64, 0))
    out = context_parallel_attention(q, k, v, mesh=make_mesh(context=2))
    assert out.dtype == jnp.bfloat16
    wide = context_parallel_attention(q, k, v, mesh=make_mesh(context=2), out_dtype=jnp.float32)
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))


def test_explicit_axes_of_another_mesh() -> None:
    explicit = jax.make_mesh((2, 2), ("context", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    q = jax.device_put(jnp.ones((8, 4, 8)), NamedSharding(explicit, P("context")))
    with pytest.raises(ValueError, match="mesh must be that of the arrays"):
        context_parallel_attention(q, q, q, mesh=make_mesh(context=4))


Q, K = jnp.ones((6, 4, 8)), jnp.ones((6, 2, 8))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"method": "ring"},
            ValueError,
            "method must be 'auto' or one of pass_kv, pass_q, all_gather, kvp, ulysses, got",
        ),
        ({"layout": "spiral"}, ValueError, "layout must be one of contiguous, zigzag, striped, got 'spiral'"),
        (
            {"axis_name": "sequence"},
            ValueError,
            "axis_name must be an axis of the mesh, stage, context, tensor, got",
        ),
        ({"mesh": "mesh"}, TypeError, "mesh must be a jax.sharding.Mesh, got str"),
        ({"head_axis": "context"}, ValueError, "head_axis must be another axis of the mesh, .* got 'context'"),
        ({"head_axis": "tensr"}, ValueError, "head_axis must be another axis of the mesh, .* got 'tensr'"),
        ({"hardware": "h100"}, TypeError, "hardware must be a longctx.parallel.Hardware, got str"),
        ({"method": ["pass_kv"]}, ValueError, "method must be 'auto' or one of"),
        ({"q": jnp.ones((6, 6, 8)), "k": jnp.ones((6, 3, 8)), "v": jnp.ones((6, 3, 8))}, ValueError, "k's 3"),
        ({"q": jnp.ones((5, 4, 8))}, ValueError, "q_positions must be given when causal and T != S"),
        ({"kv_positions": jnp.arange(6)}, ValueError, "q_positions must be given when causal and kv_positions are"),
        (
            {"q_segment_ids": jnp.arange(6)},
            ValueError,
            "kv_segment_ids must be given both or neither",
        ),
        ({"k": jnp.ones((6, 3, 8)), "v": jnp.ones((6, 3, 8))}, ValueError, "multiple of k's heads"),
        ({"implementation": "cuda"}, ValueError, "implementation must be None, one of"),
        ({"out_dtype": jnp.int32}, TypeError, "out_dtype must be a floating-point type, got int32"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"q": Q, "k": K, "v": K, "mesh": make_mesh(context=2, tensor=2)} | changes
    with pytest.raises(error, match=message):
        context_parallel_attention(**arguments)  # type: ignore[arg-type]


def test_make_mesh_takes_the_first_devices_and_rejects_too_many() -> None:
    mesh = make_mesh(context=2, tensor=3)
    assert mesh.shape == {"stage": 1, "context": 2, "tensor": 3}
    assert mesh.devices.ravel().tolist() == jax.devices()[:6]
    assert mesh.axis_types == (AxisType.Auto,) * 3
    with pytest.raises(ValueError, match="at most the number of devices, 8"):
        make_mesh(context=3, tensor=3)
    for wrong in (0, True):
        with pytest.raises(ValueError, match=f"tensor must be a positive integer, got {wrong}"):
            make_mesh(tensor=wrong)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_with_data_and_names_of_ones_own(kind: AxisType) -> None:
    mesh = make_mesh(context=2, tensor=2, data=2, names={"context": "sp", "tensor": "tp"}, axis_type=kind)
    assert mesh.shape == {"data": 2, "stage": 1, "sp": 2, "tp": 2}
    assert mesh.devices.ravel().tolist() == jax.devices()[:8]
    with jax.set_mesh(mesh):
        q, k = (jax.device_put(np.asarray(x[None].repeat(2, 0)), P("data")) for x in (Q, K))
        out = context_parallel_attention(q, k, k, method="pass_kv", axis_name="sp", head_axis="tp", batch_axis="data")
    dense = attention(Q, K, K)[0]
    np.testing.assert_allclose(np.asarray(out), np.asarray(dense)[None].repeat(2, 0), atol=1e-5)
    wrong: list[Any] = [{"ring": "sp"}, {"context": "tensor"}, {"context": 3}, ["sp"]]
    for names in wrong:
        with pytest.raises(ValueError, match="names must give different names to some of the axes data, stage"):
            make_mesh(data=2, names=names)
