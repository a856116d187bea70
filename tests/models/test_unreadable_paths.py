"""Paths that the system refuses to look at: loaders raise ValueError with the path, and `verify` lists what it can."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longctx.models import LlamaConfig, load_checkpoint, load_tokenizer, verify
from longctx.models.checkpoint_verify import checkpoint_fingerprint
from longctx.models.safetensors_reader import CheckpointError, SafetensorsReader

TOO_LONG = "x" * 300


def read_config(directory: Path) -> Any:
    return LlamaConfig.from_hf(directory / "config.json")


@pytest.fixture
def unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose files cannot be looked at, not even by root, whom permissions don't stop."""
    directory, stat = tmp_path / "model", os.stat
    directory.mkdir()
    (directory / "config.json").write_text("{}")

    def refuse(path: Any, *arguments: Any, **more: Any) -> os.stat_result:
        if str(path).startswith(f"{directory}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *arguments, **more)

    monkeypatch.setattr(os, "stat", refuse)
    return directory


@pytest.mark.parametrize("load", [load_checkpoint, load_tokenizer, read_config, verify, checkpoint_fingerprint])
def test_names_that_are_too_long_are_refused_with_the_path(load: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{TOO_LONG}.* cannot be read: File name too long"):
        load(tmp_path / TOO_LONG)


@pytest.mark.parametrize("load", [load_checkpoint, load_tokenizer, read_config, checkpoint_fingerprint])
def test_unreadable_directories_are_refused_with_the_path(load: Callable[[Path], Any], unreadable: Path) -> None:
    with pytest.raises(ValueError, match=f"{unreadable}.* cannot be read: Permission denied"):
        load(unreadable)


def test_unreadable_weights_are_a_checkpoint_error(unreadable: Path) -> None:
    with pytest.raises(CheckpointError, match="Permission denied"):
        SafetensorsReader(unreadable)


def test_verify_lists_what_it_cannot_read(unreadable: Path) -> None:
    (unreadable / "link").symlink_to("config.json")
    config, weights, _ = verify(unreadable)
    assert all("Permission denied" in problem for problem in (config, weights))


def test_names_without_a_meaning_are_no_such_path() -> None:
    with pytest.raises(FileNotFoundError, match="no such directory"):
        load_tokenizer("a\0b")
