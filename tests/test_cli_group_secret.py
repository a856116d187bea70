"""`longctx group-secret`, and the flag that takes what it prints."""

from pathlib import Path

import pytest

from longctx.cli import main
from longctx.models.builtin import TINY

GENERATE = ["generate", "--model", str(TINY), "--prompt", "x"]


def test_every_secret_is_another_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert [main(["group-secret"]) for _ in range(2)] == [0, 0]
    first, second = capsys.readouterr().out.split()
    assert first != second
    assert min(len(first), len(second)) >= 32


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (None, ["--coordinator", "127.0.0.1:9"], "--group-secret-file: no such file"),
        (b"\xff", ["--coordinator", "127.0.0.1:9"], "secret is not UTF-8"),
        (b"short\n", ["--coordinator", "127.0.0.1:9"], "at least 32 characters, got 5: make one with"),
        (b"a" * 64, [], "--group-secret-file must come with --coordinator"),
    ],
)
def test_wrong_secret_files_are_named(
    content: bytes | None, flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    more = ["--num-processes", "2", "--process-id", "0"] if flags else []
    assert main([*GENERATE, "--group-secret-file", str(path), *flags, *more]) == 2
    assert message in capsys.readouterr().err


def test_a_coordinator_on_the_network_needs_a_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LONGCTX_GROUP_SECRET", raising=False)
    flags = ["--coordinator", "192.0.2.1:9", "--num-processes", "2", "--process-id", "1"]
    assert main([*GENERATE, *flags]) == 2
    assert "make one with `longctx group-secret > FILE`" in capsys.readouterr().err
