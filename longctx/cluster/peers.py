"""`Peers`: the hosts that an engine fetches pages from, or that a router takes instances of. Others can't be named."""

import contextlib
import ipaddress
import re
from collections.abc import Sequence

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_BRACKETS = re.compile(r"\[([^\]]+)\](?::(\d{1,5}))?")
_PLAIN = re.compile(r"([^:]+):(\d{1,5})")
_HOST = re.compile(r"[\w.:%-]{1,255}")
_NETWORK = re.compile(r"[0-9A-Fa-f:.]+/\d{1,3}")


def parse_peer(text: str) -> tuple[str, int | None]:
    """Split `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`; port None: any. ValueError: it is none."""
    found = _BRACKETS.fullmatch(text) or _PLAIN.fullmatch(text)
    host, port = (text, None) if found is None else found.groups()
    if not _HOST.fullmatch(host) or (port is not None and not 0 < int(port) < 65536):
        raise ValueError(f"peers must be HOST or HOST:PORT, got {text!r}")
    return host, None if port is None else int(port)


class Peers:
    """Hosts that may be connected to: those given, this machine's loopback, and this host itself.

    Args:
      peers: see `parse_peer`, or a network, such as `10.0.0.0/8`, for all addresses in it. A host that is given with
        ports alone is asked at these alone; the names of this machine are one host.
      own: by which others reach this host.

    Raises:
      ValueError: one of them is none.
    """

    def __init__(self, peers: Sequence[str], own: str) -> None:
        self._own = _LOOPBACK | {own}
        self._ports: dict[str, set[int | None]] = {}
        self._networks = []
        for each in filter(_NETWORK.fullmatch, peers):
            try:
                self._networks.append(ipaddress.ip_network(each))
            except ValueError as error:
                message = f"peers must be HOST, HOST:PORT or a network, got {each!r}: {error}"
                raise ValueError(message) from None
        for host, port in (parse_peer(each) for each in peers if not _NETWORK.fullmatch(each)):
            self._ports.setdefault(self._name(host), set()).add(port)
        self._ports.setdefault(self._name(own), {None})

    def admits(self, host: str, port: int | None = None) -> bool:
        """Return whether this port of a host may be connected to; without a port, whether some port of it may."""
        ports = self._ports.get(self._name(host), set())
        if not ports:
            with contextlib.suppress(ValueError):  # a name
                address = ipaddress.ip_address(host)
                return any(address in network for network in self._networks)
        return bool(ports) if port is None else port in ports or None in ports

    def _name(self, host: str) -> str:
        return "localhost" if host in self._own else host
