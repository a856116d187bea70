"""`longctx serve --cluster FILE`: many engines behind one address."""

import argparse
import contextlib
import dataclasses
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from longctx.cli import command_flags, command_parser
from longctx.cli.config_file import flag_arguments
from longctx.cli.files import read_text
from longctx.cli.flags import prefixing, read
from longctx.cli.serve_settings import (
    chat_template,
    check_transfer_flags,
    model_names,
    serve_config,
    server_settings,
)
from longctx.cli.settings import parallel_plan
from longctx.cli.terminal import FAILED, Console, interrupts, report_error
from longctx.cluster.config import ClusterFile, InstanceEntry, read_cluster
from longctx.cluster.launcher.launcher import Address, Launched, MakeCommand, ProcessLauncher
from longctx.cluster.launcher.ray_launcher import RayLauncher
from longctx.cluster.router.routes import make_router_app
from longctx.cluster.router.server import ClusterBackend, RouterServer, RouterSettings
from longctx.cluster.server_url import host_port
from longctx.models import load_tokenizer, resolve_model
from longctx.models.chat_template import ChatTemplate
from longctx.models.checkpoint import read_model
from longctx.serving.kv_cache.secret import make_secret
from longctx.serving.server import logs
from longctx.serving.server.http_server import HttpServer, bind
from longctx.serving.server.settings import ObserverSettings, ServerSettings

_ROUTER = {each.name for each in dataclasses.fields(ServerSettings)}
_ROUTER -= {"cache_tokens", "max_cache_ttl", "stall_timeout"}
_ROUTER |= {"max_waiting", "host", "port", "api_key", "api_key_file", "admin_key", "admin_key_file"}
_ROUTER |= {"served_model_name", "chat_template", "metrics_prefix", "log_format", "quiet", "config"}
_ROUTER |= {"cluster", "launcher", "instance_key_file", "compile_cache", "log_prompts", "end_with_stdin"}
"""Options of the router itself; those of the other flags are of its instances."""
_OURS = {"help", "config", "quiet", "host", "port", "role", "cluster", "launcher", "instance_key_file"}
_OURS |= {"ignore_deadlines", "api_key", "api_key_file", "admin_key", "admin_key_file", "allow_host", "allow_origin"}
_OURS |= {"served_model_name", "kv_events", "kv_events_replay", "kv_events_topic", "kv_host", "kv_port", "kv_advertise"}
_OURS |= {"kv_peer", "join", "join_key_file", "join_name", "join_role", "join_url"}
_OURS |= {"tenant_weight", "coordinator", "num_processes", "process_id", "no_prefix_cache", "end_with_stdin"}
_OURS |= {"record", "record_bytes", "record_key_file"}
"""Flags of instances that the launcher sets, so that a file must not."""
_LOOPBACK = "127.0.0.1"
_Launcher = ProcessLauncher | RayLauncher
_LOOK = 0.2  # seconds between two looks at whether all instances are there


class Secrets(NamedTuple):
    """Secrets that the instances of a cluster share, in files of one folder.

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


def serve_cluster(options: argparse.Namespace) -> int:
    """Serve the instances of a cluster until a signal comes; the exit status."""
    file = read_cluster(options.cluster, options.launcher)
    settings, observers, template = server_settings(options), read(ObserverSettings, options), chat_template(options)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(options.host, options.port))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="longctx-cluster-")))
        engine, launcher, key = _prepare(options, file, folder)
        make_server = _server_maker(options, file, engine, settings, template, key)  # before anything is started
        stack.callback(launcher.close)
        try:
            addresses = launcher.start()
        except RuntimeError as error:
            return report_error(f"the instances can't be started: {error}", FAILED)
        server = make_server(addresses)
        _log_requests(observers, stack, server.cluster)
        http = HttpServer(server, app=make_router_app(server))
        launcher.moved = lambda address: http.loop.call_soon_threadsafe(_move, server, address)
        interrupts.leave_to_python()
        ended = threading.Event()
        console, url = Console(options.quiet), f"http://{host_port(*listener.getsockname()[:2])}"
        console.note(f"router   at {url}; {len(addresses)} instances by {file.launcher}")
        watch = threading.Thread(target=_watch, args=(server, http, launcher, len(addresses), ended, console, url))
        watch.start()
        stack.callback(watch.join)
        stack.callback(ended.set)
        http.run([listener])
        return FAILED if launcher.problem is not None else 0


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


def _prepare(options: argparse.Namespace, file: ClusterFile, folder: Path) -> tuple[argparse.Namespace, _Launcher, str]:
    """Return the flags of the instances, their launcher, and the key by which they are asked."""
    place = f"{options.cluster}: "
    given = {name.replace("_", "-"): value for name, value in file.engine.items()} | _given(options)
    pages = given.pop("kv-secret-file", None)
    starts = [each for each in file.instances if each.url is None]
    if pages is None and (len(starts) < len(file.instances) or not starts):
        raise ValueError(f"{place}[engine] kv_secret_file must be there: it is that of the instances that run already")
    files = Secrets.make(folder, None if pages is None else Path(pages))
    arguments = engine_arguments(f"{place}[engine] ", given)
    own = {each.name: engine_arguments(f"{place}[[instances]] {each.name}: flags.", each.flags) for each in starts}
    names = tuple(options.served_model_name)
    common = instance_arguments(arguments, files, names)
    with prefixing(f"{place}[engine] "):
        engine = command_parser("serve").parse_args(common)
        check_transfer_flags(engine)
        serve_config(engine)
    for each in starts:
        with prefixing(f"{place}[[instances]] {each.name}: "):
            parsed = command_parser("serve").parse_args([*common, *own[each.name]])
            serve_config(parsed)
            num_devices = parallel_plan(parsed).num_devices
            if num_devices % each.processes:
                message = "processes must divide the {} devices of --stage, --context and --tensor, got {}"
                raise ValueError(message.format(num_devices, each.processes))
    if options.instance_key_file is not None:
        key_text = read_text("--instance-key-file", options.instance_key_file)
        files.admin.write_text(key_text, encoding="utf-8")
    paths = tuple(map(str, files))
    launched = [
        Launched(
            each.name,
            each.role,
            instance_command(common, own[each.name]),
            paths,
            _environments(each),
        )
        for each in starts
    ]
    known = [Address(each.name, each.role, each.url) for each in file.instances if each.url is not None]
    launcher = RayLauncher(launched, file.ray, known) if file.launcher == "ray" else ProcessLauncher(launched, known)
    return engine, launcher, files.admin_key


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
    key: str,
) -> Callable[[list[Address]], RouterServer]:
    """Makes the router of some instances; ValueError: model or tokenizer can't be read."""
    place = resolve_model(engine.model, options.quiet)
    tokenizer, (model, _) = load_tokenizer(place), read_model(place, engine.dtype)
    router = RouterSettings(
        instance_key=key,
        bandwidth=file.bandwidth,
        latency=file.latency,
        look_seconds=file.report_seconds,
        max_waiting=options.max_waiting,
        metrics_prefix=options.metrics_prefix,
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
        *(f"--api-key-file={files.user}", f"--admin-key-file={files.admin}"),
        *(f"--served-model-name={name}" for name in names),
    ]


def instance_command(arguments: Sequence[str], own: Sequence[str]) -> MakeCommand:
    """The command of an instance."""

    def make(host: str, port: int, hosts: Sequence[str]) -> list[str]:
        here = [f"--host={host}", f"--port={port}"]
        events = "127.0.0.1" if host == _LOOPBACK else "*"
        here += [f"--kv-events=tcp://{events}:*", f"--kv-events-replay=tcp://{events}:*"]
        if host != _LOOPBACK:
            here += [f"--kv-host={host}", *(f"--kv-peer={each}" for each in hosts if each != host)]
        return [sys.executable, "-m", "longctx", "serve", *arguments, *own, *here]

    return make
