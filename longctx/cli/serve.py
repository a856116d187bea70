"""`longctx serve`: serve a model over HTTP."""

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from longctx import extras
from longctx.cli.engine import (
    check_memory,
    describe_kernels,
    initialize_processes,
    load_engine,
    make_parameter_mesh,
    show_compiling,
)
from longctx.cli.files import check_input
from longctx.cli.flags import flag, naming, read
from longctx.cli.serve_settings import (
    address_text,
    chat_template_text,
    check_join_flags,
    check_transfer_flags,
    check_weights,
    follower_messenger,
    joining,
    model_names,
    observer_settings,
    serve_config,
    server_settings,
    transfer_maker,
)
from longctx.cli.settings import parallel_plan
from longctx.cli.terminal import FAILED, Console, interrupts
from longctx.cluster.launcher.supervised import end_with_parent
from longctx.models import Llama, load_tokenizer, resolve_model
from longctx.models.chat_template import ChatTemplate
from longctx.models.checkpoint import read_model
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig, ParallelPlan
from longctx.serving.config import AdmissionLimits
from longctx.serving.distributed import ProcessGroup
from longctx.serving.engine.memory import page_bytes
from longctx.serving.recording.recorder import Recorder, open_recorder
from longctx.serving.server.settings import ObserverSettings, ServerSettings

_log = logging.getLogger(__name__)
_log.setLevel(logging.INFO)  # its one line says which kernels serve

_CPU_CACHE = 2**30  # bytes of pages by default where they are the host's own memory, if a request needs no more
_FOLLOWING = 10.0  # seconds for which a follower waits for the first process longer than that takes to shut down


def run(options: argparse.Namespace) -> int:
    if options.end_with_stdin:
        end_with_parent()
    extras.check("serve", "longctx serve")
    from longctx.serving.server.http_server import bind

    if options.cluster is not None:
        from longctx.cli.serve_cluster import serve_cluster

        return serve_cluster(options)
    for name in ("launcher", "instance_key_file"):
        if getattr(options, name) is not None:
            raise ValueError(f"{flag(name)} needs --cluster")
    settings, limits = server_settings(options), read(AdmissionLimits, options)
    observers = observer_settings(options)
    _check_record(options)
    check_join_flags(options)
    check_transfer_flags(options)
    config = serve_config(options)
    check_weights(settings, config)
    template = chat_template_text(options)
    if options.profile is not None:
        check_input("--profile", options.profile)
    with initialize_processes(options) as group, contextlib.ExitStack() as stack:
        listener = None
        if group.is_first:  # before anything that takes long
            listener = stack.enter_context(bind(options.host, options.port))
        return _serve(options, config, settings, limits, observers, template, group, listener)


def _serve(
    options: argparse.Namespace,
    config: EngineConfig,
    settings: ServerSettings,
    limits: AdmissionLimits,
    observers: ObserverSettings,
    template: str | None,
    group: ProcessGroup,
    listener: socket.socket | None,
) -> int:
    from longctx.serving.server.http_server import HttpServer
    from longctx.serving.server.server import Server

    console = Console(options.quiet or not group.is_first)
    names = model_names(options)
    options.model = resolve_model(options.model, options.quiet)
    tokenizer = load_tokenizer(options.model)
    model, dtype = read_model(options.model, options.dtype)
    plan = parallel_plan(options)
    mesh = make_parameter_mesh(options, plan, group, console)
    config = _with_pages(console, model, config, plan, mesh, dtype)
    recorder = None if listener is None else _recorder(options)
    more: dict[str, Any] = {"tokenizer": tokenizer, "process_group": group, "recorder": recorder}
    engine = load_engine(options, options.model, config, mesh, dtype, console, **more)
    if listener is None:
        return _follow(engine, options, settings.shutdown_timeout)

    def warm_up(engine: Engine) -> None:
        _log.info(describe_kernels(model, config, dtype))
        show_compiling(engine.warm_up, console, engine)
        console.note(f"ready    {names[0]} at http://{address_text(listener.getsockname())}")

    chat_template = None if template is None else ChatTemplate(options.chat_template, template)
    with naming(each.name for each in dataclasses.fields(ObserverSettings)):
        make_transfers = transfer_maker(options)
        server = Server(engine, names, settings, limits, chat_template, warm_up, observers, make_transfers)
    http = HttpServer(server)
    interrupts.leave_to_python()
    address = address_text(listener.getsockname())
    with recorder or contextlib.nullcontext(), joining(options, address, lambda: server.is_open):
        http.run([listener])
    if not server.warmed.done():  # it compiles in a thread that nothing else can end
        sys.stderr.flush()
        os._exit(0)
    return FAILED if server.has_failed else 0


def _check_record(options: argparse.Namespace) -> None:
    """Check beforehand that something can be recorded."""
    if options.record is None:
        return
    try:
        options.record.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.record).close()
    except OSError as error:
        raise ValueError(f"--record {options.record} can't be written to: {error.strerror}") from None


def _recorder(options: argparse.Namespace) -> Recorder | None:
    if options.record is None:
        return None
    with naming({"max_bytes": "--record-bytes"}):
        return open_recorder(options.record, options.record_bytes)


def _follow(engine: Engine, options: argparse.Namespace, shutdown_timeout: float) -> int:
    """Follow the first process until it ends. A signal to all processes at once comes to this one, too."""

    def end_later(number: int, frame: FrameType | None) -> None:
        signal.signal(number, lambda number, frame: os._exit(128 + number))
        timer = threading.Timer(shutdown_timeout + _FOLLOWING, os._exit, (FAILED,))
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_later)
    messenger = follower_messenger(options, engine)
    engine.follow(messenger)
    if messenger is not None:
        messenger.close()
    return 0


def _with_pages(
    console: Console, model: Llama, config: EngineConfig, plan: ParallelPlan, mesh: Mesh | None, dtype: np.dtype[Any]
) -> EngineConfig:
    """Check the memory of an engine, and set its pages where that is the host's: as many as fit into a small part.

    Pages of accelerators stay None: as many as fit beside the programs of the engine, which finds them.
    """
    if config.num_pages is None and jax.default_backend() == "cpu":
        page = page_bytes(model, config, mesh or make_mesh(), dtype)
        longest = -(-config.longest_sequence(model.config.max_positions) // (config.page_size * plan.context))
        fit = check_memory(Console(True), model, config, plan, mesh, dtype)
        config = dataclasses.replace(config, num_pages=min(fit, max(longest, _CPU_CACHE // page)))
    check_memory(console, model, config, plan, mesh, dtype)
    return config
