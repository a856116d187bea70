"""`longctx serve --cluster FILE`: many engines behind one address."""

import argparse
import contextlib
import dataclasses
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from longctx.cli import command_flags, command_parser
from longctx.cli.config_file import flag_arguments
from longctx.cli.files import read_text
from longctx.cli.flags import naming, prefixing, read
from longctx.cli.serve_settings import (
    chat_template,
    check_transfer_flags,
    keep_objects,
    model_names,
    pages_secret,
    serve_config,
    server_settings,
    server_url,
    tls_of,
    watch_keys,
)
from longctx.cli.settings import parallel_plan
from longctx.cli.terminal import FAILED, Console, interrupts, report_error
from longctx.cluster.config import ClusterFile, InstanceEntry, read_cluster
from longctx.cluster.launcher.launcher import Address, Launched, MakeCommand, ProcessLauncher
from longctx.cluster.launcher.ray_launcher import RayLauncher
from longctx.cluster.peers import Peers
from longctx.cluster.router.routes import make_router_app
from longctx.cluster.router.server import ClusterBackend, RouterServer, RouterSettings
from longctx.cluster.server_url import host_port
from longctx.models import load_tokenizer, resolve_model
from longctx.models.chat_template import ChatTemplate
from longctx.models.checkpoint import read_model
from longctx.serving.kv_cache.secret import SecretFiles
from longctx.serving.server import logs
from longctx.serving.server.http_server import HttpServer, bind
from longctx.serving.server.settings import (
    ApiKey,
    ObserverSettings,
    ServerSettings,
    hash_key,
    is_loopback,
    read_keys,
)
from longctx.serving.server.tls import Tls

_ROUTER = {each.name for each in dataclasses.fields(ServerSettings)}
_ROUTER -= {"stall_timeout"}
_ROUTER |= {"max_waiting", "host", "port", "api_key", "api_key_file", "admin_key", "admin_key_file", "allow_anonymous"}
_ROUTER |= {"tls_cert", "tls_key", "tls_ca", "max_logprob_bytes"}
_ROUTER |= {"served_model_name", "chat_template", "metrics_prefix", "log_format", "quiet", "config"}
_ROUTER |= {"cluster", "launcher", "instance_key_file", "kv_peer", "compile_cache", "log_prompts", "end_with_stdin"}
"""Options of the router itself; those of the other flags are of its instances."""
_OURS = {"help", "config", "quiet", "host", "port", "role", "cluster", "launcher", "instance_key_file"}
_OURS |= {"ignore_deadlines", "api_key", "api_key_file", "admin_key", "admin_key_file", "allow_host", "allow_origin"}
_OURS |= {"allow_anonymous", "served_model_name", "kv_events", "kv_events_replay", "kv_events_topic"}
_OURS |= {"kv_events_plain", "kv_events_tokens", "kv_host", "kv_port", "kv_advertise"}
_OURS |= {"kv_peer", "join", "join_key_file", "join_name", "join_role", "join_url"}
_OURS |= {"tenant_weight", "coordinator", "num_processes", "process_id", "no_prefix_cache", "end_with_stdin"}
_OURS |= {"record", "record_bytes", "record_key_file"}
"""Flags of instances that the launcher sets, so that a file must not."""
_LOOPBACK = "127.0.0.1"
_Launcher = ProcessLauncher | RayLauncher
_LOOK = 0.2  # seconds between two looks at whether all instances are there


class Secrets(NamedTuple):
    """Secrets that the instances of a cluster share, in files.

    Attributes:
      pages: of page keys and transfers.
      user: the digest of a key that was forgotten, so that the router alone may ask.
    """

    pages: Path
    user: Path

    @classmethod
    def make(cls, files: SecretFiles, pages: Path | None) -> "Secrets":
        """New ones; `pages`: a file that is there already."""
        user = hash_key(secrets.token_hex(32))
        return cls(pages or files.add(secrets.token_hex(32).encode()), files.add(user.encode()))


class InstanceKeys(NamedTuple):
    """Keys by which the router asks instances, and these register.

    Attributes:
      shared: of those that have none of their own; None: they need none.
      joiners: of those that may register, by their names.
      own: by the name of an instance.
    """

    shared: str | None
    joiners: tuple[ApiKey, ...]
    own: dict[str, str]

    @classmethod
    def read(cls, path: Path | None) -> "InstanceKeys":
        """Read `--instance-key-file`: lines `NAME KEY`, and one `KEY` for all others."""
        flag, lines = "--instance-key-file", list[str]()
        if path is not None:
            lines = read_text(flag, path, is_secret=True).splitlines()
        with prefixing(f"{flag}: "):
            shared = read_keys([line for line in lines if len(line.split()) == 1], "shared")
            own = read_keys([line for line in lines if len(line.split()) != 1], "instance")
            if any(key.is_hashed for key in (*shared, *own)):
                raise ValueError("keys must stand there as they are, as the router sends them")
            if len(shared) > 1:
                raise ValueError("one key may be without a name, that of all other instances")
        return cls(shared[0].key if shared else None, own, {key.name: key.key for key in own})


def serve_cluster(options: argparse.Namespace) -> int:
    """Serve the instances of a cluster until a signal comes; the exit status."""
    file = read_cluster(options.cluster, options.launcher)
    settings, observers, template = server_settings(options), read(ObserverSettings, options), chat_template(options)
    tls = tls_of(options)
    _check_access(options, settings)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(options.host, options.port))
        stack.callback((files := SecretFiles()).close)
        engine, launcher, keys = _prepare(options, file, files)
        make_server = _server_maker(options, file, engine, settings, template, keys, tls)  # before anything is started
        stack.callback(launcher.close)
        try:
            addresses = launcher.start()
        except RuntimeError as error:
            return report_error(f"the instances can't be started: {error}", FAILED)
        server = make_server(addresses)
        watch_keys(server.keys, options)
        _log_requests(observers, stack, server.cluster)
        stack.enter_context(logs.shown("longctx.access", observers.log_format, is_quiet=options.quiet))
        http = HttpServer(server, make_router_app(server), tls, needs_certificate=False)  # its users have keys
        launcher.moved = lambda address: http.loop.call_soon_threadsafe(_move, server, address)
        interrupts.leave_to_python()
        ended = threading.Event()
        console, url = Console(options.quiet), server_url(listener, tls)
        console.note(f"router   at {url}; {len(addresses)} instances by {file.launcher}")
        watch = threading.Thread(target=_watch, args=(server, http, launcher, len(addresses), ended, console, url))
        watch.start()
        stack.callback(watch.join)
        stack.callback(ended.set)
        keep_objects()
        http.run([listener])
        return FAILED if launcher.problem is not None else 0


def _check_access(options: argparse.Namespace, settings: ServerSettings) -> None:
    """Raise ValueError for a router whose instances' key others could get at, or that takes instances from nowhere."""
    with naming({"peers": "--kv-peer"}):
        Peers(options.kv_peer, "localhost")
    if not settings.admin_keys:
        for flag, needs in (
            (f"--host {options.host}", not is_loopback(options.host)),
            ("--instance-key-file", options.instance_key_file is not None),
        ):
            if needs:
                raise ValueError(f"{flag} needs --admin-key-file: without it all who reach the router command it")


def _log_requests(settings: ObserverSettings, stack: contextlib.ExitStack, backend: ClusterBackend) -> None:
    """Log requests that have ended, in a thread of its own."""
    if settings.log_format is not None:
        stack.callback(logs.install(settings.log_format, sys.stderr))
        worker = stack.enter_context(ThreadPoolExecutor(1, "longctx-log"))
        note = logs.RequestLog(settings.log_prompts).note
        backend.on_end.append(lambda output, request: worker.submit(note, output, request))


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of engines that the command line has, by their names; they win over the file's."""
    given: dict[str, Any] = {}
    for action in command_flags("serve"):
        value = getattr(options, action.dest, action.default)
        if action.dest not in _ROUTER and value != action.default:
            value = ",".join(map(str, value)) if isinstance(value, tuple) else value
            given[action.option_strings[-1][2:]] = True if action.nargs == 0 else value
    return given


def _prepare(
    options: argparse.Namespace, file: ClusterFile, secret_files: SecretFiles
) -> tuple[argparse.Namespace, _Launcher, InstanceKeys]:
    """Return the flags of the instances, their launcher, and the keys by which they are asked."""
    place = f"{options.cluster}: "
    given = {name.replace("_", "-"): value for name, value in file.engine.items()} | _given(options)
    pages = given.pop("kv-secret-file", None)
    starts = [each for each in file.instances if each.url is None]
    if pages is None and (len(starts) < len(file.instances) or not starts):
        raise ValueError(f"{place}[engine] kv_secret_file must be there: it is that of the instances that run already")
    files = Secrets.make(secret_files, None if pages is None else Path(pages))
    arguments = engine_arguments(f"{place}[engine] ", given)
    own = {each.name: engine_arguments(f"{place}[[instances]] {each.name}: flags.", each.flags) for each in starts}
    names = tuple(options.served_model_name)
    common = instance_arguments(arguments, files, names)
    with prefixing(f"{place}[engine] "):
        engine = command_parser("serve").parse_args(common)
        check_transfer_flags(engine)
        serve_config(engine)
    schemes: dict[str, str] = {}
    for each in starts:
        with prefixing(f"{place}[[instances]] {each.name}: "):
            parsed = command_parser("serve").parse_args([*common, *own[each.name]])
            serve_config(parsed)
            schemes[each.name] = "http" if parsed.tls_cert is None else "https"
            num_devices = parallel_plan(parsed).num_devices
            if num_devices % each.processes:
                message = "processes must divide the {} devices of --stage, --context and --tensor, got {}"
                raise ValueError(message.format(num_devices, each.processes))
    keys, launched = InstanceKeys.read(options.instance_key_file), list[Launched]()
    for each in starts:  # one that falls into wrong hands opens no other
        keys.own[each.name] = secrets.token_hex(32)
        admin = secret_files.add(f"router {keys.own[each.name]}".encode())
        command = instance_command(common, [*own[each.name], f"--admin-key-file={admin}"])
        paths = (*map(str, files), str(admin))
        launched.append(Launched(each.name, each.role, command, paths, _environments(each), schemes[each.name]))
    known = [Address(each.name, each.role, each.url) for each in file.instances if each.url is not None]
    launcher = RayLauncher(launched, file.ray, known) if file.launcher == "ray" else ProcessLauncher(launched, known)
    return engine, launcher, keys


def _environments(instance: InstanceEntry) -> tuple[dict[str, str], ...]:
    """Variables of each process of an instance: the devices that it sees, and the secret of several."""
    each, devices = len(instance.devices) // instance.processes, list(map(str, instance.devices))
    common = {} if instance.processes == 1 else {"LONGCTX_GROUP_SECRET": secrets.token_urlsafe(32)}
    parts = [devices[i * each : (i + 1) * each] for i in range(instance.processes)]
    return tuple(common | ({"CUDA_VISIBLE_DEVICES": ",".join(part)} if part else {}) for part in parts)


def _server_maker(
    options: argparse.Namespace,
    file: ClusterFile,
    engine: argparse.Namespace,
    settings: ServerSettings,
    template: ChatTemplate | None,
    keys: InstanceKeys,
    tls: Tls | None,
) -> Callable[[list[Address]], RouterServer]:
    """Makes the router of some instances; ValueError: model or tokenizer can't be read."""
    place = resolve_model(engine.model, options.quiet)
    tokenizer, (model, _) = load_tokenizer(place), read_model(place, engine.dtype)
    router = RouterSettings(
        instance_key=keys.shared,
        instance_keys=keys.own,
        joiners=keys.joiners,
        secret=pages_secret(engine),
        peers=tuple(options.kv_peer),
        bandwidth=file.bandwidth,
        latency=file.latency,
        look_seconds=file.report_seconds,
        max_waiting=options.max_waiting,
        max_logprob_bytes=options.max_logprob_bytes,
        metrics_prefix=options.metrics_prefix,
        tls=tls,
    )
    config = serve_config(engine)
    config = dataclasses.replace(config, slo=config.slo.per_token(parallel_plan(engine).stage))  # as instances have it
    first = model.config, tokenizer, config, model_names(engine), file.conductor
    return lambda members: RouterServer(*first, members, settings, router, template)


def _move(server: RouterServer, address: Address) -> None:
    """An instance listens elsewhere now; in the event loop."""
    known = server.instances.by_name.get(address.name)
    if known is not None:
        server.instances.drop(known)
    server.instances.add(address.url, address.name, address.role)


def _watch(
    server: RouterServer,
    http: HttpServer,
    launcher: _Launcher,
    count: int,
    ended: threading.Event,
    console: Console,
    url: str,
) -> None:
    """Say who is there and when all are; end all if one can never be."""
    told: set[str] = set()
    while not ended.wait(_LOOK):
        if launcher.problem is not None and http.started:
            report_error(launcher.problem, FAILED)
            http.loop.call_soon_threadsafe(http.begin_shutdown)
            return
        for each in server.instances.members:
            if each.name not in told:
                told.add(each.name)
                of = f": {len(told)} of {count}" if len(told) <= count else ""  # others may join
                console.note(f"open     {each.name} ({each.role}){of}")
                if len(told) == count:
                    console.note(f"ready    {server.model_name} at {url}")


def engine_arguments(place: str, flags: Mapping[str, Any]) -> list[str]:
    """Flags of engines, by their names, as arguments. ValueError: one is none, or is set by who starts instances."""
    for name in flags:
        if name.replace("-", "_") in _OURS:
            raise ValueError(f"{place}{name} is set by who starts the instances")
    return flag_arguments(place, command_parser("serve"), flags)


def instance_arguments(arguments: Sequence[str], files: Secrets, names: Sequence[str]) -> list[str]:
    """Arguments of `longctx serve` that are the same for all instances, wherever they run."""
    return [
        *arguments,
        *("--quiet", "--end-with-stdin", "--role=both", "--ignore-deadlines", f"--kv-secret-file={files.pages}"),
        f"--api-key-file={files.user}",
        *(f"--served-model-name={name}" for name in names),
    ]


def instance_command(arguments: Sequence[str], own: Sequence[str]) -> MakeCommand:
    """The command of an instance."""

    def make(host: str, port: int, hosts: Sequence[str]) -> list[str]:
        here = [f"--host={host}", f"--port={port}"]
        endpoint = f"tcp://{host_port(host, 0)[:-1]}*"
        here += [f"--kv-events={endpoint}", f"--kv-events-replay={endpoint}"]
        if host != _LOOPBACK:
            here += [f"--kv-host={host}", *(f"--kv-peer={each}" for each in hosts if each != host)]
        return [sys.executable, "-m", "longctx", "serve", *arguments, *own, *here]

    return make
