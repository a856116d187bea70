"""What commands make of the flags of prefill and decode apart."""

import argparse
import ipaddress
from collections.abc import Callable
from typing import TYPE_CHECKING

from longctx import extras
from longctx.cli.files import read_text
from longctx.cli.kv_flags import SECRET_FLAGS
from longctx.cli.naming import naming_flags
from longctx.cluster.peers import check_peers
from longctx.serving.engine.engine import Engine
from longctx.serving.kv_cache.secret import read_secret

if TYPE_CHECKING:
    from longctx.cluster.engine_messenger import EngineMessenger
    from longctx.cluster.engine_transfers import EngineTransfers

_FLAGS = {"ip": "--kv-host", "port": "--kv-port", "secret": "--kv-secret-file", "inline_tokens": "--prefill-inline"}
_FLAGS |= {"url": "--prefill-from", "peers": "--kv-peer"}
_NEED_ROLE = ("kv_advertise", "kv_peer", "prefill_from")


def check_transfer_flags(options: argparse.Namespace) -> None:
    """ValueError that names the flag, if requests can't move as the flags say; before anything is loaded."""
    if options.role is None:
        for name in _NEED_ROLE:
            if getattr(options, name):
                raise ValueError(f"--{name.replace('_', '-')} needs --role")
        return
    with naming_flags(_FLAGS):
        check_peers(options.kv_peer)
    if options.kv_messenger != "zmq":
        extras.check("mooncake", f"--kv-messenger {options.kv_messenger}")
    if options.kv_secret_file is None:
        raise ValueError("--role needs --kv-secret-file: servers know each other's pages by keys made with it")
    for name, why in (("no_prefix_cache", "pages have keys there"), ("record", "a replay has no other server")):
        if getattr(options, name):
            raise ValueError(f"--role contradicts --{name.replace('_', '-')}: {why}")
    if options.prefill_key_file is not None and not options.prefill_from:
        raise ValueError("--prefill-key-file needs --prefill-from")
    if options.role == "prefill" and options.prefill_from:
        raise ValueError("--prefill-from contradicts --role prefill: it reads prompts itself")
    if _is_any(options.kv_host) and options.kv_advertise is None:
        raise ValueError(f"--kv-host {options.kv_host} needs --kv-advertise: nobody can reach that address")


def transfer_maker(options: argparse.Namespace) -> "Callable[[Engine], EngineTransfers] | None":
    """Makes what moves requests between servers, by the flags; None: they stay where they are."""
    if options.role is None:
        return None
    secret, prefill_key = _secret(options), None
    if options.prefill_key_file is not None:
        prefill_key = read_text("--prefill-key-file", options.prefill_key_file).strip()

    def make(engine: Engine) -> "EngineTransfers":
        from longctx.cluster.engine_transfers import EngineTransfers

        with naming_flags(_FLAGS):
            return EngineTransfers(
                _messenger(options, secret, engine),
                options.kv_peer,
                options.role,
                options.prefill_from,
                prefill_key,
                options.prefill_inline,
            )

    return make


def follower_messenger(options: argparse.Namespace, engine: Engine) -> "EngineMessenger | None":
    """What moves the pages of a process that follows another one, by the flags; None: they stay."""
    if options.role is None:
        return None
    secret = _secret(options)
    with naming_flags(_FLAGS):
        return _messenger(options, secret, engine)


def _messenger(options: argparse.Namespace, secret: str, engine: Engine) -> "EngineMessenger":
    from longctx.cluster.engine_messenger import EngineMessenger

    return EngineMessenger(
        engine,
        options.kv_host,
        options.kv_port,
        secret,
        options.kv_advertise,
        messenger=options.kv_messenger,
        is_plain=options.kv_plain,
    )


def _secret(options: argparse.Namespace) -> str:
    with naming_flags(SECRET_FLAGS):
        return read_secret(options.kv_secret_file).decode("utf-8", "surrogateescape")


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
