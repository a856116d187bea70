"""Flags of `longctx serve`, all of which may stand in the file of `--config` too."""

import argparse
from pathlib import Path
from typing import Any

from longctx.cli.arguments.cluster import add_cluster_arguments
from longctx.cli.arguments.engine import (
    add_compile_arguments,
    add_engine_arguments,
    add_model_arguments,
    add_plan_arguments,
    add_scheduling_arguments,
    flag,
)
from longctx.cli.arguments.kv_cache import add_tier_arguments
from longctx.cli.arguments.observe import add_observer_arguments
from longctx.cli.arguments.processes import add_process_arguments
from longctx.cli.arguments.transfer import add_transfer_arguments

SUMMARY = "Serve a model over HTTP, as OpenAI's API; with --cluster many engines behind one address."

# Defaults of `ServerSettings` and `AdmissionLimits`, written again because importing these takes long (a test compares
# them): the name, the type, the default, and what it is.
SETTINGS: list[tuple[str, type, Any, str]] = [
    ("default_max_tokens", int, 4096, "tokens of a chat's answer whose request says nothing"),
    ("max_prompts", int, 1024, "prompts of one request, at most"),
    ("max_priority", int, 0, "the highest priority that requests may ask for; higher is more urgent"),
    ("min_tpot", float, None, "the least TPOT target that requests may ask for, seconds; default: --tpot"),
    ("max_body_bytes", int, 64 * 2**20, "bytes of a request's body"),
    ("max_header_bytes", int, 32 * 2**10, "bytes of a request's headers"),
    ("header_timeout", float, 30.0, "seconds until a request's headers must be there"),
    ("body_timeout", float, 60.0, "seconds until a request's body must be there"),
    ("stream_buffer", int, 1024, "steps' tokens that wait for a slow reader, whose request is cancelled after it"),
    ("slow_reader_timeout", float, 30.0, "seconds until a connection is closed whose client takes nothing"),
    ("ping_interval", float, 15.0, "seconds between comments in a stream that has nothing to say"),
    ("shutdown_timeout", float, 60.0, "seconds for which requests may go on after SIGTERM"),
    ("stall_timeout", float, 300.0, "seconds of one step after which /health fails"),
    ("prepare_processes", int, 1, "processes that tokenise long prompts"),
    ("cache_tokens", int, None, "of the documents of one tenant's /v1/caches; default: as many as can be pinned"),
    ("max_cache_ttl", float, 86_400.0, "seconds for which one of /v1/caches is kept, at most"),
]
_METAVARS: dict[type, str] = {int: "N", float: "X", str: "NAME"}
LIMITS: list[tuple[str, type, Any, str]] = [
    ("max_waiting", int, 1024, "requests that may wait; others get 429"),
    ("max_waiting_tokens", int, None, "tokens of their prompts; default: any number"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML: flags by their names; the command line wins")
    add_model_arguments(parser)
    parser.add_argument(
        "--served-model-name", action="append", default=[], metavar="NAME", help="of the model; may be repeated"
    )
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="jinja2; default: the tokenizer's own")
    parser.add_argument("--max-length", type=int, metavar="N", help="tokens of the longest request, answer included")
    parser.add_argument("--max-logprobs", type=int, default=20, metavar="N", help="of a token, at most; default: 20")
    add_compile_arguments(parser)
    _add_server_arguments(parser)
    _add_access_arguments(parser)
    _add_record_arguments(parser)
    add_observer_arguments(parser)
    add_engine_arguments(parser)
    add_tier_arguments(parser)
    add_transfer_arguments(parser)
    add_cluster_arguments(parser)
    add_plan_arguments(parser)
    add_process_arguments(parser)
    add_scheduling_arguments(parser)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", metavar="HOST", help="default: 127.0.0.1, this host alone")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000; 0: any")
    for name, kind, default, about in (*LIMITS, *SETTINGS):
        shown = "" if default is None else f"; default: {default}"
        server.add_argument(flag(name), type=kind, default=default, metavar=_METAVARS[kind], help=about + shown)
    server.add_argument(
        "--ignore-deadlines", action="store_true", help="admit requests whose TTFT target can't be kept, too"
    )
    server.add_argument("--profile-dir", type=Path, metavar="DIR", help="where /start_profile writes traces")


def _add_access_arguments(parser: argparse.ArgumentParser) -> None:
    access = parser.add_argument_group("access", "a key is KEY or 'NAME KEY'; the name is the tenant's")
    for who, about in (("api", "that clients need"), ("admin", "that loads, aborts and profiles need")):
        access.add_argument(
            f"--{who}-key", action="append", default=[], metavar="KEY", help=f"a key {about}; may be repeated"
        )
        access.add_argument(f"--{who}-key-file", type=Path, metavar="FILE", help="the same, a key in each line")
    access.add_argument(
        "--tenant-weight",
        action="append",
        default=[],
        metavar="NAME=X",
        help="what a key's requests get while others wait too, relative to 1; may be repeated",
    )
    access.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="by which clients reach the server; default: this host's alone, if it listens there and needs no key",
    )
    access.add_argument(
        "--allow-origin", action="append", default=[], metavar="URL", help="of web pages that may use the server"
    )


def _add_record_arguments(parser: argparse.ArgumentParser) -> None:
    record = parser.add_argument_group("recording, for `longctx replay`")
    record.add_argument("--record", type=Path, metavar="DIR", help="write all that decisions follow from, prompts too")
    record.add_argument("--record-private", action="store_true", help="leave prompts and answers out")
    record.add_argument(
        "--record-bytes",
        type=int,
        default=2**30,
        metavar="N",
        help="of a run, whose oldest files go then; default: 2^30",
    )
