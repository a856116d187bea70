"""Flags of what keeps pages beyond the devices."""

import argparse
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from longctx.cli import command_parser
from longctx.cli.flags import parse_bytes
from longctx.cli.settings import page_hash_key, tier_config
from longctx.serving.kv_cache.secret import make_secret
from longctx.serving.kv_cache.tiers.config import TierConfig


def options(**given: Any) -> argparse.Namespace:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return command_parser("serve").parse_args(flags)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("17", 17),
        ("8GiB", 8 * 2**30),
        ("500MB", 500_000_000),
        ("1.5kB", 1500),
        ("2 KiB", 2048),
        ("3B", 3),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_tiers_of_flags(tmp_path: Path) -> None:
    assert tier_config(options()) is None
    given = options(kv_host_bytes="1MiB", kv_disk=tmp_path, kv_disk_bytes="2MiB", kv_eviction="lfu")
    assert tier_config(given) == TierConfig(2**20, 2**21, str(tmp_path), "lfu")


def test_the_key_of_a_disk_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    key = tmp_path / "key"
    given = options(kv_host_bytes="1MiB", kv_disk=tmp_path, kv_disk_bytes="2MiB", kv_disk_key_file=key)
    with pytest.raises(ValueError, match=r"^--kv-disk-key-file: .*key can't be read: No such file"):
        tier_config(given)
    make_secret(key)
    assert tier_config(given) == TierConfig(2**20, 2**21, str(tmp_path), disk_key_file=str(key))
    for alone in (options(kv_disk_key_file=key), options(kv_host_bytes="1MiB", kv_disk_key_file=key)):
        with pytest.raises(ValueError, match=r"^--kv-disk-key-file needs --kv-"):
            tier_config(alone)


def test_a_folder_of_pages_keeps_its_own_secret(tmp_path: Path) -> None:
    given = options(kv_host_bytes="1", kv_disk=tmp_path / "pages", kv_disk_bytes="1")
    key = page_hash_key(given)
    assert key is not None
    assert key == page_hash_key(given)
    assert stat.S_IMODE((tmp_path / "pages" / "secret").stat().st_mode) == 0o600
    assert page_hash_key(options()) is None


def test_a_secret_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text("a" * 40 + "\n")
    first = page_hash_key(options(kv_secret_file=file))
    file.write_text("b" * 40)
    assert first != page_hash_key(options(kv_secret_file=file))


def test_servers_that_start_at_once_agree_on_a_secret(tmp_path: Path) -> None:
    given, barrier = options(kv_disk=tmp_path / "pages"), threading.Barrier(8)

    def start(_: int) -> bytes | None:
        barrier.wait()
        return page_hash_key(given)

    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(start, range(8)))
    assert len(keys) == 1
    assert None not in keys
    assert [file.name for file in (tmp_path / "pages").iterdir()] == ["secret"]


def test_a_crash_leaves_no_empty_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = options(kv_disk=tmp_path / "pages")
    for name in ("fsync", "link"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, _crash)
            with pytest.raises(ValueError, match=r"--kv-disk .* can't be used"):
                page_hash_key(given)
        assert list((tmp_path / "pages").iterdir()) == []
    assert page_hash_key(given) == page_hash_key(given)


def _crash(*arguments: object) -> None:
    raise OSError("the disk is full")
