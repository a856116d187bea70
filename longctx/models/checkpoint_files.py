"""Writes the files of a checkpoint so that each is replaced as a whole."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PREFIX = ".saving-"  # of the temporary directory, beside the files that it replaces


@contextmanager
def replacing_files(directory: Path) -> Iterator[Path]:
    """A temporary directory to write `config.json` and other files to, which are renamed into `directory` at the end.

    After an error or an interrupt nothing is renamed and nothing stays. What a process left that was killed is removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for left in stagings(directory):
        with _locked(left) as is_ours:
            if is_ours:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=directory) as name, _locked(Path(name)):
        staging = Path(name)
        yield staging
        # config.json, which says how the others are read, comes last.
        for path in sorted(staging.iterdir(), key=lambda path: (path.name == "config.json", path.name)):
            # safetensors makes files that only their owner can read.
            shutil.copymode(staging / "config.json", path)
            os.replace(path, directory / path.name)


def stagings(directory: Path) -> list[Path]:
    """The temporary directories of `replacing_files`, also those that a killed process left."""
    return [path for path in directory.glob(_PREFIX + "*") if path.is_dir() and not path.is_symlink()]


def write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Try to lock a directory; False: another process has it locked. The lock of a killed process is gone."""
    try:
        file = os.open(directory, os.O_RDONLY)
    except OSError:  # it was removed meanwhile
        yield False
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
        except OSError:
            is_ours = False
        yield is_ours
    finally:
        os.close(file)
