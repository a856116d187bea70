"""Addresses of servers as texts."""

from typing import Any
from urllib.parse import SplitResult, urlsplit


def split_server_url(url: Any) -> SplitResult | None:
    """Split `http://HOST` or `http://HOST:PORT`, https too; None: it is none of these, or has more parts."""
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            return None
    except ValueError:  # the port is none
        return None
    has_more = parts.query or parts.fragment or parts.username is not None or parts.path not in ("", "/")
    return None if has_more else parts


def check_server_url(name: str, url: Any) -> str:
    """Return the URL of a server without a slash at its end; ValueError names the argument: it is none."""
    parts = split_server_url(url)
    if parts is None:
        raise ValueError(f"{name} must be http://HOST:PORT, got {str(url)[:100]!r}")
    return parts.geturl().rstrip("/")


def host_port(host: str, port: int) -> str:
    """Format `HOST:PORT` as in URLs: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
