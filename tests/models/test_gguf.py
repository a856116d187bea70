"""GGUF files: the logits of transformers on the same dequantised weights, placement, and files that are wrong."""

import dataclasses
import functools
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from gguf_files import Type, write_gguf
from hf_reference import Case, logits
from jax.sharding import AxisType

from longctx.models import (
    CheckpointError,
    Llama,
    LlamaConfig,
    checkpoint_fingerprint,
    load_checkpoint,
    save_checkpoint,
    verify,
)
from longctx.models import checkpoint as loading
from longctx.models.checkpoint import read_model
from longctx.models.gguf import GgufReader, read_header
from longctx.models.params import Params

CASE = Case(hidden_size=256, intermediate_size=256, layers=2)
TYPES = [
    *(Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q2_K, Type.Q3_K),
    *(Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS),
]
QUICK = [("qwen2", Type.F16), ("llama", Type.BF16), ("qwen2", Type.Q8_0), ("llama", Type.Q4_0), ("qwen2", Type.Q4_1)]
QUICK += [("llama", Type.Q4_K), ("qwen2", Type.Q6_K)]
GRID = [(family, type) for family in ("llama", "qwen2") for type in TYPES]
REST = [pytest.param(*case, marks=pytest.mark.slow) for case in GRID if case not in QUICK]
TOKENS = np.random.default_rng(0).integers(96, size=(2, 24))


@functools.partial(jax.jit, static_argnums=0)
def forward(config: LlamaConfig, params: Params) -> jax.Array:
    """Compiled once for files that differ in their types only."""
    return Llama(config)(params, TOKENS)


def assert_same_logits(path: Path, reference: transformers.PreTrainedModel, **changes: Any) -> None:
    model, params = load_checkpoint(path, dtype="float32", **changes)
    theirs = logits(reference, TOKENS)
    assert np.ptp(theirs) > 1
    np.testing.assert_allclose(
        np.asarray(forward(model.config, params)), theirs, rtol=0, atol=1e-4 * np.abs(theirs).max()
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of float32, which tests must not change."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, Case(layers=2).build())
    return path


@pytest.mark.parametrize(("family", "type"), [*QUICK, *REST], ids=lambda value: getattr(value, "name", value))
def test_every_type_gives_the_logits_of_the_dequantised_weights(family: str, type: Type, tmp_path: Path) -> None:
    reference = dataclasses.replace(CASE, family=family, layers=1).build()
    write_gguf(tmp_path / "model.gguf", reference, type)
    assert_same_logits(tmp_path / "model.gguf", reference)
    expected = {Type.F16: jnp.float16, Type.BF16: jnp.bfloat16}.get(type, jnp.float32)
    assert read_model(tmp_path / "model.gguf")[1] == expected


GEMMA = Case(
    "gemma3", 1, True, "linear", layers=3, head_dim=16, own=(("sliding_window", 9), ("query_pre_attn_scalar", 16))
)


def test_gemma3_with_the_keys_that_its_files_have_or_leave_out(tmp_path: Path) -> None:
    """Files of today name no pattern and no base of sliding layers: six layers, and 10,000."""
    path = tmp_path / "model.gguf"
    reference = dataclasses.replace(GEMMA, own=(*GEMMA.own, ("sliding_window_pattern", 2))).build()
    write_gguf(path, reference)
    assert_same_logits(path, reference)
    reference.save_pretrained(tmp_path)
    model, params = load_checkpoint(path)
    assert model.config == read_model(tmp_path)[0].config
    save_checkpoint(tmp_path / "saved", model, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    np.testing.assert_allclose(logits(theirs, TOKENS), np.asarray(model(params, TOKENS)), atol=1e-4)
    changes = {"attention.sliding_window_pattern": None, "rope.freq_base_swa": None}
    write_gguf(path, reference, **changes, block_count=3)
    config = read_model(path)[0].config
    assert (config.sliding_layers, config.local_rope_theta) == ((True,) * 3, 10000.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping = 30.0 is not supported"),
        ({"attention.sliding_window": None}, "it has no key gemma3.attention.sliding_window"),
        ({"attention.sliding_window": 0}, "gemma3.attention.sliding_window must be an integer of 1"),
        ({"rope.freq_base_swa": 0.5}, "gemma3.rope.freq_base_swa, the rotary base, must be greater"),
    ],
)
def test_metadata_of_gemma3_that_are_wrong_are_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", GEMMA.build(), **changes)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("family", "kv_heads", "tied", "rope"),
    [
        ("llama", 8, True, "llama3"),
        ("qwen3", 1, False, "yarn"),
        ("llama", 2, False, "linear"),
        pytest.param("mistral", 2, False, "none", marks=pytest.mark.slow),
        *(pytest.param("llama", 1, False, rope, marks=pytest.mark.slow) for rope in ("none", "yarn")),
        *(
            pytest.param("qwen2", 2, True, rope, marks=pytest.mark.slow)
            for rope in ("none", "llama3", "linear", "yarn")
        ),
    ],
)
def test_rotary_scaling_heads_and_ties(family: str, kv_heads: int, tied: bool, rope: str, tmp_path: Path) -> None:
    reference = Case(family, kv_heads, tied, rope, layers=1).build()
    write_gguf(tmp_path / "model.gguf", reference)
    assert_same_logits(tmp_path / "model.gguf", reference)
    if family != "mistral":  # whose config.json names no head size
        config = read_model(tmp_path / "model.gguf")[0].config
        reference.save_pretrained(tmp_path)
        assert config == read_model(tmp_path)[0].config  # as of the original


def test_types_may_be_mixed(tmp_path: Path) -> None:
    reference = CASE.build()
    types = {"token_embd.weight": Type.Q8_0, "output.weight": Type.Q6_K, "blk.1.attn_q.weight": Type.F16}
    write_gguf(tmp_path / "model.gguf", reference, Type.Q4_1, types)
    assert_same_logits(tmp_path / "model.gguf", reference)


@pytest.mark.parametrize(
    ("shape", "type"),
    [({"stage": 2, "tensor": 4}, Type.Q4_1), pytest.param({"tensor": 8}, Type.Q6_K, marks=pytest.mark.slow)],
)
def test_shards_are_those_of_the_whole(shape: dict[str, int], type: Type, tmp_path: Path) -> None:
    """With 8 ranks a shard of Q6_K begins in the midst of a block."""
    write_gguf(tmp_path / "model.gguf", dataclasses.replace(CASE, kv_heads=4).build(), type)
    _, expected = load_checkpoint(tmp_path / "model.gguf")
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), (AxisType.Auto,) * len(shape))
    _, params = load_checkpoint(tmp_path / "model.gguf", mesh)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("type", [Type.F16, Type.Q4_1, Type.Q6_K])
def test_any_slice_is_that_of_the_whole(type: Type, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", CASE.build(), type)
    rng = np.random.default_rng(1)
    reader = GgufReader(tmp_path / "model.gguf")
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        whole = np.concatenate(list(reader.blocks(name)))
        for _ in range(20):
            low, high = np.sort(rng.integers(257, size=(2, 2)), axis=0)
            part = tuple(slice(int(a), int(b)) for a, b in zip(low, high, strict=True))
            np.testing.assert_array_equal(reader.read(name, part), whole[part])


def test_peak_host_memory_is_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one slice is let at a time."""
    monkeypatch.setattr(loading, "_MOST_BYTES", 0)
    write_gguf(tmp_path / "model.gguf", Case(hidden_size=256, intermediate_size=4096, layers=6).build(), Type.Q8_0)
    load_checkpoint(tmp_path / "model.gguf")
    tracemalloc.start()
    load_checkpoint(tmp_path / "model.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * (256 * 4096 * 4)  # its bytes in the file, blocks under way, and the result; all have 72 MiB


def test_a_loaded_model_is_saved_as_safetensors(written: Path, tmp_path: Path) -> None:
    model, params = load_checkpoint(written)
    save_checkpoint(tmp_path, model, params)
    again, loaded = load_checkpoint(tmp_path)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_size_of_heads_other_than_hidden_over_heads(tmp_path: Path) -> None:
    reference = Case(layers=1, head_dim=16).build()
    write_gguf(tmp_path / "model.gguf", reference, **{"rope.dimension_count": 16})
    assert_same_logits(tmp_path / "model.gguf", reference)


def test_keys_that_may_be_missing(tmp_path: Path) -> None:
    """As many heads of keys as of queries, of hidden over heads, and the base 10,000."""
    reference = Case(kv_heads=8, layers=1).build()
    missing = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    write_gguf(tmp_path / "model.gguf", reference, **dict.fromkeys(missing))
    config = read_model(tmp_path / "model.gguf")[0].config
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (8, 8, 10_000.0)


# Files that are wrong


def edited(changes: dict[str, Any]) -> Callable[[Path], None]:
    return lambda path: write_gguf(path, Case(layers=1).build(), **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention.head_count": None}, "it has no key llama.attention.head_count"),
        ({"block_count": 10_000}, "llama.block_count is 10000, but there are 12 tensors"),
        ({"block_count": 2}, "has no tensor 'blk.1.attn_norm.weight'"),
        ({"embedding_length": 32}, "tensor 'token_embd.weight' has shape (96, 64), but the metadata makes it (96, 32)"),
        ({"attention.head_count": 3}, "llama.attention.head_count (3) must be a multiple of"),
        ({"attention.head_count": "8"}, "llama.attention.head_count must be an integer, got '8'"),
        ({"attention.head_count": [8, 8]}, "llama.attention.head_count must be an integer"),
        ({"rope.freq_base": 0.5}, "the rotary base, must be greater than 1, got 0.5"),
        ({"rope.dimension_count": 4, "attention.key_length": 8}, "llama must have one size of heads"),
        ({"rope.scaling.type": "longrope"}, "has unsupported rope type 'longrope'"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": -1.0}, "llama.rope.scaling.factor must be"),
        ({"expert_count": 8}, "llama.expert_count = 8 is not supported, only 0"),
        ({"attention.sliding_window": 4096}, "llama.attention.sliding_window = 4096 is not supported"),
    ],
)
def test_metadata_that_are_wrong_are_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    edited(changes)(path)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path)
    assert str(raised.value).startswith(f"{path}")
    assert words in str(raised.value)


def patch(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    return data.replace(old, new, 1)


def named(name: str) -> bytes:
    """A string of the file, of a name."""
    return struct.pack("<Q", len(name)) + name.encode()


def set_after(data: bytes, name: str, at: int, value: bytes) -> bytes:
    """Put a value at some bytes after a name."""
    begin = data.index(named(name)) + 8 + len(name) + at
    return data[:begin] + value + data[begin + len(value) :]


# Of the record of a matrix: 4 bytes of the number of axes, 8 for each axis, 4 of the type, 8 of the offset.
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no GGUF": (
        lambda data: b"PK\x03\x04" + data[4:],
        "is no little-endian GGUF of version 2 or 3: it begins with b'PK",
    ),
    "empty": (lambda data: b"", "is truncated: its beginning is incomplete"),
    "LFS pointer": (lambda data: b"version https://git-lfs", "is a Git LFS pointer; `git lfs pull` fetches the file"),
    "version": (lambda data: data[:4] + b"\x01\0\0\0" + data[8:], "is no little-endian GGUF of version 2 or 3"),
    "big-endian": (lambda data: data[:4] + b"\0\0\0\x03" + data[8:], "is no little-endian GGUF of version 2 or 3"),
    "tensor count": (lambda data: data[:8] + b"\xff" * 8 + data[16:], ": tensor '' must have 1 to 4 axes, got "),
    "key count": (lambda data: data[:16] + b"\xff" * 8 + data[24:], "is truncated: "),
    "name length": (lambda data: data[:24] + b"\xff" * 8 + data[32:], "is truncated: the name of key 0 is incomplete"),
    "key type": (lambda data: set_after(data, "general.architecture", 0, b"\x0d"), "has the unknown type 13"),
    "cut header": (lambda data: data[:700], "is truncated: "),
    "cut data": (lambda data: data[:-1000], "is truncated: tensor 'output.weight' is incomplete"),
    "cut far": (lambda data: data[: len(data) // 2], "is truncated: tensor 'blk.0."),
    "architecture": (
        lambda data: data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1),
        "unknown architecture: general.architecture is 'mamba'; supported: llama, qwen2, qwen3",
    ),
    "tensor type": (
        lambda data: set_after(data, "blk.1.attn_q.weight", 20, b"\x63"),
        "tensor 'blk.1.attn_q.weight' has the unknown type 99",
    ),
    "unsupported type": (
        lambda data: set_after(data, "blk.1.attn_q.weight", 20, b"\x1a"),  # I32
        "tensor 'blk.1.attn_q.weight' is I32, by the metadata it must be F32, F16, BF16, Q8_0",
    ),
    "axes": (
        lambda data: set_after(data, "blk.1.attn_q.weight", 0, b"\x05"),
        "tensor 'blk.1.attn_q.weight' must have 1 to 4 axes, got 5",
    ),
    "size": (
        lambda data: set_after(data, "blk.1.ffn_norm.weight", 4, b"\xff" * 8),
        "is truncated: tensor 'blk.1.ffn_norm.weight' is incomplete",
    ),
    "overlap": (
        lambda data: set_after(data, "blk.1.attn_q.weight", 24, b"\0" * 8),
        "begins at byte",
    ),
    "block": (
        lambda data: set_after(data, "blk.1.attn_norm.weight", 12, b"\x0c"),  # Q4_K
        "tensor 'blk.1.attn_norm.weight', Q4_K, cannot have shape (64,)",
    ),
    "twice": (
        lambda data: patch(data, b"blk.1.attn_q.weight", b"blk.1.attn_k.weight"),
        "has the tensor 'blk.1.attn_k.weight' twice",
    ),
    "no tensor": (
        lambda data: patch(data, b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"),
        "has no tensor 'blk.1.attn_q.weight'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_wrong_are_named_with_the_tensor(damage: str, written: Path, tmp_path: Path) -> None:
    change, words = DAMAGES[damage]
    path = tmp_path / "model.gguf"
    path.write_bytes(change(written.read_bytes()))
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path)
    assert str(raised.value).startswith(f"{path}")
    assert words in str(raised.value)
    assert any(words in line for line in verify(path))


def test_header_of_endless_strings_is_refused(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    data = written.read_bytes()
    key = struct.pack("<Q", 1) + b"x" + struct.pack("<IIQ", 9, 8, 2**22 + 1)
    path.write_bytes(data[:24] + key + data[24:])
    with pytest.raises(CheckpointError, match="the value of 'x' has 4194305 strings, the most is 4194304"):
        read_header(path)


def test_values_that_are_not_finite_are_found(tmp_path: Path) -> None:
    reference = Case(layers=1).build()
    reference.model.norm.weight.data[3] = float("nan")
    write_gguf(tmp_path / "model.gguf", reference)
    problems = verify(tmp_path / "model.gguf")
    assert any("'model.norm.weight' has 1 values of 64 that are NaN or infinite" in problem for problem in problems)


def test_parts_of_a_split_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00003.gguf"
    write_gguf(path, Case(layers=1).build())
    data = path.read_bytes()
    key = struct.pack("<Q", 11) + b"split.count" + struct.pack("<IH", 2, 3)
    keys = struct.unpack("<Q", data[16:24])[0] + 1
    path.write_bytes(data[:16] + struct.pack("<Q", keys) + key + data[24:] + b"\0" * 64)
    with pytest.raises(CheckpointError, match="it is one of 3 parts of a model; `llama-gguf-split --merge` joins them"):
        read_model(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for load in (load_checkpoint, verify, checkpoint_fingerprint):
        with pytest.raises(FileNotFoundError, match=r"no such file: .*model\.gguf"):
            load(tmp_path / "model.gguf")


def test_fingerprints_tell_files_apart(written: Path, tmp_path: Path) -> None:
    data = bytearray(written.read_bytes())
    (tmp_path / "model.gguf").write_bytes(data)
    assert checkpoint_fingerprint(tmp_path / "model.gguf") == checkpoint_fingerprint(written)
    data[100] ^= 1
    (tmp_path / "model.gguf").write_bytes(data)
    assert checkpoint_fingerprint(tmp_path / "model.gguf") != checkpoint_fingerprint(written)


def test_the_package_is_named_where_it_is_not_installed(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"a GGUF file needs gguf: pip install 'longctx-jax\[gguf\]'"):
        load_checkpoint(written)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_names_of_hugging_face_are_no_names_of_gguf(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=f"unexpected tensor '{name}': GGUF calls it"):
        GgufReader(path)


def test_a_key_that_is_there_twice(written: Path, tmp_path: Path) -> None:
    data = written.read_bytes()
    key = named("general.architecture") + struct.pack("<I", 8) + named("llama")
    path = tmp_path / "model.gguf"
    path.write_bytes(data[:24] + key + data[24:])
    with pytest.raises(CheckpointError, match=r"has the key 'general\.architecture' twice"):
        GgufReader(path)
