"""Hostile clients of one server, all at a time beside an honest one, who gets every answer, and the right one.

The hostile ones have addresses and keys of their own. No namespaces are needed: all of it goes over loopback.
"""

import contextlib
import gzip
import json
import re
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from host_cluster import ENGINE, Job, resident, written
from serve_process import ServeProcess

HONEST, HOSTILE, ADMIN = "key-of-the-honest-client", "key-of-a-hostile-client", "key-of-an-administrator"
NUM_CONNECTIONS = min(5_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
NUM_SLOW, NUM_TENANTS, NUM_CANCELS = 300, 500, 1_000
HEADER_TIMEOUT = 5.0
JOB = Job(1)


class Honest(threading.Thread):
    """A client that asks the same again and again, and keeps what goes wrong."""

    def __init__(self, server: ServeProcess) -> None:
        super().__init__()
        self._server, self._over = server, threading.Event()
        self.problems: list[str] = []
        self.seconds: list[float] = []

    def run(self) -> None:
        body = {"prompt": JOB.prompt, "return_token_ids": True, **JOB.sampling}
        headers = {"authorization": f"Bearer {HONEST}"}
        while not self._over.wait(0.1):
            since = time.monotonic()
            try:
                with httpx.Client(trust_env=False, timeout=30) as http:
                    answer = http.post(f"{self._server.url}/v1/completions", json=body, headers=headers)
                if answer.status_code != 200:
                    self.problems.append(f"{answer.status_code}: {answer.text[:200]}")
                elif answer.json()["choices"][0]["token_ids"] != JOB.expected:
                    self.problems.append(f"wrong tokens: {answer.text}")
            except httpx.HTTPError as error:
                self.problems.append(f"{type(error).__name__}: {error}")
            self.seconds.append(time.monotonic() - since)

    def end(self) -> None:
        self._over.set()
        self.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("hostile")
    tenants = "".join(f"tenant-{number} key-of-tenant-number-{number:06}\n" for number in range(NUM_TENANTS))
    keys = written(folder / "keys", f"honest {HONEST}\nhostile {HOSTILE}\n{tenants}")
    admin = written(folder / "admin", ADMIN)
    flags = ["--api-key-file", keys, "--admin-key-file", admin, "--header-timeout", str(HEADER_TIMEOUT), "--quiet"]
    with ServeProcess(*ENGINE, *flags) as server:
        assert JOB.expected
        yield server


def connect(server: ServeProcess, number: int = 0) -> socket.socket:
    """Connect from one of eight addresses."""
    found = socket.socket()
    found.settimeout(30)
    found.bind((f"127.0.1.{1 + number % 8}", 0))
    found.connect(("127.0.0.1", server.port))
    return found


def request(body: bytes, headers: str = "", key: str = HOSTILE) -> bytes:
    """Make a request of a completion."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n{headers}"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def answer_to(server: ServeProcess, sent: bytes) -> bytes:
    """Return the first line of the answer, or nothing: the connection was closed."""
    with connect(server) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(sent)
        return connection.recv(65536).partition(b"\r\n")[0]
    return b""


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def open_many(server: ServeProcess) -> None:
    """Connections that say nothing are closed, and do not keep others out."""
    with contextlib.ExitStack() as stack:
        opened = []
        for number in range(NUM_CONNECTIONS):
            with contextlib.suppress(OSError):
                opened.append(stack.enter_context(connect(server, number)))
        end = time.monotonic() + 60
        while not all(map(is_closed, opened)):
            assert time.monotonic() < end, "idle connections are not closed"
            time.sleep(0.5)


def send_slowly(server: ServeProcess) -> None:
    """A byte of a header now and then: closed when the time for headers is over."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server, number)) for number in range(NUM_SLOW)]
        for each in slow:
            with contextlib.suppress(OSError):
                each.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: ")
        end = time.monotonic() + 60
        while slow := [each for each in slow if not is_closed(each)]:
            assert time.monotonic() < end, f"{len(slow)} slow connections are not closed"
            for each in slow:
                with contextlib.suppress(OSError):
                    each.send(b"a")
            time.sleep(0.5)


def send_bombs(server: ServeProcess) -> None:
    """Bodies that are compressed, deep, long or of no end: refused, without their weight in memory."""
    bomb = gzip.compress(b'{"prompt": "' + bytes(100_000_000) + b'"}')
    for sent in (
        request(bomb, "content-encoding: gzip\r\n"),
        request(b'{"prompt": "a", "x": ' + b"[" * 1_000_000),
        request(b'{"prompt": [' + b"1," * 1_000_000 + b"1]}"),
        request(b"").replace(b"content-length: 0", b"content-length: 1000000000000"),
        request(b"").replace(b"content-length: 0", b"content-length: 5\r\ncontent-length: 6"),
        request(b"").replace(b"content-length: 0", b"transfer-encoding: chunked") + b"ZZ\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        b"GET /ready HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"x: 1\r\n" * 20_000 + b"\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        bytes.fromhex("16030100c8010000c40303") + bytes(200),
    ):
        status = answer_to(server, sent)
        assert status == b"" or re.match(rb"HTTP/1.1 4\d\d", status), (status, sent[:200])


def be_many_tenants(server: ServeProcess) -> None:
    """Each with a name, a salt and an id of its own. Metrics do not grow with them."""
    with httpx.Client(trust_env=False, timeout=60) as http:
        lines = []
        for number in range(NUM_TENANTS):
            body = {"prompt": "a", "max_tokens": 1, "user": f"user-{number}", "cache_salt": f"salt-{number}"}
            headers = {"authorization": f"Bearer key-of-tenant-number-{number:06}", "x-request-id": f"id-{number}"}
            answer = http.post(f"{server.url}/v1/completions", json=body, headers=headers)
            assert answer.status_code in (200, 429), answer.text
            if number in (0, NUM_TENANTS - 1):
                admin = {"authorization": f"Bearer {ADMIN}"}
                lines.append(http.get(f"{server.url}/metrics", headers=admin).text.count("\n"))
    assert lines[1] < lines[0] + NUM_TENANTS


def cancel_soon(server: ServeProcess) -> None:
    """Requests whose clients are gone within milliseconds, some by a reset."""
    for number in range(NUM_CANCELS):
        prompt = "x" * (10, 300, 3000)[number % 3] + str(number)
        body = json.dumps({"prompt": prompt, "max_tokens": 500, "stream": number % 2 == 0, "ignore_eos": True})
        with connect(server, number) as connection:
            connection.sendall(request(body.encode()))
            time.sleep(0.002 * (number % 10))
            if number % 3 == 0:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def never_read(server: ServeProcess) -> None:
    """Streams that nobody reads."""
    body = json.dumps({"prompt": "a", "max_tokens": 2000, "stream": True, "ignore_eos": True, "logprobs": 5})
    with contextlib.ExitStack() as stack:
        for number in range(8):
            connection = stack.enter_context(connect(server, number))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.sendall(request(body.encode()))
        end = time.monotonic() + 30
        while not left(server):
            assert time.monotonic() < end, "no stream has begun"
        time.sleep(5)


ATTACKS: list[Callable[[ServeProcess], None]] = [
    open_many,
    send_slowly,
    send_bombs,
    be_many_tenants,
    cancel_soon,
    never_read,
]


def left(server: ServeProcess) -> list[str]:
    """Return metrics of what is not free though no request is there."""
    names = "num_requests_running|num_requests_waiting|pages_held"
    text = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {ADMIN}"}).text
    return [line for line in re.findall(rf"^longctx:(?:{names})\{{.*$", text, re.M) if not line.endswith(" 0.0")]


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_honest_client_is_served(attack: Callable[[ServeProcess], None], server: ServeProcess) -> None:
    honest = Honest(server)
    before, descriptors = resident(server.process.pid), len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    honest.start()
    try:
        attack(server)
    finally:
        honest.end()
    end = time.monotonic() + 30
    while remains := left(server):
        assert time.monotonic() < end, remains
        time.sleep(0.2)
    after = resident(server.process.pid)
    now = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    print(f"\n{attack.__name__}: {len(honest.seconds)} honest requests, {max(honest.seconds):.1f} s at most, ", end="")
    print(f"{len(honest.problems)} without an answer; {before:.0f} to {after:.0f} MiB, {descriptors} to {now} files")
    assert not honest.problems
    assert after < before + 100
    assert now < descriptors + 20
