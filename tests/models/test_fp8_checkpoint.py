"""Checkpoints with FP8 weights: both forms, written and read, sharded, damaged; and `longctx quantize`."""

import dataclasses
import functools
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp8_numpy
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from safetensors import deserialize
from safetensors.numpy import save_file

from longctx.cli import main
from longctx.models import CheckpointError, Llama, LlamaConfig, RowwiseFp8, load_checkpoint, save_checkpoint, verify
from longctx.models.checkpoint import read_model
from longctx.models.sharded_params import abstract_sharded_params, shard_params
from longctx.parallel import make_mesh

CONFIG = LlamaConfig(96, 64, 80, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=8, max_positions=256)
DOWN = "model.layers.1.mlp.down_proj.weight"
TOKENS = np.arange(24) * 7 % 96
# What `verify` says of a directory without a tokenizer, as all are here.
NO_TOKENIZER = "tokenizer.json"


def load_file(file: Path) -> dict[str, np.ndarray]:
    """As safetensors' own function, whose NumPy has no dtype for e4m3."""
    dtypes = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": fp8_numpy.E4M3}
    return {
        name: np.frombuffer(stored["data"], dtypes[stored["dtype"]]).reshape(stored["shape"])
        for name, stored in deserialize(file.read_bytes())
    }


@functools.cache
def make(modules: str, bound: float | None = 1200.0, dtype: Any = jnp.float32) -> tuple[Llama, dict]:
    config = dataclasses.replace(CONFIG, quantization=RowwiseFp8.of(4, modules, bound))
    return Llama(config), jax.jit(lambda: Llama(config).init(jax.random.key(0), dtype, 0.2))()


def assert_same(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert jax.tree.map(lambda x: x.dtype, actual) == jax.tree.map(lambda x: x.dtype, expected)


def problems(directory: Path) -> list[str]:
    return [problem for problem in verify(directory) if NO_TOKENIZER not in problem]


@pytest.mark.parametrize(
    ("modules", "bound", "dtype"),
    [
        pytest.param("ffn", 1200.0, jnp.float32, marks=pytest.mark.slow),
        ("ffn", None, jnp.bfloat16),
        pytest.param("all", None, jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_what_is_saved_is_loaded(modules: str, bound: float | None, dtype: Any, tmp_path: Path) -> None:
    model, params = make(modules, bound, dtype)
    save_checkpoint(tmp_path, model, params, max_shard_bytes=50_000)
    loaded_model, loaded = load_checkpoint(tmp_path)
    assert loaded_model == model
    assert_same(loaded, params)
    assert problems(tmp_path) == []
    tensors = {name: x for file in tmp_path.glob("*.safetensors") for name, x in load_file(file).items()}
    assert tensors[DOWN].dtype == ml_dtypes.float8_e4m3fn
    assert (tensors[DOWN].shape, tensors[f"{DOWN}_scale"].shape) == ((64, 80), (64, 1))
    assert tensors[f"{DOWN}_scale"].dtype == np.float32
    assert ("model.layers.0.mlp.down_proj.weight_scale" in tensors) == (modules == "all")
    assert read_model(tmp_path) == (model, jnp.dtype(dtype))


@pytest.mark.slow
def test_scales_of_16_bits_are_read(tmp_path: Path) -> None:
    """compressed-tensors writes them in the model's dtype."""
    model, params = make("all", None)
    save_checkpoint(tmp_path, model, params)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {name: x.astype(ml_dtypes.bfloat16) if name.endswith("scale") else x for name, x in tensors.items()}, file
    )
    _, loaded = load_checkpoint(tmp_path)
    scale = loaded["layers"]["w_down"].scale
    assert scale.dtype == jnp.float32
    np.testing.assert_array_equal(scale[1], tensors[f"{DOWN}_scale"][:, 0].astype(ml_dtypes.bfloat16))


SOME = [("ffn", (2, 1, 4), jnp.bfloat16), ("ffn", (3, 1, 1), jnp.float32)]
REST = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(
        ["ffn", "all"], [(1, 1, 2), (2, 1, 2), (3, 1, 2), (4, 1, 1), (1, 1, 4), (2, 1, 4)], [jnp.float32, jnp.bfloat16]
    )
]


@pytest.mark.parametrize(("modules", "sizes", "dtype"), [*SOME, *REST])
def test_a_mesh_loads_what_shard_params_makes(
    modules: str, sizes: tuple[int, int, int], dtype: Any, tmp_path: Path
) -> None:
    """Stages whose layers differ in kind have one structure.

    Under `"ffn"` the first layer of stage 0 isn't quantised, and that of stage 1 is.
    """
    model, params = make(modules, dtype=dtype)
    save_checkpoint(tmp_path, model, params)
    mesh = make_mesh(*sizes)
    _, loaded = load_checkpoint(tmp_path, mesh)
    sharded = shard_params(loaded, model.config, mesh)
    assert_same(sharded, shard_params(params, model.config, mesh))
    wanted = abstract_sharded_params(model.config, mesh, dtype)["layers"]

    def describe(x: Any) -> Any:
        return x.shape, x.sharding, np.uint16 if x.dtype == jnp.bfloat16 else x.dtype  # the bits of stacks on a CPU

    assert jax.tree.map(describe, sharded["layers"]) == jax.tree.map(describe, wanted)


def test_layers_fewer_than_stages_are_replicated(tmp_path: Path) -> None:
    model, params = make("ffn")
    save_checkpoint(tmp_path, model, params)
    mesh = Mesh(np.array(jax.devices()[:5]), ("stage",), axis_types=(AxisType.Auto,))
    _, loaded = load_checkpoint(tmp_path, mesh)
    assert_same(loaded, params)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(loaded))


def test_parameters_of_another_structure_are_refused(tmp_path: Path) -> None:
    model, _ = make("ffn")
    other, theirs = make("all")
    with pytest.raises(ValueError, match="params do not have the model's structure"):
        shard_params(theirs, model.config, make_mesh(2, 1, 1))
    with pytest.raises(ValueError, match="params do not have the model's structure"):
        save_checkpoint(tmp_path, model, theirs)
    narrow = jax.tree.map(lambda x: x.astype(jnp.float16), theirs)
    with pytest.raises(ValueError, match=r"params\['layers'\]\['w.*\.values is float16 .* uint8"):
        save_checkpoint(tmp_path, other, narrow)


# Damaged files


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantized")
    save_checkpoint(directory, *make("ffn"))
    return directory


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "checkpoint")


def put(name: str, change: Callable[[np.ndarray], np.ndarray] | None) -> Callable[[dict], None]:
    def damage(tensors: dict[str, np.ndarray]) -> None:
        tensor = tensors.pop(name)
        if change is not None:
            tensors[name] = np.ascontiguousarray(change(tensor.copy()))

    return damage


def with_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(scale: np.ndarray) -> np.ndarray:
        scale[3] = value
        return scale

    return change


SCALE = f"{DOWN}_scale"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put(SCALE, None), r"has no tensor .*down_proj\.weight_scale"),
        (put(DOWN, None), r"has no tensor .*down_proj\.weight"),
        (put(SCALE, lambda x: x[:, 0]), r"weight_scale' has shape \(64,\).* makes it \(64, 1\)"),
        (put(SCALE, lambda x: x.T), r"weight_scale' has shape \(1, 64\)"),
        (put(SCALE, lambda x: x[:1]), r"weight_scale' has shape \(1, 1\)"),
        (put(SCALE, lambda x: x.astype(np.float64)), r"weight_scale' is F64, by config.json it must be F32, F16, BF16"),
        (put(SCALE, lambda x: x.astype(np.int32)), r"weight_scale' is I32"),
        (put(DOWN, lambda x: x.astype(np.float32)), r"weight' is F32, by config.json it must be F8_E4M3"),
        (put(DOWN, lambda x: x.view(np.int8)), r"weight' is I8, by config.json it must be F8_E4M3"),
        (put(DOWN, lambda x: x.view(ml_dtypes.float8_e5m2)), r"weight' is F8_E5M2, by config.json"),
        (put(DOWN, lambda x: x.T), r"weight' has shape \(80, 64\)"),
        (
            put("model.layers.0.mlp.up_proj.weight", lambda x: x.astype(fp8_numpy.E4M3)),
            r"layers\.0\.mlp\.up_proj\.weight' is F8_E4M3, by config.json it must be F32, F16, BF16",
        ),
        (
            put("lm_head.weight", lambda x: x.astype(fp8_numpy.E4M3)),
            r"lm_head\.weight' is F8_E4M3, by config.json it must be F32, F16, BF16",
        ),
        *[
            (put(SCALE, with_value(value)), r"weight_scale' has 1 scales of 64 that are not positive and finite")
            for value in (0.0, -1.0, np.nan, np.inf)
        ],
    ],
)
def test_damaged_tensors_are_named(checkpoint: Path, damage: Callable[[dict], None], message: str) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(checkpoint)
    assert len(problems(checkpoint)) == 1


def test_weights_that_are_nan_are_found(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors[DOWN] = tensors[DOWN].copy()
    tensors[DOWN].view(np.uint8)[2, 3] = 0x7F
    save_file(tensors, file)
    (problem,) = problems(checkpoint)
    assert f"tensor '{DOWN}' has 1 values of 5120 that are NaN or infinite" in problem


def test_scales_without_quantization_config_are_unexpected(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"mlp\..*_proj\.weight' is F8_E4M3, by config.json it must be F32"):
        load_checkpoint(checkpoint)


def test_a_file_cut_off_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="is truncated"):
        load_checkpoint(checkpoint)


# longctx quantize


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    directory = tmp_path / "plain"
    params = jax.jit(lambda: Llama(CONFIG).init(jax.random.key(0), jnp.bfloat16, 0.2))()
    save_checkpoint(directory, Llama(CONFIG), params, 60_000)
    (directory / "tokenizer_config.json").write_text('{"x": 1}')
    (directory / "notes.txt").write_text("not copied")
    return directory


@pytest.mark.parametrize("modules", ["ffn", pytest.param("all", marks=pytest.mark.slow)])
def test_quantize_writes_what_loads_as_the_same_numbers(
    plain: Path, tmp_path: Path, modules: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = [] if modules == "ffn" else ["--modules", modules]
    assert main(["quantize", str(plain), str(out), *flags]) == 0
    assert re.search(r": 0\.\d MiB of weights$", capsys.readouterr().err, re.M)
    model, params = make(modules, dtype=jnp.bfloat16)
    loaded_model, loaded = load_checkpoint(out)
    assert loaded_model == model
    assert_same(loaded, params)
    assert problems(out) == []
    assert (out / "tokenizer_config.json").read_text() == '{"x": 1}'
    assert not (out / "notes.txt").exists()
    assert {path.name for path in out.glob("*.safetensors")} == {path.name for path in plain.glob("*.safetensors")}
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fbgemm_fp8"
    assert config["quantization_config"]["activation_scale_ub"] == 1200.0
    tensors = {name: x for file in out.glob("*.safetensors") for name, x in load_file(file).items()}
    before = {name: x for file in plain.glob("*.safetensors") for name, x in load_file(file).items()}
    values, scale = fp8_numpy.quantize(before[DOWN])
    np.testing.assert_array_equal(tensors[DOWN].view(np.uint8), values.view(np.uint8))
    np.testing.assert_array_equal(tensors[f"{DOWN}_scale"][:, 0], scale)


def test_what_a_killed_process_left_is_removed(plain: Path, tmp_path: Path) -> None:
    for out in (tmp_path / "out", plain):
        (out / ".saving").mkdir(parents=True)
        (out / ".saving" / "model.safetensors").write_text("half of it")
    assert main(["quantize", "--quiet", str(plain), str(tmp_path / "out")]) == 0
    assert problems(tmp_path / "out") == []
    save_checkpoint(plain, Llama(CONFIG), load_checkpoint(plain)[1])
    assert [*tmp_path.glob("*/.saving")] == []


@pytest.mark.slow
def test_quantize_refuses_what_it_can_not_do(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*arguments: object) -> str:
        assert main(["quantize", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    out = tmp_path / "out"
    assert "missing" in refusal(tmp_path / "missing", out)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert "a.gguf is a GGUF file: only a checkpoint in safetensors" in refusal(tmp_path / "a.gguf", out)
    assert "must be a directory that is empty" in refusal(plain, plain)
    (tmp_path / "file").write_text("x")
    assert "must be a directory that is empty" in refusal(plain, tmp_path / "file")
    assert not out.exists()
    assert main(["quantize", "--quiet", str(plain), str(out)]) == 0
    assert "is quantised already" in refusal(out, tmp_path / "again")
    shallow = dataclasses.replace(CONFIG, num_layers=2)
    save_checkpoint(tmp_path / "shallow", Llama(shallow), Llama(shallow).init(jax.random.key(0)))
    assert "no feed-forward is between the first and the last" in refusal(tmp_path / "shallow", tmp_path / "b")
    params = Llama(CONFIG).init(jax.random.key(0))
    params["layers"]["w_down"] = params["layers"]["w_down"].at[1, 3, 4].set(jnp.nan)
    save_checkpoint(tmp_path / "nan", Llama(CONFIG), params)
    assert f"tensor '{DOWN}' has values that are NaN or infinite" in refusal(tmp_path / "nan", tmp_path / "c")
    assert not any((tmp_path / "c").iterdir())


@pytest.mark.slow
def test_the_logits_are_those_of_the_weights_that_the_file_has(tmp_path: Path) -> None:
    """Far from those of the weights before, by what FP8 loses; the same whether activations have a bound or not."""
    model, params = make("all")
    logits = model(params, TOKENS)
    plain = Llama(CONFIG)
    exact = plain(jax.jit(lambda: plain.init(jax.random.key(0), initializer_range=0.2))(), TOKENS)
    assert 0.01 < float(jnp.sqrt(jnp.mean((logits - exact) ** 2) / jnp.mean(exact**2))) < 0.3
    free, _ = make("all", None)
    jax.tree.map(
        np.testing.assert_array_equal,
        free(jax.tree.unflatten(jax.tree.structure(free.abstract_params()), jax.tree.leaves(params)), TOKENS),
        logits,
    )
