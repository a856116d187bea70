"""Flags of many engines behind one address."""

import argparse
from pathlib import Path

ROLES = ("prefill", "decode", "both")
LAUNCHERS = ("processes", "ray", "static")
"""Those of `longctx.cluster`, written again because importing it takes long (a test compares them)."""


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    cluster = parser.add_argument_group("many engines behind one address", "see docs/cluster.md")
    cluster.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="TOML of a cluster: serve its instances; flags of engines stand in there",
    )
    cluster.add_argument("--launcher", choices=LAUNCHERS, help="who starts them; default: as the file says")
    cluster.add_argument(
        "--instance-key-file",
        type=Path,
        metavar="FILE",
        help="an administrator's key of instances that run already",
    )
    cluster.add_argument(
        "--join",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a cluster's router, whose instance this server becomes; may be repeated",
    )
    cluster.add_argument("--join-key-file", type=Path, metavar="FILE", help="an administrator's key of that router")
    cluster.add_argument(
        "--join-role", choices=ROLES, help="what this instance does there first, with --role both; default: --role"
    )
    cluster.add_argument("--join-name", metavar="NAME", help="of this instance there; default: host and port")
    cluster.add_argument(
        "--join-url", metavar="URL", help="by which the router reaches this server; default: its --host and port"
    )
