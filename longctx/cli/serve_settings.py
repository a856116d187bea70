"""Settings of a server that are made from the flags of `longctx serve`, for an engine and for a cluster."""

import argparse
import contextlib
import gc
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from longctx import extras
from longctx.cli.files import check_output, read_text
from longctx.cli.flags import flag, naming, prefixing, read, refuse
from longctx.cli.settings import engine_config, page_hash_key, tier_config
from longctx.cluster.peers import Peers
from longctx.cluster.server_url import host_port
from longctx.models.builtin import TINY
from longctx.models.chat_template import ChatTemplate
from longctx.serving import EngineConfig
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.kv_cache.secret import read_secret
from longctx.serving.server.settings import ApiKey, ObserverSettings, ServerSettings, is_loopback, read_keys
from longctx.serving.server.tls import Tls

if TYPE_CHECKING:
    from longctx.cluster.engine_messenger import EngineMessenger
    from longctx.cluster.engine_transfers import EngineTransfers
    from longctx.serving.engine.engine import Engine
    from longctx.serving.server.auth import KeyRing

_BUILTIN_NAME = "longctx-tiny"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANY = ("0.0.0.0", "::")
_TRANSFERS = {"ip": "--kv-host", "port": "--kv-port", "secret": "--kv-secret-file", "peers": "--kv-peer"}


def serve_config(options: argparse.Namespace) -> EngineConfig:
    """Make the configuration of a server's engine from the flags."""
    tiers, key = tier_config(options), page_hash_key(options)
    return engine_config(options, tiers=tiers, hash_key=key, transfers=options.role is not None)


def server_settings(options: argparse.Namespace) -> ServerSettings:
    """Make the settings of a server from the flags."""
    if options.profile_dir is not None and not options.profile_dir.is_dir():
        raise ValueError(f"--profile-dir {options.profile_dir} is no folder")
    keys, hosts = _keys(options, "api"), tuple(name.lower() for name in options.allow_hosts)
    is_public = not is_loopback(options.host)
    if is_public and not keys and not options.allow_anonymous:
        raise ValueError(
            f"--host {options.host} lets other hosts in, and without keys every client may use the server: give "
            "--api-key-file, or --allow-anonymous if that is meant"
        )
    if not (keys or hosts or is_public):
        hosts = (*LOOPBACK, options.host)
    if options.audit_log is not None and str(options.audit_log) != "-":
        check_output("--audit-log", options.audit_log)
    return read(ServerSettings, options, api_keys=keys, admin_keys=_keys(options, "admin"), allow_hosts=hosts)


def observer_settings(options: argparse.Namespace) -> ObserverSettings:
    """Make the settings of a server's observers from the flags."""
    settings = read(ObserverSettings, options, kv_events_secret=pages_secret(options))
    if settings.kv_events is not None and not settings.kv_events_plain and settings.kv_events_secret is None:
        from longctx.serving.server.kv_publisher import check_reach

        check_reach(settings.kv_events, settings.kv_events_replay)  # before anything is loaded
    return settings


def pages_secret(options: argparse.Namespace) -> str | None:
    """Read `--kv-secret-file`; None: it is not given."""
    if options.kv_secret_file is None:
        return None
    return read_secret(options.kv_secret_file).decode("utf-8", "surrogateescape")


def _keys(options: argparse.Namespace, who: str) -> tuple[ApiKey, ...]:
    lines = list(getattr(options, f"{who}_key"))
    file = getattr(options, f"{who}_key_file")
    if file is not None:
        lines += read_text(f"--{who}-key-file", file, is_secret=True).splitlines()
    with prefixing(f"--{who}-key: "):
        return read_keys(lines, who)


def watch_keys(keys: "KeyRing", options: argparse.Namespace) -> None:
    """Have the keys of a server read again when one of the files that flags name has changed."""

    def read_again() -> tuple[ApiKey, ...]:
        return ServerSettings(api_keys=_keys(options, "api"), admin_keys=_keys(options, "admin")).keys

    paths = [path for path in (options.api_key_file, options.admin_key_file) if path is not None]
    keys.watch(paths, read_again)


def tls_of(options: argparse.Namespace) -> Tls | None:
    """Read the certificates that the flags name; None: plain HTTP. ValueError names the flag.

    SIGHUP does nothing from then on until the server listens, which reads them again.
    """
    if options.tls_cert is None and options.tls_key is None:
        refuse(options, ("tls_ca",), "needs --tls-cert and --tls-key")
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise ValueError("--tls-cert and --tls-key must be given together")
    with naming({name: flag(name) for name in ("tls_cert", "tls_key", "tls_ca")}):
        tls = Tls(options.tls_cert, options.tls_key, options.tls_ca)
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    return tls


def server_url(listener: socket.socket, tls: Tls | None) -> str:
    """Return the URL of a server that listens."""
    return f"{'http' if tls is None else 'https'}://{host_port(*listener.getsockname()[:2])}"


def model_names(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the names by which clients may call the model; the first one is in the answers, and never a path."""
    if options.served_model_name:
        return tuple(options.served_model_name)
    if options.model == TINY:
        return (_BUILTIN_NAME,)
    path = Path(options.model)
    return (path.resolve().name.removesuffix(".gguf") if path.exists() else str(options.model),)


def chat_template(options: argparse.Namespace) -> ChatTemplate | None:
    """Read `--chat-template`; None: the tokenizer's own is to be taken."""
    path = options.chat_template
    return None if path is None else ChatTemplate(path, read_text("--chat-template", path))


def keep_objects() -> None:
    """Leave what is there out of all searches for garbage from now on: one of everything stops a server for 0.1 s."""
    gc.collect()
    gc.freeze()


# Requests that move between servers.


def check_transfer_flags(options: argparse.Namespace) -> None:
    """Check that requests can move as the flags say, before anything is loaded; ValueError names the flag."""
    if options.role is None:
        refuse(options, ("kv_advertise", "kv_peer"), "needs --role")
        return
    with naming(_TRANSFERS):
        Peers(options.kv_peer, "localhost")
    if options.kv_messenger != "zmq":
        extras.check("mooncake", f"--kv-messenger {options.kv_messenger}")
    if options.kv_secret_file is None:
        raise ValueError("--role needs --kv-secret-file: servers know each other's pages by keys made with it")
    if not options.prefix_cache:
        raise ValueError("--role contradicts --no-prefix-cache: pages have keys there")
    if options.record:
        raise ValueError("--role contradicts --record: a replay has no other server")
    if options.kv_host in _ANY and options.kv_advertise is None:
        raise ValueError(f"--kv-host {options.kv_host} needs --kv-advertise: no other host can reach that address")


def make_transfers(options: argparse.Namespace, tls: Tls | None, engine: "Engine") -> "EngineTransfers":
    """Make what moves an engine's requests to and from others, by the flags."""
    from longctx.cluster.engine_transfers import EngineTransfers

    messenger = make_messenger(options, engine)
    with naming(_TRANSFERS):
        return EngineTransfers(messenger, options.kv_peer, options.role, tls)


def make_messenger(options: argparse.Namespace, engine: "Engine") -> "EngineMessenger":
    """Make what moves an engine's pages, by the flags; a process that follows another one has nothing more."""
    from longctx.cluster.engine_messenger import EngineMessenger

    with naming(_TRANSFERS):
        return EngineMessenger(
            engine,
            options.kv_host,
            options.kv_port,
            pages_secret(options),
            options.kv_advertise,
            messenger=options.kv_messenger,
            is_plain=options.kv_plain,
        )


# A server that becomes an instance of a cluster.


def check_join_flags(options: argparse.Namespace) -> None:
    """Check that the server can join as the flags say, before anything is loaded; ValueError names the flag."""
    if not options.join:
        refuse(options, ("join_key_file", "join_name", "join_role", "join_url"), "needs --join")
        return
    from longctx.cluster.join import check_join_url, router_url

    if options.role is None:
        raise ValueError("--join needs --role: requests move between the instances of a cluster")
    if options.join_role not in (None, options.role) and options.role != "both":
        raise ValueError(f"--join-role {options.join_role} contradicts --role {options.role}")
    for each in options.join:
        router_url(each)
    if options.join_url is not None:
        check_join_url(options.join_url)
        if options.join_url.startswith("http:") and options.tls_cert is not None:
            raise ValueError("--join-url must be https://HOST:PORT, as --tls-cert is given")
    if options.join_url is None and options.host in _ANY:
        raise ValueError(f"--join with --host {options.host} needs --join-url: where the router reaches this server")
    _join_key(options)


def joining(
    options: argparse.Namespace, url: str, is_open: Callable[[], bool], page_hash: PageHash | None, tls: Tls | None
) -> AbstractContextManager[object]:
    """Return what registers the server with routers, while it is entered; at `url` unless the flags say otherwise."""
    if not options.join:
        return contextlib.nullcontext()
    from longctx.cluster.join import Joining

    assert page_hash is not None, "--join needs --role, which needs a prefix cache"
    role, url = options.join_role or options.role, options.join_url or url
    return Joining(options.join, url, role, is_open, page_hash, _join_key(options), options.join_name, tls)


def _join_key(options: argparse.Namespace) -> str | None:
    if options.join_key_file is None:
        return None
    lines = read_text("--join-key-file", options.join_key_file, is_secret=True).splitlines()
    with prefixing("--join-key-file: "):
        keys = read_keys(lines, "join")
        if len(keys) != 1 or keys[0].is_hashed:
            raise ValueError("one key must stand there as it is, a line KEY or NAME KEY")
    return keys[0].key
