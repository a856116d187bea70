"""ZeroMQ sockets that encrypt all they send, and to which only processes with the same key can connect.

A key is one CURVE key pair (Curve25519): who knows its secret half also knows its public half, which never travels in
the clear. A client can't begin a handshake without the server's public key, and the server admits only clients with
that same key.

Source: CurveZMQ (rfc.zeromq.org/spec/26) and ZAP (rfc.zeromq.org/spec/27).
"""

import hashlib
import logging
import socket
import time
from typing import Literal, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

_LEAST_CHARACTERS = 32  # of a secret
_KEEPALIVE = 5  # seconds between two probes of a connection that TCP watches
_PROBES = 3
Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


class Address(NamedTuple):
    """An IP address and a port."""

    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def resolve(coordinator: str) -> Address:
    """Resolve `host:port`; of several addresses, the same in all processes if their systems list them alike.

    Other machines can't reach a loopback address, and IPv6 is not set up everywhere, so these come last.
    """
    host, _, port = coordinator.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    ips = [str(each[4][0]) for each in found]
    return Address(min(ips, key=lambda ip: (ip == "::1" or ip.startswith("127."), ":" in ip)), int(port))


class Key(NamedTuple):
    """A CURVE key pair, as text (Z85) in bytes."""

    public: bytes
    secret: bytes


def make_key() -> Key:
    """Make a new random key."""
    return Key(*zmq.curve_keypair())


def read_key(text: str) -> Key:
    """The key with this secret half."""
    try:
        secret = text.encode("ascii")
        return Key(zmq.curve_public(secret), secret)
    except (UnicodeError, zmq.ZMQError, ValueError):
        raise ValueError("not a CURVE key") from None


def derive_key(secret: str, purpose: bytes = b"longctx group") -> Key:
    """Derive the key that all have who know a secret.

    `purpose`, of up to 16 bytes, keeps apart what is used for different things but has the same secret.
    """
    data = secret.encode("utf-8", "surrogatepass")
    half = z85.encode(hashlib.blake2b(data, digest_size=32, person=purpose).digest())
    return Key(zmq.curve_public(half), half)


def pages_key(secret: str | None, use: Literal["transfer", "events"]) -> Key | None:
    """Derive a key from the secret that all instances share; None: there is none, and nothing is encrypted.

    Raises:
      TypeError, ValueError: it is no text, or one that could be guessed.
    """
    if secret is None:
        return None
    if not isinstance(secret, str):
        raise TypeError(f"secret must be text, got {type(secret).__name__}")
    if len(secret.strip()) < _LEAST_CHARACTERS:
        raise ValueError(
            f"secret must have at least {_LEAST_CHARACTERS} characters, got {len(secret.strip())}: make one with "
            "`longctx group-secret > FILE`"
        )
    return derive_key(secret.strip(), f"longctx {use}".encode())


class Network:
    """Sockets of one process.

    Args:
      ip: process 0's sockets are bound to this address only, and the others' connect it.
      failure_timeout: seconds; connections break within 0.7 of it when the other end is gone without a word. None:
        TCP watches connections, and sockets may have limits (ZeroMQ's high water marks).
    """

    def __init__(self, ip: str, failure_timeout: float | None) -> None:
        self.ip, self.failure_timeout = ip, failure_timeout
        self.context: Context = zmq.Context()
        self.context.setsockopt(zmq.IPV6, int(":" in ip))
        self._authenticator: ThreadAuthenticator | None = None
        self._admitted: set[bytes] = set()
        self._sockets: list[Socket] = []  # the context itself would forget them

    def serve(self, kind: int, key: Key | None) -> Socket:
        """Make a socket to which holders of a key may connect; None: any process, and nothing is encrypted."""
        if key is None:
            return self._socket(kind)
        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(self.context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(credentials_provider=self)
        self._admitted.add(key.public)
        made = self._socket(kind)
        made.setsockopt(zmq.CURVE_SERVER, 1)
        made.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        return made

    def callback(self, domain: str, public: bytes) -> bool:
        """Whether the authenticator admits a client with this public key."""
        return public in self._admitted

    def connect(self, kind: int, key: Key | None) -> Socket:
        """Make a socket that may connect to those of a server with the same key, or with none."""
        made = self._socket(kind)
        if key is None:
            return made
        made.setsockopt(zmq.CURVE_SERVERKEY, key.public)
        made.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
        made.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        return made

    def bind(self, bound: Socket, ports: tuple[int, int]) -> int:
        """Bind a socket to a free port of an inclusive range, and return it."""
        try:
            host = str(Address(self.ip, 0)).rpartition(":")[0]
            return bound.bind_to_random_port(f"tcp://{host}", ports[0], ports[1] + 1, max_tries=200)
        except zmq.ZMQBindError:
            raise ValueError(f"ports must have a free one from {ports[0]} to {ports[1]} on process 0's host") from None

    def drop(self, socket: Socket, linger: int = 0) -> None:
        """Close one socket; what it has not sent yet may leave for `linger` milliseconds."""
        self._sockets.remove(socket)
        socket.disable_monitor()
        socket.close(linger=linger)

    def close(self) -> None:
        """Close all sockets, after at most a second in which what was sent may leave."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self.context.destroy(linger=1000)

    def _socket(self, kind: int) -> Socket:
        made = self.context.socket(kind)
        self._sockets.append(made)
        if self.failure_timeout is None:
            made.setsockopt(zmq.TCP_KEEPALIVE, 1)
            made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE)
            made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE)
            made.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)
            made.setsockopt(zmq.TCP_MAXRT, 1000 * _KEEPALIVE * (1 + _PROBES))
            return made
        # Without limits: if a connection breaks whose messages ZeroMQ holds back at a limit, its next heartbeat aborts.
        made.setsockopt(zmq.SNDHWM, 0)
        made.setsockopt(zmq.RCVHWM, 0)
        made.setsockopt(zmq.LINGER, 1000)
        # Heartbeats leave in C++ threads, which neither a compilation nor Python's lock delays.
        made.setsockopt(zmq.HEARTBEAT_IVL, int(200 * self.failure_timeout))
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(500 * self.failure_timeout))
        return made


_LOG = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 1.0


class RejectedConnections:
    """Count of connections and messages that were dropped, and a log of them with at most one line a second."""

    def __init__(self, name: str) -> None:
        self._name, self.count, self._logged = name, 0, 0
        self._next_line = 0.0
        self._note = ""
        self._monitors: dict[Socket, int] = {}  # connections of each whose handshake is not complete

    def monitor(self, socket: Socket) -> None:
        """Count connections to a socket that close before their handshake is complete."""
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitors[socket.get_monitor_socket(events)] = 0

    def add(self, note: str = "") -> None:
        """Count one more; `note` says something about it in the next line of the log."""
        self.count += 1
        if note:
            self._note = f"; {note}"

    def update(self) -> None:
        """Count what the monitors have seen, and log it."""
        self.count += sum(map(self._read, self._monitors))
        if self.count == self._logged or time.monotonic() < self._next_line:
            return
        new, self._logged = self.count - self._logged, self.count
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
        _LOG.warning(
            "longctx: %s dropped %d connections or messages of strangers, %d so far%s",
            self._name,
            new,
            self.count,
            self._note,
        )
        self._note = ""

    def _read(self, monitor: Socket) -> int:
        """Count rejected connections since the last call."""
        found = 0
        while monitor.poll(0):
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_ACCEPTED:
                self._monitors[monitor] += 1
            elif self._monitors[monitor] > 0:  # otherwise a member of the group closed its connection
                self._monitors[monitor] -= 1
                found += event == zmq.EVENT_DISCONNECTED
        return found
