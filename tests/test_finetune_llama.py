"""`examples/finetune_llama.py`: losses in a ring and on one device, resumed trainings, and what transformers loads."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from longctx.models import Llama, LlamaConfig, load_checkpoint, load_tokenizer, save_checkpoint
from longctx.parallel import make_mesh, shard_sequence

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG = LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=200,
    eos_ids=(0,),
)
LENGTH = 499  # 62.4 tokens a device, so the last devices have padding
TEXT = "".join(f"line {i} says {i * i % 977}\n" for i in range(40))


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import finetune_llama

        yield finetune_llama


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a checkpoint, `model`, with a tokenizer that transformers reads, and of three documents, `data`."""
    folder = tmp_path_factory.mktemp("finetune")
    model = Llama(CONFIG)
    save_checkpoint(folder / "model", model, model.init(jax.random.key(0), initializer_range=0.2))
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=CONFIG.vocab_size, special_tokens=["<end>"], show_progress=False)
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "data").mkdir()
    for i in range(3):
        (folder / "data" / f"{i}.txt").write_text(TEXT[i * 100 :])
    return folder


@pytest.fixture
def run(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def call(*args: object) -> None:
        monkeypatch.setattr(sys, "argv", ["finetune_llama.py", *map(str, args)])
        example.main()

    return call


def options(files: Path, *more: object) -> list[str]:
    return list(map(str, ["--model", files / "model", "--data", files / "data", "--length", LENGTH, *more]))


def record_of(training: Path, step: int) -> Any:
    return json.loads((training / str(step) / "record" / "metadata").read_text())


def test_sequences_are_consecutive_tokens_of_shuffled_documents(example: ModuleType) -> None:
    documents = [np.arange(first, first + size) for first, size in ((0, 70), (100, 45), (200, 3))]
    data = example.PackedDocuments(documents, 50, longest=40)
    batches = [data.batch(i) for i in range(7)]
    assert all(x.shape == (50,) and x.dtype == np.int32 for batch in batches for x in batch)
    # An epoch has every token once, and 350 tokens are almost three epochs of 118.
    stream = np.concatenate([batch.tokens for batch in batches])
    for epoch in range(2):
        np.testing.assert_array_equal(np.sort(stream[118 * epoch :][:118]), np.concatenate(documents))
    assert not np.array_equal(stream[:118], stream[118:236])
    for tokens, targets, positions, segments in batches:
        ends = np.flatnonzero(targets < 0)
        np.testing.assert_array_equal(segments[ends], np.arange(segments[-1] + 1))
        np.testing.assert_array_equal(positions[ends], np.bincount(segments) - 1)
        np.testing.assert_array_equal(np.delete(targets, ends), tokens[np.setdiff1d(np.arange(50), ends) + 1])
        np.testing.assert_array_equal(np.delete(targets - tokens, ends), 1)
        assert positions.max() < 40


def test_documents_are_long_modules_of_the_standard_library_by_default(example: ModuleType, tmp_path: Path) -> None:
    documents = example.read_documents(None)
    assert len(documents) > 5
    assert Path(example.argparse.__file__).read_text() in documents
    (tmp_path / "picture.png").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="holds no text in files"):
        example.read_documents(tmp_path)
    with pytest.raises(ValueError, match=r"picture\.png cannot be read as text"):
        example.read_documents(tmp_path / "picture.png")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "3"], "--out is needed to train"),
        (["--out", "x", "--steps", "5", "--warmup", "5"], "--warmup must be less than --steps, 5, got 5"),
        (["--out", "x", "--length", "0"], "argument --length: must be at least 2, got 0"),
    ],
)
def test_bad_flags_are_refused_by_name(
    run: Callable[..., None], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as error:
        run(*flags)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_sequence_without_targets_changes_nothing(example: ModuleType) -> None:
    model = Llama(CONFIG)
    module = example.to_nnx(model, model.init(jax.random.key(0)))
    batch = example.Batch(*(np.array(x, np.int32) for x in ([1, 2], [-1, -1], [9, 0], [0, 1])))
    value, gradient = nnx.jit(nnx.value_and_grad(example.mean_loss))(module, batch)
    assert value == 0
    assert all((x == 0).all() for x in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_losses_and_gradients_equal_those_of_one_device(example: ModuleType, files: Path) -> None:
    model, params = load_checkpoint(files / "model")
    documents = example.encode_documents(example.read_documents(files / "data"), load_tokenizer(files / "model"))
    data = example.PackedDocuments(documents, LENGTH, CONFIG.max_positions)
    args = argparse_defaults(example)

    def gradient_of(module: nnx.Module, batch: Any) -> tuple[float, Any]:
        value, gradient = nnx.jit(nnx.value_and_grad(example.mean_loss))(module, batch)
        return float(value), jax.device_get(nnx.to_pure_dict(gradient))

    dense, ring = (example.make_module(model, params, mesh, args) for mesh in (None, make_mesh(context=8)))
    batch = data.batch(0)
    (expected, wanted), (value, gradient) = gradient_of(dense, batch), gradient_of(ring, batch)
    assert abs(value - expected) < 1e-5
    # Loss curves are not enough: Adam takes the same steps if all gradients are multiplied by a number.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, wanted)

    # The test would notice tokens in order with the positions of zigzag shards.
    misplaced = shard_sequence(batch.positions, 8, "zigzag", axis=0)[:LENGTH]
    assert abs(gradient_of(ring, batch._replace(positions=misplaced))[0] - expected) > 1e-3


@pytest.mark.slow
def test_compare_prints_both_curves_and_fails_if_they_differ(
    example: ModuleType,
    files: Path,
    run: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = options(files, "--compare", 15, "--accumulate", 2, "--learning-rate", 1e-2, "--chunk", 16)
    run(*flags)
    title, *curves, last = capsys.readouterr().out.splitlines()
    assert title == "step  8 devices  1 device"
    steps, ring, dense = np.array([line.split() for line in curves], float).T
    np.testing.assert_array_equal(steps, np.arange(15))
    np.testing.assert_allclose(ring, dense, rtol=0, atol=1e-4)
    assert dense[-1] < dense[0] - 1
    assert float(last.removeprefix("largest difference: ")) < 1e-4
    monkeypatch.setattr(example, "TOLERANCE", -1.0)
    with pytest.raises(SystemExit, match="the losses differ by more than"):
        run(*flags)


@pytest.mark.slow
def test_a_killed_training_goes_on_with_the_same_losses(
    files: Path, tmp_path: Path, run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(EXAMPLES.parent),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
    }
    flags = options(files, "--steps", 40, "--save-every", 3, "--accumulate", 2)

    def start(out: Path) -> subprocess.Popen[str]:
        command = [sys.executable, str(EXAMPLES / "finetune_llama.py"), *flags, "--out", str(out)]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    first = start(killed)
    while not (tmp_path / "killed.training" / "3").exists():
        assert first.poll() is None, first.stderr and first.stderr.read()
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    assert not killed.exists()
    for out in (killed, whole):
        process = start(out)
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors
    losses = [record_of(tmp_path / f"{out.name}.training", 40)["losses"] for out in (killed, whole)]
    assert len(losses[0]) == 40
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-6)
    for a, b in zip(*(jax.tree.leaves(load_checkpoint(out)[1]) for out in (killed, whole)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)

    # Other settings, or a state that was damaged, are refused.
    with pytest.raises(SystemExit):
        run(*flags, "--out", whole, "--learning-rate", "1")
    assert "was begun with learning_rate 0.0001, not 1.0: give the same, or remove" in capsys.readouterr().err
    other = shutil.copytree(files / "data", tmp_path / "data")
    (other / "1.txt").write_text(TEXT)
    with pytest.raises(SystemExit):
        run(*flags, "--data", other, "--out", whole)
    assert "was begun with data " in capsys.readouterr().err
    for path in (tmp_path / "whole.training" / "40" / "arrays").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(SystemExit):
        run(*flags, "--out", whole)
    assert f"{tmp_path / 'whole.training' / '40'} cannot be read" in capsys.readouterr().err


def test_training_writes_a_checkpoint_of_other_weights(files: Path, tmp_path: Path, run: Callable[..., None]) -> None:
    out = tmp_path / "out"
    few = ("--devices", 1, "--steps", 1, "--warmup", 0, "--learning-rate", 1e-2, "--length", 64)
    run(*options(files, "--out", out, *few))
    assert (out / "loss.svg").read_text().startswith("<?xml")
    assert len(record_of(tmp_path / "out.training", 1)["losses"]) == 1
    (_, params), (_, untrained) = (load_checkpoint(folder) for folder in (out, files / "model"))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.abs(a - b).max() > 1e-4, params, untrained)))


@pytest.mark.slow
def test_transformers_loads_what_was_trained(files: Path, tmp_path: Path, run: Callable[..., None]) -> None:
    import torch
    import transformers

    out = tmp_path / "out"
    few = ("--devices", 2, "--steps", 2, "--warmup", 1, "--learning-rate", 1e-2, "--accumulate", 2)
    run(*options(files, "--out", out, *few))
    model, params = load_checkpoint(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer(TEXT[:300])["input_ids"]
    assert ids == load_tokenizer(files / "model").encode(TEXT[:300])
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(model(params, np.array(ids)), theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_memory_of_a_step_is_linear_in_the_tokens_of_a_device(
    files: Path, tmp_path: Path, run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    # The matrices, which don't grow, are small beside these tokens.
    run("--model", files / "model", "--out", tmp_path, "--devices", 2, "--chunk", 256, "--memory", 32768, 65536)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "MiB of each device, temporary, in one training step"
    assert lines[2] == "| tokens | N = 1 | N = 2 |"
    table = np.array([[cell.replace(",", "") for cell in line.split("|")[1:-1]] for line in lines[4:]], float)
    np.testing.assert_array_equal(table[:, 0], [32768, 65536])
    mib = table[:, 1:]
    np.testing.assert_allclose(mib[1] / mib[0], 2, rtol=0.1)  # twice the tokens
    np.testing.assert_allclose(mib[:, 0] / mib[:, 1], 2, rtol=0.25)  # twice the devices, each with all keys of a layer
    assert (tmp_path / "memory.svg").exists()


def argparse_defaults(example: ModuleType) -> Any:
    """The arguments of a run without flags."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["finetune_llama.py", "--out", "x", "--chunk", "16"])
        return example.parse_args()
