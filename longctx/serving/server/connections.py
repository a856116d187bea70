"""Connections of a server's clients: how many there may be in all and by address, and which make room for others."""

import contextlib
import ipaddress
import logging
import os
import resource
import time
from collections import Counter
from collections.abc import Callable

from longctx.serving.server.errors import DROPPED, ApiError

logger = logging.getLogger(__name__)

_SPARE = 16  # connections beyond the bounds, for probes: only whether the server lives is answered there
_MOST_DESCRIPTORS = 2**20  # where the hard limit is infinite
_RETRY = 1.0  # seconds after which a refused client may come again
_TELL = 60.0  # seconds between two lines of the log


class Connection:
    """A client's connection, from its acceptance until it is closed.

    Attributes:
      refusal: answer to everything but whether the server lives; None: requests are answered.
      close: closes it at once. The owner sets it.
    """

    __slots__ = ("address", "close", "refusal")

    def __init__(self, address: str, refusal: ApiError | None) -> None:
        self.address, self.refusal = address, refusal
        self.close: Callable[[], object] = lambda: None


class Connections:
    """Bounds on the open connections of a server, in all and of one address.

    At a bound, the connection that has been idle longest makes room for the next one. Where none is idle, the next one
    is one of a few spare connections, which get answers to probes alone: so a probe finds the server alive.

    A connection is idle from its acceptance until the headers of a request are there, and between two requests.

    Args:
      most: connections in all.
      most_by_address: connections of one IPv4 address, or one /64 network of IPv6.
    """

    def __init__(self, most: int, most_by_address: int) -> None:
        self.most, self.most_by_address = most, most_by_address
        self._open: set[Connection] = set()
        self._counts: Counter[str] = Counter()  # without the spare ones
        self._idle: dict[str, dict[Connection, None]] = {}  # by address, the longest idle one first
        self._idle_since: dict[Connection, None] = {}
        self._spare: dict[Connection, None] = {}
        self._told = -_TELL

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, host: str) -> Connection:
        """Return a new connection of a client, for which another one may be closed."""
        address = _network(host)
        if self._counts[address] >= self.most_by_address:
            return self._replace(address, self._idle.get(address), _crowded())
        if len(self._open) - len(self._spare) >= self.most:
            return self._replace(address, self._idle_since, _full())
        return self._add(address)

    def begin(self, connection: Connection) -> None:
        """Note that a request is being answered."""
        self._forget_idle(connection)

    def end(self, connection: Connection) -> None:
        """Note that the connection is idle again."""
        if connection in self._open and connection.refusal is None:
            self._idle.setdefault(connection.address, {})[connection] = None
            self._idle_since[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed; the second time nothing happens."""
        if connection not in self._open:
            return
        self._open.remove(connection)
        self._forget_idle(connection)
        if connection.refusal is not None:
            del self._spare[connection]
            return
        self._counts[connection.address] -= 1
        if not self._counts[connection.address]:
            del self._counts[connection.address]

    def close_idle(self) -> bool:
        """Close the connection that has been idle longest; False: none is idle."""
        return self._close_first(self._idle_since)

    def _add(self, address: str) -> Connection:
        connection = Connection(address, None)
        self._open.add(connection)
        self._counts[address] += 1
        self.end(connection)
        return connection

    def _replace(self, address: str, idle: dict[Connection, None] | None, refusal: ApiError) -> Connection:
        if time.monotonic() - self._told > _TELL:
            self._told = time.monotonic()
            logger.warning("longctx: %s, and idle connections are closed for others", refusal)
        if self._close_first(idle):
            return self._add(address)
        if len(self._spare) >= _SPARE:
            self._close_first(self._spare)
        connection = Connection(address, refusal)
        self._open.add(connection)
        self._spare[connection] = None
        return connection

    def _close_first(self, among: dict[Connection, None] | None) -> bool:
        first = next(iter(among), None) if among else None
        if first is None:
            return False
        self.remove(first)
        first.close()
        return True

    def _forget_idle(self, connection: Connection) -> None:
        self._idle_since.pop(connection, None)
        of_address = self._idle.get(connection.address)
        if of_address is not None:
            of_address.pop(connection, None)
            if not of_address:
                del self._idle[connection.address]


def most_connections(wanted: int) -> int:
    """Return how many connections there may be: `wanted`, but at most half of the descriptors that are free now.

    The other half is for files, other servers and probes.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, min(wanted, (limit - len(os.listdir("/dev/fd"))) // 2))


def raise_descriptor_limit() -> None:
    """Raise the process's limit of open descriptors as far as it may, since each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the system has a lower bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _network(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))


def _full() -> ApiError:
    headers = {"connection": "close", DROPPED: "connections"}
    message = "the server has as many connections as it may have (--max-connections)"
    return ApiError(503, message, None, "server_is_overloaded", _RETRY, headers)


def _crowded() -> ApiError:
    headers = {"connection": "close", DROPPED: "connections"}
    message = "this address has as many connections as it may have (--max-connections-by-address)"
    return ApiError(429, message, None, "slow_down", _RETRY, headers)
