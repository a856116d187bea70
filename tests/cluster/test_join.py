"""Servers that register with routers by themselves: again when a router comes back, and no more once they drain."""

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serve_process import free_port

from longctx.cluster.join import Challenges, Joining, check_join_url, router_url
from longctx.serving.kv_cache.prefix import PageHash

HASH = PageHash(bytes(16), 16)


class Router(http.server.HTTPServer):
    """What a router hears."""

    def __init__(self, port: int = 0, status: int = 200, page_hash: PageHash | None = None) -> None:
        self.challenges = Challenges(page_hash or HASH)
        self.status, self.heard = status, list[tuple[str, dict[str, Any], str | None]]()
        self.keys_before_proof: list[str | None] = []
        super().__init__(("127.0.0.1", port), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def paths(self) -> list[str]:
        return [path for path, *_ in self.heard]

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Router

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status, key = self.server.status, self.headers["authorization"]
        answer = b"{}" if status == 200 else b'{"error": {"message": "the name is taken"}}'
        if self.path == "/cluster/challenge":
            status, answer = 200, json.dumps(self.server.challenges.make(body["nonce"])).encode()
            self.server.keys_before_proof.append(key)
        else:
            proof = [body.pop(name) for name in ("nonce", "challenge", "proof")]
            said = (
                [self.server.heard[0][1][name] for name in ("url", "name", "role")]
                if self.server.heard
                else body.values()
            )
            assert self.server.challenges.is_proven(*proof, *said)
            self.server.heard.append((self.path, body, key))
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router()
    yield made
    made.end()


def wait_until(what: str, condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, f"not within 10 s: {what}"
        time.sleep(0.01)


def test_it_is_registered_while_it_is_open_and_removed_at_the_end(router: Router) -> None:
    is_open = threading.Event()
    url, other = "http://10.0.0.5:8000", f"127.0.0.1:{free_port()}"
    routers = [f"127.0.0.1:{router.server_port}", other]  # one that is not there changes nothing
    with Joining(routers, url, "prefill", is_open.is_set, HASH, "the-key", "mine", seconds=0.02):
        time.sleep(0.1)
        assert router.heard == []
        is_open.set()
        wait_until("it registers again and again", lambda: len(router.heard) > 2)
        assert router.heard[0] == (
            "/cluster/register",
            {"url": url, "name": "mine", "role": "prefill"},
            "Bearer the-key",
        )
        is_open.clear()
        time.sleep(0.1)
        count = len(router.heard)
        time.sleep(0.1)
        assert len(router.heard) == count, "it drains"
    assert router.heard[-1] == ("/cluster/remove", {"url": url}, "Bearer the-key")


def test_a_router_without_the_secret_gets_no_key(caplog: pytest.LogCaptureFixture) -> None:
    router = Router(page_hash=PageHash(b"another secret..", 16))
    try:
        with Joining([f"127.0.0.1:{router.server_port}"], "http://h:1", "both", lambda: True, HASH, "k", seconds=0.02):
            wait_until("it is asked again", lambda: len(router.keys_before_proof) > 2)
    finally:
        router.end()
    assert set(router.keys_before_proof) == {None}
    assert router.heard == []
    assert caplog.text.count("does not know the secret of page keys (--kv-secret-file), so it gets no key") == 1


def test_a_challenge_is_for_one_server_and_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    challenges, nonce, own = Challenges(HASH), "0" * 32, ("http://10.0.0.5:8000", None, "both")
    challenge = challenges.make(nonce)["challenge"]
    proof = HASH.sign("instance", nonce, challenge, *own)
    assert challenges.is_proven(nonce, challenge, proof, *own)
    wrong = [
        ("1" * 32, challenge, proof, *own),
        (nonce, Challenges(HASH).make(nonce)["challenge"], proof, *own),  # of another router, or before a restart
        (nonce, challenge, proof, "http://10.6.6.6:8000", None, "both"),
        (nonce, challenge, challenges.make(nonce)["proof"], *own),
        (nonce, challenge, "\u00e9\ud800", *own),
        (nonce, "", "", *own),
    ]
    assert not any(challenges.is_proven(*each) for each in wrong)
    later = time.monotonic() + 40
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not challenges.is_proven(nonce, challenge, proof, *own)


def test_a_router_that_comes_back_learns_of_it() -> None:
    port = free_port()
    first = Router(port)
    with Joining([f"127.0.0.1:{port}"], "http://10.0.0.5:8000", "both", lambda: True, HASH, seconds=0.02):
        wait_until("it is known", lambda: first.heard)
        first.end()
        second = Router(port)
        try:
            wait_until("it is known again", lambda: second.heard)
            assert second.heard[0][2] is None
        finally:
            second.end()


def test_why_a_router_refuses_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    router = Router(status=400)
    try:
        with Joining(
            [f"http://127.0.0.1:{router.server_port}"], "http://h:1", "both", lambda: True, HASH, seconds=0.02
        ):
            wait_until("it is asked again", lambda: len(router.heard) > 2)
    finally:
        router.end()
    assert set(router.paths) == {"/cluster/register"}, "it is removed where it was known alone"
    assert [record.message for record in caplog.records if "refuse" in record.message or "400" in record.message] == [
        f"longctx: router http://127.0.0.1:{router.server_port}: register: 400 the name is taken"
    ]


@pytest.mark.parametrize("text", ["", "host", "host:x", "host:0", "host:70000", "ftp://h:1", "http://h:1/p", "u@h:1"])
def test_what_is_no_router(text: str) -> None:
    with pytest.raises(ValueError, match="join must be HOST:PORT, got"):
        router_url(text)


@pytest.mark.parametrize(
    ("url", "message"),
    [("h:1", "join_url must be http://HOST:PORT"), ("http://0.0.0.0:80", "join_url must be where the router reaches")],
)
def test_where_nobody_reaches_this_server(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_join_url(url)
