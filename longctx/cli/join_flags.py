"""What `longctx serve` makes of the flags of a server that becomes an instance of a cluster."""

import argparse
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from longctx.cli.files import read_text
from longctx.cli.naming import naming_flags

_FLAGS = {"join_url": "--join-url", "join": "--join"}


def check_join_flags(options: argparse.Namespace) -> None:
    """ValueError that names the flag, if the server can't join as the flags say; before anything is loaded."""
    if not options.join:
        for name in ("join_key_file", "join_name", "join_role", "join_url"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --join")
        return
    from longctx.cluster.join import check_join_url, router_url

    if options.role is None:
        raise ValueError("--join needs --role: requests move between the instances of a cluster")
    if options.join_role not in (None, options.role) and options.role != "both":
        raise ValueError(f"--join-role {options.join_role} contradicts --role {options.role}")
    with naming_flags(_FLAGS):
        for each in options.join:
            router_url(each)
        if options.join_url is not None:
            check_join_url(options.join_url)
    if options.join_url is None and options.host in ("0.0.0.0", "::"):
        raise ValueError(f"--join with --host {options.host} needs --join-url: where the router reaches this server")
    _key(options)


def joining(options: argparse.Namespace, address: str, is_open: Callable[[], bool]) -> AbstractContextManager[object]:
    """What registers the server with routers, while it is entered.

    Args:
      address: where the server listens.
      is_open: whether it takes requests now.
    """
    if not options.join:
        return contextlib.nullcontext()
    from longctx.cluster.join import Joining

    url = options.join_url or f"http://{address}"
    role = options.join_role or options.role
    return Joining(options.join, url, role, is_open, _key(options), options.join_name)


def _key(options: argparse.Namespace) -> str | None:
    if options.join_key_file is None:
        return None
    return read_text("--join-key-file", options.join_key_file).strip()
