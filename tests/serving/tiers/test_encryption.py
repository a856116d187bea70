"""Pages that are encrypted at rest: no byte of them is seen, and they open with their key, under their name only."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from tier_pages import LAYOUT, chain, contents, load, make_store, only_on_disk, put

from longctx.serving.kv_cache.encryption import SEAL_BYTES, FileKey, disk_key
from longctx.serving.kv_cache.secret import make_secret

FILE = SEAL_BYTES + 8 + LAYOUT.page_bytes
KEYS = chain("a", 5)


@pytest.fixture
def key(tmp_path: Path) -> str:
    make_secret(tmp_path / "key")
    return str(tmp_path / "key")


def written(directory: Path, key: str | None) -> list[Path]:
    """Files of the pages of `KEYS`, in their order."""
    store = make_store(directory, disk_key_file=key)
    put(store, KEYS)
    store.close()
    key_id = "" if key is None else "-????????????????"
    return [next(directory.rglob(f"*-{each.hex()}{key_id}.page")) for each in KEYS]


def reopened(directory: Path, key: str | None) -> tuple[int, int]:
    """How many leading pages a new store loads, all right, and how many it calls corrupt or unusable."""
    store = make_store(directory, disk_key_file=key)
    try:
        return load(store, KEYS), store.stats.disk.corrupt
    finally:
        store.close()


def test_nothing_of_a_page_is_in_its_file(tmp_path: Path, key: str) -> None:
    files = written(tmp_path / "disk", key)
    for path, name in zip(files, KEYS, strict=True):
        data, payload = path.read_bytes(), contents(name).tobytes()
        assert len(data) == FILE
        assert not any(payload[i : i + 8] in data for i in range(0, len(payload), 8))
    assert len({path.read_bytes()[:16] for path in files}) == 5  # salts
    assert reopened(tmp_path / "disk", key) == (5, 0)


def test_a_page_stays_a_page_while_it_is_in_use(tmp_path: Path, key: str) -> None:
    store = make_store(tmp_path / "disk", disk_key_file=key)
    put(store, KEYS)
    only_on_disk(store)
    assert load(store, KEYS) == 5
    assert store.stats.disk.num_bytes == 5 * FILE
    store.close()


@pytest.mark.parametrize("place", [0, 16, SEAL_BYTES, SEAL_BYTES + 8, FILE - 1])
def test_changed_files_are_misses(tmp_path: Path, key: str, place: int) -> None:
    path = written(tmp_path / "disk", key)[3]
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert reopened(tmp_path / "disk", key) == (3, 1)


def test_files_that_change_places_are_misses(tmp_path: Path, key: str) -> None:
    first, second, *_ = written(tmp_path / "disk", key)
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    assert reopened(tmp_path / "disk", key) == (0, 1)


def test_pages_of_another_key_are_passed_over(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whether there is a key or none, before or after; one line says so, and the pages stay for their own key."""
    make_secret(tmp_path / "other")
    other, folder = str(tmp_path / "other"), tmp_path / "disk"
    written(folder, key)
    for wrong, why in (
        (other, "are not encrypted with this key"),
        (None, "are encrypted, and no disk_key_file is given"),
    ):
        caplog.clear()
        assert reopened(folder, wrong) == (0, 5)
        (line,) = caplog.messages
        assert line == f"disk: 5 pages in {folder} {why}: they are passed over"
    caplog.clear()
    assert reopened(folder, key) == (5, 0)
    assert not caplog.messages
    # One under another key's name, which only somebody else can have given it.
    for path in folder.rglob("*.page"):
        path.rename(path.with_name(re.sub(r"[0-9a-f]+\.page", f"{disk_key(other).id}.page", path.name)))
    assert reopened(folder, other) == (0, 1)


def test_pages_from_before_encryption_are_passed_over(tmp_path: Path, key: str) -> None:
    written(tmp_path / "disk", None)
    assert reopened(tmp_path / "disk", key) == (0, 5)
    assert reopened(tmp_path / "disk", None) == (5, 0)


def test_a_key_opens_what_it_sealed_in_its_context_only(key: str) -> None:
    own, payload = FileKey(key, "key", b"one"), np.random.default_rng(0).bytes(1000)
    sealed = memoryview(b"".join(own.seal([payload[:10], memoryview(payload)[10:]], b"here")))
    head, rest = bytearray(10), bytearray(990)
    assert own.open(sealed, [head, rest], b"here")
    assert bytes(head + rest) == payload
    assert not own.open(sealed, [head, rest], b"there")
    assert not FileKey(key, "key", b"two").open(sealed, [head, rest], b"here")
    assert FileKey(key, "key", b"two").id != own.id == FileKey(key, "key", b"one").id


def test_key_files_that_are_none(tmp_path: Path, key: str) -> None:
    os.chmod(key, 0o640)
    with pytest.raises(ValueError, match=f"^disk_key_file: others than its owner have access to {key}: `chmod 600"):
        make_store(tmp_path / "disk", disk_key_file=key)
    with pytest.raises(ValueError, match="disk_key_file needs disk"):
        make_store(None, disk_key_file=key)
