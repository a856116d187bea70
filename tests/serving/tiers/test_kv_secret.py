"""The file of the secret that page keys depend on."""

import os
from pathlib import Path

import pytest

from longctx.serving import EngineConfig
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.kv_cache.secret import read_kv_secret


def write(path: Path, contents: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(contents)
    path.chmod(mode)
    return path


def test_engines_with_one_secret_have_the_same_keys(tmp_path: Path) -> None:
    file = write(tmp_path / "a", b"0123456789abcdef" * 4)
    same = write(tmp_path / "b", b"0123456789abcdef" * 4 + b"\n", 0o400)
    other = write(tmp_path / "c", os.urandom(64))
    secrets = [read_kv_secret(path) for path in (file, same, other)]
    assert [len(secret) for secret in secrets] == [32] * 3
    assert EngineConfig(hash_key=secrets[0]).hash_key == secrets[0]
    roots = [PageHash(secret, 8).root("tenant") for secret in secrets]
    assert roots[0] == roots[1] != roots[2]
    assert PageHash(secrets[0], 8).root("other") != roots[0]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o620, 0o602])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match=r"others than its owner have access to .*chmod 600"):
        read_kv_secret(write(tmp_path / "secret", b"x" * 64, mode))


def test_contents_that_could_be_guessed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must have 32 to 4096 bytes, got 31"):
        read_kv_secret(write(tmp_path / "short", b"x" * 31 + b"\n" * 9))
    with pytest.raises(ValueError, match="must have 32 to 4096 bytes, got 4097"):
        read_kv_secret(write(tmp_path / "long", b"x" * 5000))
    with pytest.raises(ValueError, match=r"kv_secret_file: .*missing can't be read: No such file"):
        read_kv_secret(tmp_path / "missing")
    with pytest.raises(ValueError, match="can't be read: Is a directory"):
        read_kv_secret(tmp_path)
    with pytest.raises(ValueError, match="is not a regular file"):
        read_kv_secret("/dev/zero")
