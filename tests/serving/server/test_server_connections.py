"""Bounds on connections, and what they leave to others: a probe is answered, however many there are."""

import contextlib
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served, fake_engine, served

from longctx.serving.server.connections import Connections, most_connections, raise_descriptor_limit
from longctx.serving.server.settings import ServerSettings

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def few() -> Iterator[Served]:
    settings = ServerSettings(prepare_processes=0, max_connections=8, max_connections_by_address=4)
    with served(fake_engine(), settings) as running:
        yield running


def connect(running: Served, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), 10, (source, 0))


def ask(connection: socket.socket, request: bytes = HEALTH) -> bytes:
    connection.sendall(request)
    return connection.recv(65536)


def stream(running: Served, source: str) -> socket.socket:
    """A connection whose request lasts."""
    body = b'{"prompt": "ABCD", "max_tokens": 200, "ignore_eos": true, "stream": true}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = connect(running, source)
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    return connection


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_those_that_were_idle_longest_make_room(few: Served) -> None:
    with contextlib.ExitStack() as stack:
        old = [stack.enter_context(connect(few, f"127.0.0.{i // 4 + 2}")) for i in range(8)]
        assert b"200 OK" in ask(old[0])  # then it is idle again, and not the oldest any more
        new = [stack.enter_context(connect(few, "127.0.0.9")) for _ in range(3)]
        assert all(b"200 OK" in ask(each, MODELS) for each in new)
        few.wait_until("three are closed", lambda: len(few.http.connections) == 8)
        assert [is_closed(each) for each in old] == [False, True, True, True, False, False, False, False]


def test_one_address_crowds_out_itself_alone(few: Served) -> None:
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(connect(few, "127.0.0.2"))
        many = [stack.enter_context(connect(few)) for _ in range(20)]
        few.wait_until("four are left", lambda: len(few.http.connections) == 5)
        assert [is_closed(each) for each in many] == [True] * 16 + [False] * 4
        assert b"200 OK" in ask(other, MODELS)


def test_where_none_is_idle_probes_alone_are_answered(few: Served) -> None:
    few.executor.pause = 0.02
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(stream(few, "127.0.0.2"))
        crowded = stack.enter_context(connect(few, "127.0.0.2"))
        assert b"200 OK" in ask(crowded)
        assert b"429 Too Many Requests" in ask(crowded, MODELS)
        for _ in range(4):
            stack.enter_context(stream(few, "127.0.0.3"))
        full = [stack.enter_context(connect(few, "127.0.0.4")) for _ in range(30)]
        assert b"200 OK" in ask(full[-16])  # the sixteenth of the newest
        refused = ask(full[-1], MODELS)
        assert b"503 Service Unavailable" in refused
        assert b"x-llm-d-request-dropped-reason: connections" in refused
        assert b"connection: close" in refused
        assert all(is_closed(each) for each in full[:-16])
    few.executor.pause = 0.0
    few.wait_until("all are closed", lambda: not len(few.http.connections))
    with connect(few, "127.0.0.4") as connection:
        assert b"200 OK" in ask(connection, MODELS)
    assert few.server.metrics.refusals["connections"] == 2


def test_a_network_of_ipv6_counts_as_one_address() -> None:
    connections = Connections(10, 1)
    first, same, mapped, another = (
        connections.admit(host) for host in ("2001:db8::1", "2001:db8::2%eth0", "::ffff:192.0.2.7", "2001:db8:0:1::1")
    )
    assert first.address == same.address == "2001:db8::/64"
    assert mapped.address == "192.0.2.7"
    assert len(connections) == 3
    for each in (first, same, same, mapped, another):
        connections.remove(each)
        connections.end(each)
    assert len(connections) == 0
    assert not connections.close_idle()


def test_idle_connections_time_out() -> None:
    with served(fake_engine(), ServerSettings(prepare_processes=0, header_timeout=0.3)) as running:
        start = time.monotonic()
        with connect(running) as connection:
            assert connection.recv(1) == b""
        assert time.monotonic() - start >= 0.2
        running.wait_until("it is forgotten", lambda: not len(running.http.connections))


PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:])))
from served import fake_engine, served
from longctx.serving.server.connections import raise_descriptor_limit
from longctx.serving.server.settings import ServerSettings
raise_descriptor_limit()
with served(fake_engine(), ServerSettings(prepare_processes=0)) as running:
    print(running.port, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(("soft", "hard", "idle", "kept"), [(200, 200, 400, False), (1024, 8192, 1500, True)])
def test_probes_are_answered_beside_idle_connections_whatever_the_limit_of_descriptors(
    soft: int, hard: int, idle: int, kept: bool
) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= hard, "the test itself needs them"
    environment = {"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, str(soft), str(hard)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process,
        contextlib.ExitStack() as stack,
    ):
        assert process.stdout is not None
        address = "127.0.0.1", int(process.stdout.readline())
        connections = [stack.enter_context(socket.create_connection(address, 10)) for _ in range(idle)]
        for _ in range(20):
            with socket.create_connection(address, 10) as probe:
                assert b"200 OK" in ask(probe)
        assert is_closed(connections[0]) != kept
        files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        assert files > idle if kept else files < 0.9 * soft
        process.communicate(b"")


def test_the_limit_of_descriptors_is_raised_and_half_of_it_is_kept() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert most_connections(10_000) < 256
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert most_connections(50) == 50
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
