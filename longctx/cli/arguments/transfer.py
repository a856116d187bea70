"""Flags of prefill and decode apart, and of requests that move between servers."""

import argparse
from pathlib import Path

ROLES = ("prefill", "decode", "both")
MESSENGERS = ("zmq", "mooncake-tcp", "mooncake-rdma")
"""Those of `EngineTransfers`, written again because importing it takes long (a test compares them)."""


def add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    transfer = parser.add_argument_group(
        "prefill and decode apart", "needs --kv-secret-file, the same for all (docs/kv_transfer.md)"
    )
    transfer.add_argument(
        "--role", choices=ROLES, help="let requests move between this server and others; default: they stay"
    )
    transfer.add_argument(
        "--kv-host", default="127.0.0.1", metavar="IP", help="where others fetch pages; default: 127.0.0.1"
    )
    transfer.add_argument("--kv-port", type=int, default=0, metavar="N", help="default: 0, any")
    transfer.add_argument("--kv-advertise", metavar="HOST", help="by which others reach it; default: --kv-host")
    transfer.add_argument(
        "--kv-peer",
        action="append",
        default=[],
        metavar="HOST[:PORT]",
        help="whose pages are fetched when a request says so, besides this host's own; or a network, such as "
        "10.0.0.0/8; may be repeated",
    )
    transfer.add_argument(
        "--kv-plain", action="store_true", help="do not encrypt pages: for a network where nobody listens, and faster"
    )
    transfer.add_argument(
        "--kv-messenger", choices=MESSENGERS, default="zmq", help="what carries the pages; default: zmq"
    )
    transfer.add_argument(
        "--prefill-from",
        action="append",
        default=[],
        metavar="URL",
        help="a server that reads long prompts for this one; may be repeated",
    )
    transfer.add_argument(
        "--prefill-key-file", type=Path, metavar="FILE", help="the key that these take for /server_info and /load"
    )
    transfer.add_argument(
        "--prefill-inline",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a prompt, not cached, up to which this server reads it itself; default: 512",
    )
