"""`verify` and `longctx doctor`: a sound checkpoint has no problem, and of a damaged one every problem is named."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hf_reference import Case
from safetensors.numpy import load_file, save_file
from test_tokenizer import LLAMA3_TEMPLATE, byte_level, write

from longctx.cli import main
from longctx.models import LlamaConfig, load_tokenizer, verify
from longctx.models.builtin import TINY
from longctx.models.checkpoint_verify import tokenizer_problems, weight_problems

CASE = Case(vocab_size=320, layers=2)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers writes it, with a tokenizer, which tests must not change."""
    directory = tmp_path_factory.mktemp("checkpoint")
    CASE.write(directory)
    return write(directory, byte_level(), chat_template=LLAMA3_TEMPLATE)


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return shutil.copytree(written, tmp_path / "checkpoint")


def edit_tensors(directory: Path, change: Callable[[dict[str, Any]], Any], file: str = WEIGHTS) -> None:
    tensors = load_file(directory / file)
    change(tensors)
    save_file(tensors, directory / file)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_problems(found: Iterable[str], *expected: list[str]) -> None:
    """There is a problem for each list, in order, with all its words in one line."""
    found = list(found)
    assert len(found) == len(expected), found
    for problem, words in zip(found, expected, strict=True):
        assert all(word in problem for word in words), problem
        assert "\n" not in problem


def test_sound_checkpoints_have_no_problem(checkpoint: Path) -> None:
    calls = []
    assert verify(checkpoint, lambda done, total: calls.append((done, total))) == []
    assert calls[0] == (1, 21)
    assert calls[-1] == (21, 21)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_that_are_not_finite_are_found(checkpoint: Path, dtype: Any) -> None:
    def damage(tensors: dict[str, Any]) -> None:
        tensors.update({name: tensor.astype(dtype) for name, tensor in tensors.items()})
        tensors[Q_PROJ][5, 3:5] = np.nan
        tensors["model.norm.weight"][-1] = -np.inf

    edit_tensors(checkpoint, damage)
    values = "that are NaN or infinite"
    assert {line.split("tensor ")[1] for line in weight_problems(checkpoint, None)} == {
        f"'{Q_PROJ}' has 2 values of 4096 {values}",
        f"'model.norm.weight' has 1 values of 64 {values}",
    }


def test_all_problems_of_tensors_are_listed(checkpoint: Path) -> None:
    def damage(tensors: dict[str, Any]) -> None:
        tensors[Q_PROJ] = tensors[Q_PROJ][:, :8].copy()
        del tensors["lm_head.weight"]
        tensors["adapter"] = np.full(3, np.nan, np.float32)
        tensors["empty"] = np.zeros((2**40, 0), np.float32)
        tensors["scalar"] = np.full((), np.inf, np.float32)

    edit_tensors(checkpoint, damage)
    assert_problems(
        weight_problems(checkpoint, LlamaConfig.from_hf(checkpoint / "config.json")),
        [Q_PROJ, "(64, 8)"],
        ["no tensor 'lm_head.weight'"],
        ["unexpected", "'adapter'"],
        ["unexpected", "'empty'"],
        ["unexpected", "'scalar'"],
        ["'adapter'", "3 values of 3"],
        ["'scalar'", "1 values of 1"],
    )


def test_all_damaged_files_are_listed(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).unlink()
    CASE.build().save_pretrained(checkpoint, max_shard_size="100KB")
    assert list(weight_problems(checkpoint, LlamaConfig.from_hf(checkpoint / "config.json"))) == []
    first, second, third, *_ = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    (checkpoint / first).unlink()
    (checkpoint / second).write_bytes((checkpoint / second).read_bytes()[:-1])
    (checkpoint / third).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    edit_json(checkpoint / "config.json", rms_norm_eps=-1)
    (checkpoint / "tokenizer.json").unlink()
    assert_problems(
        verify(checkpoint),
        ["config.json", "rms_norm_eps"],
        ["index.json", first],
        [second, "truncated"],
        [third, "Git LFS pointer"],
        ["no tokenizer.json"],
    )


def test_a_directory_that_lacks_everything(tmp_path: Path) -> None:
    assert_problems(verify(tmp_path), ["config.json"], ["neither model.safetensors"], ["no tokenizer.json"])
    with pytest.raises(FileNotFoundError, match="no such directory"):
        verify(tmp_path / "none")


def abort(directory: Path) -> None:
    """A prefix that cuts a character in two makes the library abort its process, at least in version 0.23."""
    path = directory / "tokenizer.json"
    contents = json.loads(path.read_text())
    contents["model"]["continuing_subword_prefix"] = "0"
    path.write_text(json.dumps(contents | {"added_tokens": None}))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda d: (d / "tokenizer.json").write_text("{}"), ["tokenizer.json", "is not a tokenizer"]),
        (abort, ["tokenizer.json"]),
        (lambda d: edit_json(d / "tokenizer_config.json", eos_token=3), ["tokenizer_config.json", "eos_token"]),
        (
            lambda d: edit_json(d / "tokenizer_config.json", chat_template="{{ 1 // 0 }}"),
            ["tokenizer_config.json", "chat template", "ZeroDivisionError"],
        ),
        (lambda d: (d / "chat_template.jinja").write_bytes(b"\xff"), ["chat_template.jinja", "UTF-8"]),
        (lambda d: (d / "generation_config.json").write_text('{"eos_token_id": -1}'), ["generation", "eos_token_id"]),
        (
            lambda d: edit_json(d / "tokenizer.json", added_tokens=[ADDED]),
            ["the tokenizer has the id 320", "vocab_size in config.json is 320"],
        ),
        (
            lambda d: (d / "generation_config.json").write_text('{"eos_token_id": [1, 1000000]}'),
            ["eos_token_id 1000000 must be below vocab_size in config.json, 320"],
        ),
        (
            lambda d: edit_json(d / "tokenizer_config.json", eos_token="<nope>"),
            ["tokenizer_config.json", "eos_token '<nope>' is not in the vocabulary"],
        ),
    ],
)
def test_problems_of_tokenizers_are_found(checkpoint: Path, damage: Callable[[Path], Any], expected: list[str]) -> None:
    damage(checkpoint)
    assert_problems(tokenizer_problems(checkpoint, 320), expected)


ADDED = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
ADDED |= {"id": 400, "content": "<far>"}


# The command


def test_doctor_prints_a_line_for_each_problem(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(TINY)]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"no problems in {TINY}\n"
    (checkpoint / "tokenizer.json").unlink()
    edit_json(checkpoint / "config.json", hidden_act="a\nb\ud800")
    assert main(["doctor", "--model", str(checkpoint)]) == 1
    printed = capsys.readouterr()
    config, tokenizer = printed.out.splitlines()
    assert "hidden_act" in config
    assert "no tokenizer.json" in tokenizer
    assert printed.err == f"2 problems in {checkpoint}\n"
    assert main(["doctor", "--model", str(checkpoint / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_tokenizers_that_fail_later_are_refused_when_they_are_loaded(checkpoint: Path) -> None:
    """The library panics when it encodes: a BaseException that is no Exception."""
    path = checkpoint / "tokenizer.json"
    processor = json.loads(path.read_text())["post_processor"]
    edit_json(path, post_processor=processor | {"special_tokens": {}})
    with pytest.raises(ValueError, match=r"tokenizer\.json: the tokenizer failed: no entry found"):
        load_tokenizer(checkpoint)
