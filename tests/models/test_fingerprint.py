"""A checkpoint's fingerprint: the same for a copy, another for any other."""

import shutil
from pathlib import Path

import pytest

from longctx.models import checkpoint_fingerprint
from longctx.models.builtin import TINY
from longctx.models.safetensors_reader import SINGLE_FILE


def test_a_copy_is_the_same(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("not of the checkpoint")
    found = checkpoint_fingerprint(TINY)
    assert {"config.json", SINGLE_FILE} <= found.keys()
    assert checkpoint_fingerprint(tmp_path / "copy") == found


@pytest.mark.parametrize("at", [0.0, 0.5, 0.999])
def test_another_is_not(at: float, tmp_path: Path) -> None:
    """Other weights differ nearly everywhere, so samples see them."""
    shutil.copytree(TINY, tmp_path / "other")
    path = tmp_path / "other" / SINGLE_FILE
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    begin = int(at * (len(data) - 60_000))
    for i in range(max(begin, 60_000), max(begin, 60_000) + 60_000):
        data[i] ^= 1
    path.write_bytes(data)
    before, after = checkpoint_fingerprint(TINY), checkpoint_fingerprint(tmp_path / "other")
    assert {name for name in before if before[name] != after[name]} == {SINGLE_FILE}


def test_huge_files_and_directories_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)
    assert checkpoint_fingerprint(tmp_path).keys() == {"tokenizer.json"}


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory"):
        checkpoint_fingerprint(tmp_path / "none")
