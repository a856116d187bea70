"""`to_nnx` computes what `Llama` and transformers compute, over any mesh; its loss and gradients are the dense ones."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_reference import Case, logits
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from longctx.models import Llama, LlamaConfig, RowwiseFp8, load_checkpoint, save_checkpoint
from longctx.nnx import from_nnx, next_token_targets, to_nnx
from longctx.parallel import make_mesh, shard_sequence

MODEL = Llama(LlamaConfig(61, 16, 24, 2, 4, 2, 8, max_positions=64))
LENGTH = 29
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 61, (2, LENGTH)).astype(np.int32)
SEGMENTS = np.repeat([[0, 1, 2, -1]], [10, 12, 4, 3], 1).repeat(2, 0).astype(np.int32)
POSITIONS = np.concatenate([np.arange(size) for size in (10, 12, 4, 3)])[None].repeat(2, 0).astype(np.int32)
TARGETS = np.asarray(next_token_targets(TOKENS, SEGMENTS))


@functools.cache
def params() -> Any:
    return MODEL.init(jax.random.key(0), initializer_range=0.2)


@functools.cache
def dense() -> tuple[Any, np.ndarray]:
    """(gradient of the summed loss, logits), both of plain `Llama`."""

    def total(params: Any) -> Any:
        logits = MODEL(params, TOKENS, POSITIONS, SEGMENTS)
        own = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(TARGETS, 0)[..., None], -1)[..., 0]
        return -jnp.sum(jnp.where(TARGETS >= 0, own, 0)), logits

    (loss, logits), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(params())
    return (float(loss), gradient), np.asarray(logits)


def total_of(tokens: Any, targets: Any, positions: Any, segments: Any):  # type: ignore[no-untyped-def]
    return lambda module: module.loss(tokens, targets, positions, segments)[0]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(None, {"remat": True, "chunk_size": 7}, marks=pytest.mark.slow),
        (3, {"remat": True, "chunk_size": 4}),
        pytest.param(None, {}, marks=pytest.mark.slow),
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, {"layout": "striped", "chunk_size": 5}, marks=pytest.mark.slow),
        pytest.param(5, {"method": "pass_q", "remat": True}, marks=pytest.mark.slow),
        pytest.param(8, {"layout": "contiguous", "method": "all_gather", "chunk_size": 1}, marks=pytest.mark.slow),
        pytest.param(2, {"method": "ulysses", "remat": True}, marks=pytest.mark.slow),
        pytest.param(8, {"remat": True, "chunk_size": 100, "implementation": "reference"}, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(ranks: int | None, options: Any) -> None:
    mesh = None if ranks is None else make_mesh(context=ranks)
    module = to_nnx(MODEL, params(), mesh, **options)
    (want, gradient), _ = dense()
    total = total_of(TOKENS, TARGETS, POSITIONS, SEGMENTS)
    got, got_gradient = nnx.jit(nnx.value_and_grad(total))(module)
    assert abs(float(got) - want) < 1e-4 * abs(want)
    for ours, theirs in zip(jax.tree.leaves(got_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


GEMMA = {"gemma_style": True, "qk_norm": True, "local_rope_theta": 500.0, "query_pre_attn_scalar": 5.0}
SLIDING = {"sliding_window": 4, "sliding_layers": (True, False)}


@pytest.mark.parametrize(
    ("options", "sizes", "method"),
    [
        (GEMMA | SLIDING, {"context": 3}, "pass_kv"),
        pytest.param(
            SLIDING | {"attention_sinks": True, "qkv_bias": True, "out_bias": True},
            {"context": 2, "tensor": 2},
            "pass_q",
            marks=pytest.mark.slow,
        ),
        pytest.param({"sliding_window": 4}, {"context": 2}, "ulysses", marks=pytest.mark.slow),
    ],
)
def test_layers_with_windows_and_sinks_over_a_mesh(options: Any, sizes: dict[str, int], method: Any) -> None:
    """As Gemma 3, gpt-oss and Mistral have them."""
    model = Llama(dataclasses.replace(MODEL.config, **options))
    params = model.init(jax.random.key(0), initializer_range=0.2)
    module = to_nnx(model, params, make_mesh(**sizes), method=method, remat=True)
    rows = TOKENS, POSITIONS, SEGMENTS
    want = jax.jit(model)(params, *rows)
    np.testing.assert_allclose(np.asarray(module(*rows))[SEGMENTS >= 0], want[SEGMENTS >= 0], atol=1e-4)
    gradient = nnx.jit(nnx.grad(total_of(TOKENS, TARGETS, POSITIONS, SEGMENTS)))(module)
    plain = nnx.jit(nnx.grad(total_of(TOKENS, TARGETS, POSITIONS, SEGMENTS)))(to_nnx(model, params))
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


E, A = AxisType.Explicit, AxisType.Auto
AXIS_TYPES = [(E, E), *(pytest.param(types, marks=pytest.mark.slow) for types in ((A, A), (E, A), (A, E)))]


@pytest.mark.parametrize("types", AXIS_TYPES, ids=str)
def test_mesh_of_set_mesh_with_data_parallelism(types: tuple[AxisType, ...]) -> None:
    mesh = jax.make_mesh((2, 3), ("data", "context"), axis_types=types, devices=jax.devices()[:6])
    (want, _), logits = dense()
    with jax.set_mesh(mesh):
        module = to_nnx(MODEL, params(), batch_axis="data")
        got = nnx.jit(lambda module: module(TOKENS, POSITIONS, SEGMENTS))(module)
        total, count = module.loss(TOKENS, TARGETS, POSITIONS, SEGMENTS)
    np.testing.assert_allclose(np.asarray(got)[SEGMENTS >= 0], logits[SEGMENTS >= 0], atol=1e-4)
    assert int(count) == (TARGETS >= 0).sum()
    assert abs(float(total) - want) < 1e-4 * abs(want)


@pytest.mark.slow
def test_heads_and_feed_forward_are_sharded_over_tensor() -> None:
    module = to_nnx(MODEL, params(), make_mesh(context=2, tensor=2), remat=True, chunk_size=4)
    assert module.params["layers"]["w_up"][...].sharding.shard_shape((2, 16, 24)) == (2, 16, 12)
    (_, gradient), logits = dense()
    got = module(TOKENS, POSITIONS, SEGMENTS)
    np.testing.assert_allclose(np.asarray(got)[SEGMENTS >= 0], logits[SEGMENTS >= 0], atol=1e-4)
    total = total_of(TOKENS, TARGETS, POSITIONS, SEGMENTS)
    got_gradient = nnx.jit(nnx.grad(total))(module)
    for ours, theirs in zip(jax.tree.leaves(got_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
def test_tokens_arranged_before_give_the_same_loss() -> None:
    module = to_nnx(MODEL, params(), make_mesh(context=3), layout="contiguous", remat=True, chunk_size=4)
    arrange = lambda x, value: shard_sequence(x, 3, "zigzag", pad_value=value)  # noqa: E731
    rows = [arrange(x, value) for x, value in ((TOKENS, 0), (TARGETS, -1), (POSITIONS, 0), (SEGMENTS, -1))]
    total, count = module.loss(*rows)
    assert abs(float(total) - dense()[0][0]) < 1e-4 * float(total)
    assert int(count) == (TARGETS >= 0).sum()


FAMILIES = [
    Case("qwen3", layers=2, head_dim=16),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            Case(tied=True, rope="llama3"),
            Case("qwen2", kv_heads=8, rope="yarn"),
            Case("mistral", kv_heads=1),
        )
    ),
]


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_logits_equal_those_of_transformers(case: Case, tmp_path: Path) -> None:
    reference = case.write(tmp_path / "in")
    module = to_nnx(*load_checkpoint(tmp_path / "in"), make_mesh(context=3))
    tokens = RNG.integers(0, 96, (2, 23))
    want = logits(reference, tokens)
    np.testing.assert_allclose(module(tokens), want, atol=1e-4)
    # And what is saved, transformers loads.
    save_checkpoint(tmp_path / "out", *from_nnx(module))
    again = type(reference).from_pretrained(tmp_path / "out")
    np.testing.assert_allclose(logits(again, tokens), want, atol=1e-5)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=5))
def test_targets_are_the_next_tokens_of_a_segment(runs: list[tuple[int, bool]]) -> None:
    parts = [np.full(size, -1 if pads else i) for i, (size, pads) in enumerate(runs)]
    segments = np.concatenate([*parts, np.full(20, -1)])[:20]  # one shape, which compiles once
    tokens = np.arange(len(segments)) + 10
    want = [
        tokens[i + 1] if i + 1 < len(tokens) and segments[i] == segments[i + 1] >= 0 else -1 for i in range(len(tokens))
    ]
    assert next_token_targets(tokens, segments).tolist() == want


def test_targets_have_the_shape_of_tokens_and_take_integers_alone() -> None:
    assert next_token_targets(np.zeros((2, 0), int)).shape == (2, 0)
    for arguments, error, message in (
        (([0.5, 1.5],), TypeError, "tokens must be integers"),
        ((5,), ValueError, r"tokens must be \[\*B, T\]"),
        (([5, 6], [0.0, 1.0]), TypeError, "segment_ids must be integers"),
        (([5, 6], [0, 2**32]), ValueError, "segment_ids must fit into int32"),
    ):
        with pytest.raises(error, match=message):
            next_token_targets(*arguments)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_tokens_may_be_of_small_unsigned_types(dtype: type) -> None:
    module, tokens = to_nnx(MODEL, params()), TOKENS.astype(dtype)
    np.testing.assert_array_equal(module(tokens), module(TOKENS))
    assert module.loss(tokens) == module.loss(TOKENS)


def test_default_targets_and_scalar_batches() -> None:
    module = to_nnx(MODEL, params())
    total, count = module.loss(TOKENS[0])
    assert int(count) == LENGTH - 1
    given_targets, _ = module.loss(TOKENS[0], next_token_targets(TOKENS[0]))
    assert float(total) == float(given_targets)
    assert module(TOKENS[0]).shape == (LENGTH, 61)
    with pytest.raises(ValueError, match="targets must be given where positions are"):
        module.loss(TOKENS, positions=POSITIONS)


def test_rows_that_are_one_array_are_padded_apart() -> None:
    """Tokens that are their own positions, segments and targets; each of these is padded with a value of its own."""
    index = np.arange(7)[None]
    loss = nnx.jit(lambda module: module.loss(index, index, index, index)[0])
    want, got = (loss(to_nnx(MODEL, params(), mesh)) for mesh in (None, make_mesh(context=3)))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_wrong_arguments_are_refused_by_name() -> None:
    for options, message in (
        ({"method": "kvp"}, "method must be one of pass_kv, pass_q, all_gather"),
        ({"layout": "spiral"}, "layout must be one of"),
        ({"chunk_size": 0}, "chunk_size must be an integer of at least 1"),
        ({"implementation": "cuda"}, "implementation must be"),
        ({"mesh": make_mesh(context=2), "axis_name": "ring"}, "axis_name must be an axis of the mesh"),
        ({"mesh": make_mesh(context=2, stage=2)}, "mesh must have one stage"),
        ({"mesh": make_mesh(context=1, tensor=8)}, "must divide num_heads"),
        ({"mesh": make_mesh(context=2), "batch_axis": "context"}, "batch_axis must be another axis"),
        ({"batch_axis": "data"}, "mesh must be given for head_axis and batch_axis"),
    ):
        with pytest.raises(ValueError, match=message):
            to_nnx(MODEL, params(), **options)  # type: ignore[arg-type]
    for options, message in (
        ({"chunk_size": True}, "chunk_size must be an integer"),
        ({"remat": "no"}, "remat must be True or False"),
        ({"fsdp": 1}, "fsdp must be True or False"),
    ):
        with pytest.raises(TypeError, match=message):
            to_nnx(MODEL, params(), **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a longctx\.models\.Llama, got dict"):
        to_nnx(params(), MODEL)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"params\['embed'\] must be floating point, got int32"):
        to_nnx(MODEL, params() | {"embed": params()["embed"].astype(int)})
    fp8 = dataclasses.replace(MODEL.config, quantization=RowwiseFp8.of(2))
    with pytest.raises(ValueError, match="RowwiseFp8 weights can't be fine-tuned"):
        to_nnx(Llama(fp8), params())
    with pytest.raises(ValueError, match=r"params must be those of model\.init"):
        to_nnx(MODEL, {"embed": params()["embed"]})
    with pytest.raises(ValueError, match="must have the shape"):
        to_nnx(MODEL, params() | {"embed": params()["embed"][1:]})
    with pytest.raises(TypeError, match="module must be a LlamaModule"):
        from_nnx(MODEL)  # type: ignore[arg-type]


@pytest.mark.parametrize("types", [pytest.param(AxisType.Explicit, marks=pytest.mark.slow), AxisType.Auto])
def test_modules_can_be_made_inside_of_a_trace(types: AxisType) -> None:
    make = lambda mesh=None: to_nnx(MODEL, MODEL.init(jax.random.key(0)), mesh, fsdp=True)  # noqa: E731
    shape = lambda module: module.params["embed"].shape  # noqa: E731
    assert shape(nnx.eval_shape(make)) == (61, 16)
    mesh = jax.make_mesh((2,), ("context",), axis_types=(types,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        assert shape(nnx.eval_shape(make)) == (61, 16)
        made = [nnx.jit(make)()]
        abstract = mesh.abstract_mesh
        assert to_nnx(MODEL, params(), abstract).plan.mesh == mesh
    if types == AxisType.Auto:
        made.append(nnx.jit(lambda: make(mesh))())
    for module in made:
        assert module.params["embed"].sharding.spec[1] == "context"
    with pytest.raises(ValueError, match=r"mesh must have devices, or be that of jax\.set_mesh"):
        to_nnx(MODEL, params(), abstract)


def test_the_implementation_is_not_ignored_on_one_device() -> None:
    with pytest.raises(NotImplementedError, match="implementation 'mosaic_gpu' needs an NVIDIA GPU"):
        to_nnx(MODEL, params(), implementation="mosaic_gpu")(TOKENS)


def test_wrong_tokens_are_refused_by_name() -> None:
    module = to_nnx(MODEL, params())
    for arguments, message in (
        ((TOKENS + 61,), "`tokens` from .* outside the vocabulary"),
        ((TOKENS, TARGETS + 61), "`targets` from .* outside the vocabulary"),
        ((TOKENS, TARGETS[:, 1:]), "`targets` .* differ in shape"),
        ((TOKENS, TARGETS, POSITIONS + 60), "`positions` from .* outside the model's context"),
        ((TOKENS, TARGETS, POSITIONS, SEGMENTS[0]), "`segment_ids` .* differ in shape"),
        ((TOKENS, TARGETS, POSITIONS, SEGMENTS + np.int64(2**32)), "`segment_ids` must fit into int32"),
        ((np.zeros((1, 65), int),), "65 is more than the model's context"),
    ):
        with pytest.raises(ValueError, match=message):
            module.loss(*arguments)
    with pytest.raises(ValueError, match="`segment_ids` must fit into int32"):
        MODEL(params(), TOKENS, POSITIONS, SEGMENTS + np.int64(2**32))
    packed = np.tile(np.arange(13), 5)[None]
    module.loss(packed, packed, packed, np.repeat(np.arange(5), 13)[None])  # 65 tokens, but of five sequences
