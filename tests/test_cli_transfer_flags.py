"""Flags of prefill and decode apart."""

import argparse
import re
from pathlib import Path

import pytest

from longctx.cli import command_parser
from longctx.cli.serve_settings import check_transfer_flags, transfer_maker
from longctx.cluster import engine_messenger, engine_transfers


def parse(*arguments: str) -> argparse.Namespace:
    return command_parser("serve").parse_args(arguments)


def test_choices_are_those_of_the_cluster_layer() -> None:
    for name, choices in (("role", engine_transfers.ROLES), ("kv_messenger", engine_messenger.MESSENGERS)):
        found = [getattr(parse(f"--{name.replace('_', '-')}", each), name) for each in choices]
        assert found == list(choices)


def test_requests_stay_where_they_are_by_default() -> None:
    check_transfer_flags(parse())
    assert transfer_maker(parse()) is None


SECRET = ("--kv-secret-file", "secret")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-peer", "a"], "--kv-peer needs --role"),
        (["--kv-advertise", "a"], "--kv-advertise needs --role"),
        (["--role", "both", *SECRET, "--kv-peer", "a:0"], "--kv-peer must be HOST or HOST:PORT, got 'a:0'"),
        (["--role", "both"], "--role needs --kv-secret-file"),
        (["--role", "both", *SECRET, "--no-prefix-cache"], "--role contradicts --no-prefix-cache"),
        (["--role", "both", *SECRET, "--record", "folder"], "--role contradicts --record"),
        (["--role", "both", *SECRET, "--kv-host", "0.0.0.0"], "--kv-host 0.0.0.0 needs --kv-advertise"),
    ],
)
def test_flags_that_contradict_each_other(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_transfer_flags(parse(*arguments))


def test_a_secret_is_read_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--kv-secret-file"):
        transfer_maker(parse("--role", "both", "--kv-secret-file", str(tmp_path / "none")))
