"""The command that starts an instance of a cluster: flags of `[engine]`, its own, and those that follow from both."""

import argparse
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longctx.cli.arguments.serve import add_arguments
from longctx.cli.config_file import flag_arguments
from longctx.cluster.launcher.launcher import MakeCommand
from longctx.serving.kv_cache.secret import make_secret

_OURS = {"help", "config", "quiet", "host", "port", "role", "cluster", "launcher", "instance_key_file"}
_OURS |= {"ignore_deadlines", "api_key", "api_key_file", "admin_key", "admin_key_file", "allow_host", "allow_origin"}
_OURS |= {"served_model_name", "kv_events", "kv_events_replay", "kv_events_topic", "kv_host", "kv_port", "kv_advertise"}
_OURS |= {"kv_peer", "join", "join_key_file", "join_name", "join_role", "join_url", "prefill_from", "prefill_key_file"}
_OURS |= {"tenant_weight", "coordinator", "num_processes", "process_id", "no_prefix_cache"}
_OURS |= {"record", "record_private", "record_bytes"}
_LOOPBACK = "127.0.0.1"


class Secrets(NamedTuple):
    """What the instances of a cluster share, in files of one folder.

    Attributes:
      pages: of page keys and transfers.
      user, admin: keys of clients and administrators.
    """

    pages: Path
    user: Path
    admin: Path

    @classmethod
    def make(cls, folder: Path, pages: Path | None) -> "Secrets":
        """New ones; `pages`: a file that is there already."""
        made = cls(pages or folder / "pages", folder / "user", folder / "admin")
        if pages is None:
            make_secret(made.pages)
        for path in (made.user, made.admin):
            path.touch(mode=0o600)
            path.write_text(secrets.token_urlsafe(32) + "\n", encoding="ascii")
        return made

    @property
    def admin_key(self) -> str:
        return self.admin.read_text(encoding="ascii").strip()


def serve_parser() -> argparse.ArgumentParser:
    """Of the flags of `longctx serve`."""
    parser = argparse.ArgumentParser(prog="longctx serve", add_help=False)
    parser.add_argument("-q", "--quiet", action="store_true")
    add_arguments(parser)
    return parser


def engine_arguments(place: str, flags: Mapping[str, Any]) -> list[str]:
    """Flags of engines, by their names, as arguments. ValueError: one is none, or is set by who starts instances."""
    for name in flags:
        if name.replace("-", "_") in _OURS:
            raise ValueError(f"{place}{name} is set by who starts the instances")
    return flag_arguments(place, serve_parser(), flags)


def instance_arguments(arguments: Sequence[str], files: Secrets, names: Sequence[str]) -> list[str]:
    """Arguments of `longctx serve` that are the same for all instances, wherever they run."""
    return [
        *arguments,
        *("--quiet", "--role=both", "--ignore-deadlines", f"--kv-secret-file={files.pages}"),
        *(f"--api-key-file={files.user}", f"--admin-key-file={files.admin}"),
        *(f"--served-model-name={name}" for name in names),
    ]


def instance_command(arguments: Sequence[str], own: Sequence[str]) -> MakeCommand:
    """The command of an instance.

    Args:
      arguments: of all instances. own: of this one, which win.
    """

    def make(host: str, port: int, hosts: Sequence[str]) -> list[str]:
        here = [f"--host={host}", f"--port={port}"]
        events = "127.0.0.1" if host == _LOOPBACK else "*"
        here += [f"--kv-events=tcp://{events}:*", f"--kv-events-replay=tcp://{events}:*"]
        if host != _LOOPBACK:
            here += [f"--kv-host={host}", *(f"--kv-peer={each}" for each in hosts if each != host)]
        return [sys.executable, "-m", "longctx.cli.instance", "serve", *arguments, *own, *here]

    return make
