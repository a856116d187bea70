"""Attention of sharded arrays: it stays sharded, as `jax.nn` does, and exact, with mesh axes of every type."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.kernels import attention, paged_attention, plan_attention, write_pages

SPECS = {"batch": P("data"), "heads": P(None, None, "tensor"), "both": P("data", None, "tensor")}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(data: int, tensor: int, kind: AxisType = AUTO) -> Mesh:
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(kind,) * 2)


def arrays(batch: tuple[int, ...], heads: int, kv_heads: int, length: int = 21) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (*batch, length, n, 8)) for key, n in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    ]


def place(mesh: Mesh, spec: P, xs: list[jax.Array]) -> list[jax.Array]:
    """The arrays, sharded along the dimensions that the mesh's axes divide."""
    specs = (P(*(n and (n if x.shape[i] % mesh.shape[n] == 0 else None) for i, n in enumerate(spec))) for x in xs)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(xs, specs, strict=True)]


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Results: out, and the gradients of q, k and v."""

    def loss(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = function(*qkv)
        return jnp.sum(jnp.sin(out)), out

    def results(*qkv: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*qkv)
        return out, gradients

    return results


def out_of(*qkv: jax.Array, **arguments: Any) -> jax.Array:
    return attention(*qkv, **arguments)[0]


reference = functools.partial(out_of, implementation="reference")


def compare(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2e-5)


def of_one_device(function: Callable[..., Any], xs: list[jax.Array]) -> Any:
    return jax.jit(function)(*(jnp.asarray(np.asarray(x)) for x in xs))


def moved(compiled: Any) -> dict[str, float]:
    """Bytes that a device sends, by collective; those of the loss, a number, are not counted."""
    found: dict[str, float] = {}
    for collective in collectives(compiled.as_text(), 8):
        if collective.sent > 8:
            found[collective.opcode] = found.get(collective.opcode, 0) + collective.sent
    return found


@pytest.mark.parametrize("name", ["both", *(pytest.param(x, marks=pytest.mark.slow) for x in ("batch", "heads"))])
def test_auto_axes_move_what_jax_nn_moves(name: str) -> None:
    """Nothing, forward and backward; results and gradients are sharded as the arrays."""
    mesh = mesh_of(2, 4)
    xs = place(mesh, SPECS[name], arrays((2,), 8, 4))
    programs = [
        jax.jit(with_gradients(function)).lower(*xs).compile()
        for function in (out_of, functools.partial(jax.nn.dot_product_attention, is_causal=True))
    ]
    assert moved(programs[0]) == moved(programs[1]) == {}
    out, gradients = programs[0](*xs)
    assert [x.sharding.spec for x in (out, *gradients)] == [SPECS[name]] * 4
    compare((out, gradients), of_one_device(with_gradients(reference), xs))


@pytest.mark.parametrize(
    ("data", "tensor", "batch", "heads", "kv_heads"),
    [
        (1, 4, (), 8, 2),  # two devices share a KV head
        pytest.param(2, 4, (2, 3), 4, 1, marks=pytest.mark.slow),  # all devices share it
        pytest.param(3, 1, (3,), 4, 2, marks=pytest.mark.slow),
        pytest.param(1, 3, (2,), 6, 3, marks=pytest.mark.slow),
        pytest.param(5, 1, (5, 2), 2, 2, marks=pytest.mark.slow),
        pytest.param(1, 6, (1,), 12, 3, marks=pytest.mark.slow),
        pytest.param(2, 2, (3,), 6, 2, marks=pytest.mark.slow),  # the batch is not divided
        pytest.param(1, 1, (2,), 4, 2, marks=pytest.mark.slow),
    ],
)
def test_auto_axes_are_exact(data: int, tensor: int, batch: tuple[int, ...], heads: int, kv_heads: int) -> None:
    mesh = mesh_of(data, tensor)
    spec = P(*("data",)[: len(batch)], *(None,) * max(0, len(batch) - 1), None, "tensor")
    xs = place(mesh, spec, arrays(batch, heads, kv_heads))
    forward = jax.jit(out_of).lower(*xs).compile()
    assert moved(forward) == {}
    assert forward.output_shardings.is_equivalent_to(xs[0].sharding, xs[0].ndim)
    compare(jax.jit(with_gradients(out_of))(*xs), of_one_device(with_gradients(reference), xs))


def test_auto_axes_with_sharded_queries() -> None:
    """Queries stay sharded by token, with positions of their own; keys and values are gathered, once."""
    mesh = mesh_of(2, 4)
    q, k, v = arrays((2,), 4, 2, 24)
    positions, segments = np.stack([np.arange(24)[::-1], np.arange(24)]), np.repeat(np.arange(4), 6)
    masks = {"q_positions": positions, "kv_positions": positions, "q_segment_ids": segments, "kv_segment_ids": segments}
    masks |= {"q_first": positions[0] // 2, "q_last": positions + 3, "causal": False}
    xs = place(mesh, P("data", "tensor"), [q, k, v])
    compiled = jax.jit(functools.partial(out_of, **masks)).lower(*xs).compile()
    assert list(moved(compiled)) == ["all-gather"]
    assert compiled.output_shardings.spec == P("data", "tensor")
    compare(compiled(*xs), of_one_device(functools.partial(reference, **masks), [q, k, v]))


@pytest.mark.parametrize("name", ["both", *(pytest.param(x, marks=pytest.mark.slow) for x in ("batch", "heads"))])
def test_explicit_axes(name: str) -> None:
    """Types say how results and gradients are sharded; nothing moves. `jax.vmap` of a sharded dimension alike."""
    mesh = mesh_of(2, 2, EXPLICIT)
    xs = place(mesh, SPECS[name], arrays((2,), 4, 2))
    want = of_one_device(with_gradients(reference), xs)
    compiled = jax.jit(with_gradients(out_of)).lower(*xs).compile()
    assert moved(compiled) == {}
    got = compiled(*xs)
    compare(got, want)
    for x, like in zip((got[0], *got[1]), (xs[0], *xs), strict=True):
        assert jax.typeof(x).sharding.spec == jax.typeof(like).sharding.spec
    with jax.set_mesh(mesh):
        compare(jax.jit(jax.vmap(out_of))(*xs), want[0])
    compare(attention(*xs)[0], want[0])


@pytest.mark.slow
def test_explicit_axes_share_kv_heads_and_take_replicated_keys() -> None:
    mesh = mesh_of(2, 4, EXPLICIT)
    xs = arrays((2,), 8, 2)
    placed = [*place(mesh, SPECS["both"], xs[:1]), *place(mesh, P(), xs[1:])]
    got = jax.jit(with_gradients(out_of))(*placed)
    compare(got, of_one_device(with_gradients(reference), xs))
    assert [jax.typeof(x).sharding.spec for x in got[1]] == [jax.typeof(x).sharding.spec for x in placed]


def test_explicit_keys_that_are_sharded_by_token_are_refused() -> None:
    q, k, v = place(mesh_of(2, 2, EXPLICIT), P(None, "tensor"), arrays((2,), 4, 2, 22))
    with pytest.raises(ValueError, match=r"k of .* is sharded over tensor along dimension 1.*ring_pass_kv"):
        attention(q, k, v)


@pytest.mark.parametrize("rest", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.slow)])
def test_manual_axes_beside_others(rest: AxisType) -> None:
    """Inside `jax.shard_map` over one axis, heads stay sharded over the other, forward and backward."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AUTO, rest))
    xs = arrays((2,), 4, 2)
    placed = place(mesh, SPECS["both"], xs) if rest == AUTO else place(mesh, SPECS["heads"], xs)

    def compiled(function: Callable[..., Any]) -> Any:
        mapped = jax.shard_map(
            with_gradients(function), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False
        )
        return jax.jit(mapped).lower(*placed).compile()

    with jax.set_mesh(mesh):
        ours, theirs = compiled(out_of), compiled(functools.partial(jax.nn.dot_product_attention, is_causal=True))
        got = ours(*placed)
    # Nothing, but for what `jax.shard_map` itself divides.
    assert moved(ours) == (moved(theirs) if rest == EXPLICIT else {})
    compare(got, of_one_device(with_gradients(reference), xs))


@pytest.mark.parametrize("kinds", [(EXPLICIT, AUTO), pytest.param((AUTO, EXPLICIT), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["both", *(pytest.param(name, marks=pytest.mark.slow) for name in ("replicated", "batch"))]
)
def test_explicit_axes_beside_automatic_ones(kinds: tuple[AxisType, AxisType], name: str) -> None:
    """Outside `jax.shard_map`, and mapped by `jax.vmap`."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=kinds)
    xs = arrays((2,), 4, 2)
    placed = place(mesh, SPECS.get(name, P()), xs)
    want = of_one_device(with_gradients(reference), xs)
    with jax.set_mesh(mesh):
        compiled = jax.jit(with_gradients(out_of)).lower(*placed).compile()
        compare(compiled(*placed), want)
        compare(jax.jit(jax.vmap(with_gradients(out_of)))(*placed), want)
        compare(out_of(*placed) + placed[0], want[0] + xs[0])
    assert moved(compiled) == {}


def test_vmap_of_sharded_arrays() -> None:
    """Mapped dimensions join the batch: nothing moves, and keys that are not mapped are shared."""
    mesh = mesh_of(2, 2)
    q, k, v = place(mesh, P("data", None, None, "tensor"), arrays((2, 3), 4, 2))
    nested = jax.vmap(jax.vmap(out_of), spmd_axis_name="data")
    compiled = jax.jit(nested).lower(q, k, v).compile()
    assert moved(compiled) == {}
    compare(compiled(q, k, v), of_one_device(reference, [q, k, v]))


@pytest.mark.slow
def test_vmap_shares_what_is_not_mapped() -> None:
    """Keys, queries, positions: values and gradients on one device."""
    q, k, v = arrays((2, 3), 4, 2)

    def gradients(function: Callable[..., Any], axes: Any, xs: Any) -> Any:
        return jax.grad(lambda *xs: jnp.sum(jnp.sin(jax.vmap(function, axes)(*xs))), (0, 1, 2))(*xs)

    for axes, xs in (((0, None, None), (q, k[0], v[0])), ((None, 0, 0), (q[0], k, v)), ((0, 0, None), (q, k, v[0]))):
        compare(gradients(out_of, axes, xs), gradients(reference, axes, xs))
    positions = jnp.stack([jnp.arange(21), jnp.arange(21)[::-1]])
    got, want = (
        jax.vmap(lambda q, k, v, p, f=f: f(q, k, v, q_positions=p))(q, k, v, positions) for f in (out_of, reference)
    )
    compare(got, want)


def test_vmap_of_limits_of_queries() -> None:
    """Of each entry, where all share the arrays, and the other way round; with gradients."""
    q, k, v = arrays((3,), 4, 2)
    first = jnp.arange(21)[None] - jnp.array([[3], [8], [30]])

    def results(function: Callable[..., Any], axes: tuple[int | None, int | None], q: jax.Array, x: jax.Array) -> Any:
        def loss(q: jax.Array) -> tuple[jax.Array, jax.Array]:
            of_one = lambda q, x: function(q, k[0], v[0], q_first=x, q_last=x + 12, causal=False)  # noqa: E731
            out = jax.vmap(of_one, axes)(q, x)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, has_aux=True))(q)

    for axes, xs in (((None, 0), (q[0], first)), ((0, None), (q, first[1])), ((0, 0), (q, first))):
        compare(results(out_of, axes, *xs), results(reference, axes, *xs))


@pytest.mark.parametrize("kind", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.slow)])
def test_scan_and_remat_of_sharded_arrays(kind: AxisType) -> None:
    """As layers of a model are trained: nothing moves, and gradients are those of one device."""
    xs = place(mesh_of(2, 2, kind), SPECS["both"], arrays((2,), 4, 2))

    def layers(function: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, _: (x + function(x, k, v), None))
        return jax.lax.scan(layer, q, length=2)[0]

    compiled = jax.jit(with_gradients(functools.partial(layers, out_of))).lower(*xs).compile()
    assert moved(compiled) == {}
    compare(compiled(*xs), of_one_device(with_gradients(functools.partial(layers, reference)), xs))


def test_planned_attention_stays_sharded() -> None:
    mesh = mesh_of(2, 2)
    xs = place(mesh, SPECS["both"], arrays((2,), 4, 2))
    compiled = jax.jit(lambda *qkv: out_of(*qkv, plan=plan_attention(*qkv[:2]))).lower(*xs).compile()
    assert moved(compiled) == {}
    compare(compiled(*xs), of_one_device(reference, xs))


@pytest.mark.parametrize("kind", [pytest.param(AUTO, marks=pytest.mark.slow), EXPLICIT])
def test_pages_of_sharded_heads(kind: AxisType) -> None:
    """Writing and attending move nothing where each device has the pages of its KV heads."""
    mesh = mesh_of(1, 2, kind)
    heads, of_pages = P(None, "tensor"), P(None, None, "tensor")
    k, v = jax.random.normal(jax.random.key(0), (2, 30, 2, 8))
    q = jax.random.normal(jax.random.key(1), (3, 4, 8))
    table, slots = np.array([[5, 2, 7, 0, 1, 3, 4, 6]]), np.arange(30)

    def step(q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        written = write_pages(pages, pages, k, v, table[0][slots // 4], slots % 4)
        return paged_attention(q, *written, table, None, np.array([30]), np.array([29, 8, 28]), np.zeros(3, int))

    pages = jnp.zeros((8, 4, 2, 8))
    xs = [*place(mesh, heads, [q, k, v]), *place(mesh, of_pages, [pages])]
    compiled = jax.jit(step).lower(*xs).compile()
    assert moved(compiled) == {}
    shardings = zip(compiled.output_shardings, (3, 2), strict=True)
    assert all(found.is_equivalent_to(NamedSharding(mesh, heads), ndim) for found, ndim in shardings)
    want, _ = of_one_device(
        lambda q, k, v: attention(
            q, k, v, q_positions=np.array([29, 8, 28]), kv_positions=np.arange(30), implementation="reference"
        ), [q, k, v])  # fmt: skip
    compare(compiled(*xs)[0], want)


def test_fp8_pages_of_sharded_heads() -> None:
    mesh = mesh_of(1, 2)
    pages, scale = np.full((4, 8, 2, 8), 0x38, np.uint8), np.ones((4, 2, 8), np.float32)  # 0x38 is 1
    q = jnp.ones((3, 4, 8))
    q, pages, scale = (
        jax.device_put(x, NamedSharding(mesh, P(*(None,) * at, "tensor"))) for at, x in ((1, q), (2, pages), (1, scale))
    )

    def attend(q: jax.Array, pages: jax.Array, scale: jax.Array) -> jax.Array:
        metadata = np.array([[3, 1]]), None, np.array([13]), np.array([12, 5, 9]), np.zeros(3, int)
        return paged_attention(q, pages, pages, *metadata, k_scale=scale, v_scale=2 * scale)[0]

    compiled = jax.jit(attend).lower(q, pages, scale).compile()
    assert moved(compiled) == {}
    assert compiled.output_shardings.is_equivalent_to(q.sharding, 3)
    compare(compiled(q, pages, scale), np.full((3, 4, 8), 2.0))


def test_one_device_has_no_operation_for_partitioning() -> None:
    xs = arrays((2,), 4, 2)
    assert "CustomSPMDPartitioning" not in jax.jit(out_of).lower(*xs).as_text()
