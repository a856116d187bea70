"""`longctx serve`: serve a model over HTTP."""

import argparse
import contextlib
import dataclasses
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import NamedTuple

import jax

from longctx import extras
from longctx.cli.conversation import NO_TEMPLATE
from longctx.cli.engine import EngineLoader, check_memory, describe_kernels, initialize_processes, show_compiling
from longctx.cli.flags import naming, read, refuse
from longctx.cli.serve_settings import (
    chat_template,
    check_join_flags,
    check_transfer_flags,
    joining,
    keep_objects,
    make_messenger,
    make_transfers,
    model_names,
    observer_settings,
    serve_config,
    server_settings,
    server_url,
    tls_of,
    watch_keys,
)
from longctx.cli.terminal import FAILED, Console, interrupts
from longctx.cluster.launcher.supervised import end_with_parent
from longctx.models import load_tokenizer
from longctx.models.chat_template import ChatTemplate, has_template
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig
from longctx.serving.config import AdmissionLimits
from longctx.serving.distributed import ProcessGroup
from longctx.serving.engine.memory import page_bytes
from longctx.serving.recording.recorder import Recorder, open_recorder
from longctx.serving.server.settings import SAME_SIGNAL, ObserverSettings, ServerSettings
from longctx.serving.server.tls import Tls

_log = logging.getLogger(__name__)
_log.setLevel(logging.INFO)  # its one line says which kernels serve

_CPU_CACHE = 2**30  # bytes of pages by default where they are the host's own memory, if a request needs no more
_FOLLOWING = 10.0  # seconds for which a follower waits for the first process longer than that takes to shut down


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    if options.end_with_stdin:
        end_with_parent()
    extras.check("serve", "longctx serve")
    from longctx.serving.server.connections import raise_descriptor_limit
    from longctx.serving.server.http_server import bind

    raise_descriptor_limit()
    if options.cluster is not None:
        from longctx.cli.serve_cluster import serve_cluster

        return serve_cluster(options)
    refuse(options, ("launcher", "instance_key_file"), "needs --cluster")
    if options.otlp is not None:
        extras.check("otlp", "--otlp")
    check_join_flags(options)
    check_transfer_flags(options)
    settings = _Settings(
        serve_config(options),
        server_settings(options),
        read(AdmissionLimits, options),
        observer_settings(options),
        chat_template(options),
    )
    names = {key.tenant for key in settings.server.api_keys}
    for name in settings.config.tenant_weights:
        if name not in names:
            raise ValueError(f"--tenant-weight is of {name!r}, and no --api-key has that name")
    with initialize_processes(options) as group, contextlib.ExitStack() as stack:
        listener = tls = None
        if group.is_first:  # before anything that takes long
            tls = tls_of(options)
            listener = stack.enter_context(bind(options.host, options.port))
        return _serve(options, settings, group, listener, tls)


class _Settings(NamedTuple):
    config: EngineConfig
    server: ServerSettings
    limits: AdmissionLimits
    observers: ObserverSettings
    template: ChatTemplate | None


def _serve(
    options: argparse.Namespace,
    settings: _Settings,
    group: ProcessGroup,
    listener: socket.socket | None,
    tls: Tls | None,
) -> int:
    from longctx.serving.server import logs
    from longctx.serving.server.http_server import HttpServer
    from longctx.serving.server.server import Server

    names = model_names(options)
    loader = EngineLoader(options, group)
    console, config = loader.console, _with_pages(loader, settings.config)
    recorder = None if listener is None else _recorder(options)
    tokenizer = load_tokenizer(loader.path)
    engine = loader.load(config, tokenizer=tokenizer, recorder=recorder)
    if listener is None:
        return _follow(engine, options, settings.server.shutdown_timeout)
    url = server_url(listener, tls)
    if settings.template is None and not has_template(tokenizer):
        console.note(NO_TEMPLATE)

    def warm_up(engine: Engine) -> None:
        _log.info(describe_kernels(loader.model, config, loader.dtype))
        show_compiling(engine.warm_up, console, engine)
        keep_objects()
        pages, size = engine.num_pages * engine.plan.context, config.page_size
        console.note(f"KV cache {pages * size:,} tokens: {pages:,} pages of {size}")
        console.note(f"ready    {names[0]} at {url}")

    transfers = None if options.role is None else functools.partial(make_transfers, options, tls)
    server = Server(
        engine, names, settings.server, settings.limits, settings.template, warm_up, settings.observers, transfers
    )
    watch_keys(server.keys, options)
    http, page_hash = HttpServer(server, tls=tls), engine.core.page_hash
    interrupts.leave_to_python()
    with (
        recorder or contextlib.nullcontext(),
        logs.shown("longctx.access", settings.observers.log_format, is_quiet=options.quiet),
        joining(options, url, lambda: server.is_open, page_hash, tls),
    ):
        http.run([listener])
    if not server.warmed.done():  # it compiles in a thread that nothing else can end
        sys.stderr.flush()
        os._exit(0)
    return FAILED if server.has_failed else 0


def _recorder(options: argparse.Namespace) -> Recorder | None:
    if options.record is None:
        refuse(options, ("record_key_file",), "needs --record")
        return None
    with naming({"max_bytes": "--record-bytes", "key_file": "--record-key-file"}):
        return open_recorder(options.record, options.record_bytes, options.record_key_file)


def _follow(engine: Engine, options: argparse.Namespace, shutdown_timeout: float) -> int:
    """Follow the first process until it ends. A signal to all processes at once comes to this one, too."""
    signalled: float | None = None

    def end_later(number: int, frame: FrameType | None) -> None:
        nonlocal signalled
        now = time.monotonic()
        if signalled is not None:
            if now - signalled > SAME_SIGNAL:
                os._exit(128 + number)
            return
        signalled = now
        timer = threading.Timer(shutdown_timeout + _FOLLOWING, os._exit, (FAILED,))
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_later)
    messenger = None if options.role is None else make_messenger(options, engine)
    keep_objects()
    engine.follow(messenger)
    if messenger is not None:
        messenger.close()
    return 0


def _with_pages(loader: EngineLoader, config: EngineConfig) -> EngineConfig:
    """Check the memory of an engine, and set its pages where that is the host's: as many as fit into a small part.

    Pages of accelerators stay None: as many as fit beside the programs of the engine, which finds them.
    """
    model, plan = loader.model, loader.plan
    mesh = loader.mesh or make_mesh()  # first, as it divides a CPU into devices
    if config.num_pages is None and jax.default_backend() == "cpu":
        page = sum(page_bytes(model, config, mesh, loader.dtype))
        longest = -(-config.longest_sequence(model.config.max_positions) // (config.page_size * plan.context))
        fit = check_memory(Console(True), model, config, plan, loader.mesh, loader.dtype)
        config = dataclasses.replace(config, num_pages=min(fit, max(longest, _CPU_CACHE // page)))
    loader.check_memory(config)
    return config
