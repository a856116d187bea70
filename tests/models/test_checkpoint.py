"""Loading and saving checkpoints: placement, memory, and files that are wrong."""

import json
import shutil
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hf_reference import Case, logits
from jax.sharding import AxisType, Mesh
from jax.typing import DTypeLike
from safetensors.numpy import load_file, save_file

from longctx.models import CheckpointError, load_checkpoint, param_specs, save_checkpoint
from longctx.models import checkpoint as loading
from longctx.models.checkpoint import read_model
from longctx.models.params import Ffn, Params
from longctx.models.safetensors_reader import SafetensorsReader

CASE = Case("qwen2", kv_heads=4, rope="yarn", layers=4)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers writes it, which tests must not change."""
    directory = tmp_path_factory.mktemp("checkpoint")
    CASE.write(directory)
    return directory


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return shutil.copytree(written, tmp_path / "checkpoint")


def make_mesh(**shape: int) -> Mesh:
    return jax.make_mesh(tuple(shape.values()), tuple(shape), (AxisType.Auto,) * len(shape))


def assert_same(actual: Params, expected: Params) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert jax.tree.map(lambda x: x.dtype, actual) == jax.tree.map(lambda x: x.dtype, expected)


# Loading


@pytest.mark.parametrize(
    ("shape", "ffn"),
    [({"stage": 2, "tensor": 4}, "tensor"), ({"context": 8}, "tensor"), ({"context": 2, "tensor": 2}, "all")],
)
def test_shards_are_placed_and_each_byte_read_once(
    written: Path, shape: dict[str, int], ffn: Ffn, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = load_checkpoint(written)
    reads: Counter[str] = Counter()
    read = SafetensorsReader.read

    def counting_read(self: SafetensorsReader, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        tensor = read(self, name, slices)
        reads[name] += tensor.size
        return tensor

    monkeypatch.setattr(SafetensorsReader, "read", counting_read)
    mesh = make_mesh(**shape)
    model, params = load_checkpoint(written, mesh, ffn=ffn)
    assert_same(params, expected)
    specs = param_specs(model.config, mesh, ffn=ffn)
    assert jax.tree.map(lambda x: x.sharding.spec, params) == specs
    assert ("context" in str(specs)) == (ffn == "all")
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(params))
    assert reads == {name: tensor.size for name, tensor in load_file(written / "model.safetensors").items()}


def test_the_host_holds_one_slice_at_a_time(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the stack of layers, let alone the model: what was read is freed before the next is read."""
    alive, peak, largest = 0, 0, 0
    read = SafetensorsReader.read

    def tracked_read(self: SafetensorsReader, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        nonlocal alive, peak, largest
        tensor = read(self, name, slices).copy()  # owns its memory, so its end is the memory's end
        size = tensor.nbytes

        def freed() -> None:
            nonlocal alive
            alive -= size

        weakref.finalize(tensor, freed)
        alive += size
        peak, largest = max(peak, alive), max(largest, size)
        return tensor

    monkeypatch.setattr(SafetensorsReader, "read", tracked_read)
    monkeypatch.setattr(loading, "_MOST_BYTES", 0)
    _, params = load_checkpoint(written, make_mesh(stage=2, tensor=4))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > 20 * largest
    assert peak <= 2 * largest


@pytest.mark.parametrize("error", [KeyboardInterrupt, CheckpointError("cannot read it")])
def test_an_error_ends_loading_and_all_threads(error: Any, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, names = SafetensorsReader.read, list[str]()

    def failing_read(self: SafetensorsReader, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        names.append(name)
        if "layers.1." in name:
            raise error
        return read(self, name, slices)

    monkeypatch.setattr(SafetensorsReader, "read", failing_read)
    with pytest.raises(error if isinstance(error, type) else CheckpointError):
        load_checkpoint(written)
    count = len(names)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load")]
    assert len(names) == count


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("asked", [None, jnp.float32, jnp.bfloat16])
def test_dtypes(checkpoint: Path, stored: Any, asked: Any) -> None:
    path = checkpoint / "model.safetensors"
    tensors = {name: tensor.astype(stored) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    _, params = load_checkpoint(checkpoint, dtype=asked)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(asked or stored)}
    expected = tensors["model.embed_tokens.weight"].astype(asked or stored)
    np.testing.assert_array_equal(params["embed"], expected)


def test_tied_copies_and_old_buffers_are_ignored(tmp_path: Path) -> None:
    Case(tied=True).write(tmp_path)
    _, expected = load_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    save_file(tensors | extra, path)
    _, params = load_checkpoint(tmp_path)
    assert "lm_head" not in params
    assert_same(params, expected)


@pytest.mark.parametrize("change", ["value", "shape", "dtype"])
def test_a_tied_copy_that_differs_is_refused(tmp_path: Path, change: str) -> None:
    Case(tied=True).write(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    copy = tensors["model.embed_tokens.weight"].copy()
    copy[-1, -1] += 1
    tensors["lm_head.weight"] = {"value": copy, "shape": copy[1:].copy(), "dtype": copy.astype(np.float16)}[change]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        load_checkpoint(tmp_path)


def test_a_model_is_read_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Case(tied=True).write(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, path)
    model, _ = load_checkpoint(tmp_path)
    monkeypatch.setattr(SafetensorsReader, "read", lambda *arguments: pytest.fail("a weight was read"))
    assert read_model(tmp_path) == (model, np.dtype(np.float32))


# Saving


@pytest.mark.parametrize(
    ("case", "dtype", "max_shard_bytes", "sharded"),
    [
        (CASE, jnp.float32, 50_000, True),
        (CASE, jnp.bfloat16, 10**9, False),
        (Case(tied=True, rope="llama3"), jnp.float32, 10**9, False),
        (Case(tied=True, rope="llama3"), jnp.bfloat16, 50_000, False),
    ],
)
def test_round_trip(tmp_path: Path, case: Case, dtype: DTypeLike, max_shard_bytes: int, sharded: bool) -> None:
    reference = case.write(tmp_path / "theirs")
    mesh = make_mesh(stage=2, tensor=4) if sharded else None
    model, params = load_checkpoint(tmp_path / "theirs", mesh, dtype)
    save_checkpoint(tmp_path / "ours", model, params, max_shard_bytes)
    files = list((tmp_path / "ours").glob("*.safetensors"))
    assert all(file.stat().st_size < max_shard_bytes + 10_000 for file in files)
    assert (len(files) > 1) == (max_shard_bytes == 50_000)

    again, loaded = load_checkpoint(tmp_path / "ours")
    assert again == model
    assert_same(loaded, params)
    theirs = type(reference).from_pretrained(tmp_path / "ours", dtype="auto")
    assert str(theirs.dtype) == f"torch.{jnp.dtype(dtype).name}"
    if dtype == jnp.float32:
        tokens = np.arange(40)[None]
        np.testing.assert_array_equal(logits(theirs, tokens), logits(reference, tokens))


def test_saving_again_replaces_and_leaves_other_files(written: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    model, params = load_checkpoint(written)
    for max_shard_bytes in [10**9, 50_000, 10**9]:
        params = jax.tree.map(lambda leaf: leaf + 1, params)
        save_checkpoint(tmp_path, model, params, max_shard_bytes)
        assert_same(load_checkpoint(tmp_path)[1], params)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert not list(tmp_path.glob(".saving*"))
    modes = {path.stat().st_mode for path in tmp_path.glob("*.safetensors")}
    assert modes == {(tmp_path / "config.json").stat().st_mode}


def test_a_failed_save_changes_nothing(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = load_checkpoint(written)
    save_checkpoint(tmp_path, model, params)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = 0

    def failing_save(*arguments: Any, **keywords: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("disk full")
        save_file(*arguments, **keywords)

    monkeypatch.setattr("safetensors.numpy.save_file", failing_save)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, model, params, max_shard_bytes=50_000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p | {"lm_head": p["lm_head"].T}, "lm_head"),
        (lambda p: {key: value for key, value in p.items() if key != "final_norm"}, "final_norm"),
        (lambda p: p | {"extra": p["embed"]}, "extra"),
        (lambda p: p | {"embed": p["embed"].astype(jnp.bfloat16)}, "is float32 .* must be bfloat16"),
        (lambda p: jax.tree.map(lambda x: x.astype(jnp.int32), p), "int32"),
    ],
)
def test_save_refuses_what_does_not_fit(
    written: Path, tmp_path: Path, change: Callable[[Params], Params], message: str
) -> None:
    model, params = load_checkpoint(written)
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path / "out", model, change(params))
    assert not (tmp_path / "out").exists()


# Files that are wrong


def edit_tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def edit_entry(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes the entry of a tensor in the header."""

    def damage(directory: Path) -> None:
        path = directory / "model.safetensors"
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:end])
        header = json.dumps(entries | {Q_PROJ: change(entries[Q_PROJ])}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])

    return damage


def sparse_header(size: int) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        with (directory / "model.safetensors").open("wb") as file:
            file.write(size.to_bytes(8, "little"))
            file.truncate(size + 8)

    return damage


def truncate(keep: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[: keep(path.stat().st_size)])

    return damage


def index(weight_map: Any) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        names = load_file(directory / "model.safetensors").keys()
        (directory / "model.safetensors").rename(directory / "shard.safetensors")
        contents = {"weight_map": weight_map(names) if callable(weight_map) else weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(contents))

    return damage


@pytest.mark.parametrize(
    ("damage", "error", "named"),
    [
        (shutil.rmtree, FileNotFoundError, ["checkpoint"]),
        (lambda d: (d / "config.json").unlink(), FileNotFoundError, ["config.json"]),
        (
            lambda d: (d / "model.safetensors").unlink(),
            FileNotFoundError,
            ["model.safetensors", "index.json"],
        ),
        (edit_config(architectures=["GPT2LMHeadModel"]), ValueError, ["GPT2LMHeadModel"]),
        (edit_config(num_hidden_layers=5, layer_types=None), CheckpointError, ["model.layers.4."]),
        (
            edit_config(num_hidden_layers=3, layer_types=None),
            CheckpointError,
            ["model.safetensors", "unexpected", "model.layers.3."],
        ),
        (edit_tensors(lambda t: t.pop(Q_PROJ)), CheckpointError, [Q_PROJ]),
        (edit_tensors(lambda t: t.pop("lm_head.weight")), CheckpointError, ["lm_head.weight"]),
        (
            edit_tensors(lambda t: t.update({Q_PROJ: t[Q_PROJ][:, :8].copy()})),
            CheckpointError,
            ["model.safetensors", Q_PROJ, "(64, 8)", "(64, 64)"],
        ),
        (
            edit_tensors(lambda t: t.update({Q_PROJ: t[Q_PROJ].astype(ml_dtypes.float8_e4m3fn)})),
            CheckpointError,
            ["model.safetensors", Q_PROJ, "F8_E4M3"],
        ),
        (
            edit_tensors(lambda t: t.update(adapter=np.zeros(3, np.float32))),
            CheckpointError,
            ["model.safetensors", "unexpected", "adapter"],
        ),
        *[
            (damage, CheckpointError, ["model.safetensors is truncated, or no safetensors file", cause])
            for damage, cause in [
                (truncate(lambda size: size - 1), "not fully covered"),
                (truncate(lambda size: size // 2), "not fully covered"),
                (truncate(lambda size: 100), "header"),
                (truncate(lambda size: 0), "header"),
                (lambda d: (d / WEIGHTS).write_bytes((4).to_bytes(8, "little") + b"text"), "JSON"),
                (lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes() + b"more"), "not fully covered"),
                (sparse_header(2**39), "header too large"),
                (edit_entry(lambda entry: entry | {"shape": [2**62, 2**62]}), "overflow"),
                (edit_entry(lambda entry: entry | {"shape": [2.0, 8]}), "floating point `2.0`"),
                (edit_entry(lambda entry: entry | {"shape": {}}), "expected a sequence"),
                (edit_entry(lambda entry: entry | {"dtype": "F99"}), "F99"),
                (edit_entry(lambda entry: entry | {"data_offsets": [0]}), "invalid length 1"),
                (edit_entry(lambda entry: entry | {"data_offsets": [-8, 8]}), "integer `-8`"),
                (edit_entry(lambda entry: 3), "integer `3`"),
                (edit_entry(lambda entry: entry | {"data_offsets": [x - 4 for x in entry["data_offsets"]]}), Q_PROJ),
            ]
        ],
        (edit_entry(lambda entry: entry | {"shape": [1] * 33}), CheckpointError, ["model.safetensors", ""]),
        (
            index(lambda names: dict.fromkeys(names, "gone.safetensors")),
            FileNotFoundError,
            ["index.json", "gone"],
        ),
        (
            index(lambda names: dict.fromkeys([*names, "ghost"], "shard.safetensors")),
            CheckpointError,
            ["index.json", "'ghost'", "shard.safetensors"],
        ),
        (index([1, 2]), CheckpointError, ["index.json"]),
        *[
            (index(lambda names, file=file: dict.fromkeys(names, file)), CheckpointError, ["index.json", "beside it"])
            for file in ["../shard.safetensors", "/etc/passwd", "sub/shard.safetensors", "..", "", 3, None, []]
        ],
        (index(lambda names: dict.fromkeys(names, "a" * 10_000)), FileNotFoundError, ["index.json", "aaa"]),
        (index(lambda names: dict.fromkeys(names, "\0")), FileNotFoundError, ["index.json"]),
        (
            edit_config(num_hidden_layers=16_000, layer_types=None),
            CheckpointError,
            ["num_hidden_layers is 16000", "51 tensors"],
        ),
        (edit_config(num_hidden_layers=10**7), ValueError, ["num_hidden_layers", "10000000"]),
    ],
)
def test_errors_name_the_file_and_the_tensor(
    checkpoint: Path, damage: Callable[[Path], Any], error: type[Exception], named: list[str]
) -> None:
    damage(checkpoint)
    with pytest.raises(error) as raised:
        load_checkpoint(checkpoint)
    for name in named:
        assert name in str(raised.value)


def test_a_file_that_changes_while_it_is_read_is_noticed(checkpoint: Path) -> None:
    reader = SafetensorsReader(checkpoint)
    edit_entry(lambda entry: entry | {"shape": [32, 128]})(checkpoint)
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}' has changed"):
        reader.read(Q_PROJ, (slice(0, 1),))


def test_a_local_directory_is_asked_for() -> None:
    with pytest.raises(FileNotFoundError, match="no such directory: meta-llama"):
        load_checkpoint("meta-llama/Llama-3.1-8B")
