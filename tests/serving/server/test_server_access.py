"""Who may do what: keys, administrators, other web pages; and how much anybody may send."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from served import NAME, Served, fake_engine, served

from longctx.cli import command_parser
from longctx.cli.serve_settings import server_settings
from longctx.serving.server.auth import AuthMiddleware, KeyRing
from longctx.serving.server.logs import AuditLog
from longctx.serving.server.settings import ApiKey, ServerSettings, read_keys

ALICE, BOB, ADMIN = "alice-has-this-key", "bob-has-another-one", "the-administrator-s"
BODY = {"model": NAME, "prompt": "ABCD" * 5, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    settings = ServerSettings(
        api_keys=read_keys([f"alice {ALICE}", f"bob {BOB}"], "api"),
        admin_keys=read_keys([ADMIN], "admin"),
        prepare_processes=0,
        max_body_bytes=2000,
        max_header_bytes=1000,
        header_timeout=0.5,
        body_timeout=0.5,
    )
    with served(fake_engine(), settings) as running:
        yield running


@pytest.fixture
def client(guarded: Served) -> Iterator[httpx.Client]:
    with guarded.http_client() as client:
        yield client


def key(value: str) -> dict[str, str]:
    return {"authorization": f"Bearer {value}"}


def routes(running: Served) -> list[tuple[str, str]]:
    """All that the app answers to, and what it doesn't know."""
    paths = running.http.config.app.openapi()["paths"]
    return [("get", "/openapi.json"), ("get", "/nothing"), *((m, path) for path in paths for m in paths[path])]


def test_keys_guard_everything_but_whether_the_server_lives(guarded: Served, client: httpx.Client) -> None:
    open_paths = {"/health", "/ready", "/ping"}
    found = routes(guarded)
    assert len(found) > 25
    for method, path in found:
        for headers in ({}, key("not-a-key-of-ours"), key(ALICE[:-1]), key(ALICE + "x"), {"authorization": ALICE}):
            answer = client.request(method, path, headers=headers)
            assert (answer.status_code == 401) != (path in open_paths), (method, path, answer.status_code)
        if path not in open_paths and method != "head":
            error = answer.json()["error"]
            assert error.get("code") == "invalid_api_key" or error["type"] == "authentication_error"


@pytest.mark.parametrize("value", [ALICE, BOB, ADMIN])
def test_each_key_opens(guarded: Served, value: str) -> None:
    assert guarded.openai(value).models.list().data[0].id == NAME


def test_the_client_gets_an_authentication_error(guarded: Served) -> None:
    with pytest.raises(openai.AuthenticationError):
        guarded.openai("wrong-wrong").completions.create(model=NAME, prompt="1")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("get", path) for path in ("/load", "/loads", "/v1/loads", "/get_load")),
        *(("post", path) for path in ("/abort_requests", "/abort_request", "/start_profile", "/stop_profile")),
    ],
)
def test_administrators_have_a_key_of_their_own(client: httpx.Client, method: str, path: str) -> None:
    is_own = path == "/load" or "abort" in path  # what is about one's own requests
    body = {"json": {"request_ids": []}} if method == "post" else {}
    assert client.request(method, path, headers=key(ALICE), **body).status_code == (200 if is_own else 403)
    answer = client.request(method, path, headers=key(ADMIN), **body)
    assert answer.status_code == (403 if "profile" in path else 200)
    if "profile" in path:
        assert answer.json()["error"]["code"] == "profiles_are_off"


CONTROL = ("/resume", "/drain", "/kv_swap", "/start_profile", "/stop_profile")


def test_a_line_feed_at_the_end_of_a_path_opens_nothing(client: httpx.Client) -> None:
    """Routes match such a path."""
    for method, path in [("get", "/loads"), *(("post", path) for path in CONTROL)]:
        assert client.request(method, path + "%0A", headers=key(ALICE)).status_code in (403, 404), path


def test_control_needs_an_administrator_where_there_are_keys_of_clients_alone() -> None:
    settings = ServerSettings(api_keys=read_keys([f"alice {ALICE}"], "api"), prepare_processes=0)
    with served(fake_engine(), settings) as running, running.http_client(headers=key(ALICE)) as client:
        for path in CONTROL:
            answer = client.post(path, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_needed"), path
        assert client.get("/load").status_code == 200


def test_tenants_share_no_pages(client: httpx.Client) -> None:
    def cached(value: str) -> int:
        answer = client.post("/v1/completions", json=BODY, headers=key(value)).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(ALICE), cached(BOB)] == [0, 0]
    assert min(cached(ALICE), cached(BOB)) > 0


def test_no_other_page_may_ask(client: httpx.Client) -> None:
    headers = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    answer = client.options("/v1/completions", headers=headers)
    assert answer.status_code == 401
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert "access-control-allow-origin" not in client.get("/health", headers=headers).headers


def test_pages_of_allowed_origins_may_ask() -> None:
    settings = ServerSettings(prepare_processes=0, allow_origins=("https://ours.example",))
    with served(fake_engine(), settings) as running, running.http_client() as client:
        for origin, allowed in (("https://ours.example", "https://ours.example"), ("https://elsewhere.example", None)):
            headers = {"origin": origin, "access-control-request-method": "POST"}
            answer = client.options("/v1/completions", headers=headers)
            assert answer.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_form_can_send_is_no_request(client: httpx.Client, kind: str | None) -> None:
    headers = key(ALICE) | ({} if kind is None else {"content-type": kind})
    answer = client.post("/v1/completions", content=b'{"prompt": "1"}', headers=headers)
    assert answer.status_code == 415
    assert "Content-Type" in answer.json()["error"]["message"]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_bodies_have_a_limit(client: httpx.Client, is_chunked: bool) -> None:
    content: Any = b'{"prompt": "' + b"1" * 3000 + b'"}'
    if is_chunked:
        content = iter([content[:1000], content[1000:]])
    answer = client.post("/v1/completions", content=content, headers=key(ALICE) | {"content-type": "application/json"})
    assert answer.status_code == 413
    assert "2000 bytes" in answer.json()["error"]["message"]


def test_bodies_have_a_limit_together() -> None:
    """Bodies that are sent slowly hold memory: others are told to come again, and no byte is counted for ever."""
    settings = ServerSettings(prepare_processes=0, max_body_bytes=1000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"
    with served(fake_engine(), settings) as running, running.http_client() as client:
        held = [socket.create_connection(("127.0.0.1", running.port), 10) for _ in range(4)]
        for connection in held:
            connection.sendall(head + b" " * 890)
        body = BODY | {"user": "x" * 600}
        running.wait_until("there is no room", lambda: client.post("/v1/completions", json=body).status_code == 429)
        refused = client.post("/v1/completions", json=body)
        assert (refused.json()["error"]["code"], refused.headers["x-llm-d-request-dropped-reason"]) == (
            "slow_down",
            "queue",
        )
        assert client.post("/v1/completions", json=BODY).status_code == 200
        for connection in held:
            connection.close()
        running.wait_until("there is room", lambda: client.post("/v1/completions", json=body).status_code == 200)


def test_other_names_of_the_host_are_refused() -> None:
    """So a page of another site can't ask, whose name is made to point to this host."""
    settings = ServerSettings(prepare_processes=0, allow_hosts=("localhost", "127.0.0.1", "::1"))
    with served(fake_engine(), settings) as running, running.http_client() as client:
        for host in ("localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:1", "[::1]:8000", "[::1]"):
            assert client.get("/health", headers={"host": host}).status_code == 200, host
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "", "x:localhost", "127.0.0.11"):
            answer = client.get("/v1/models", headers={"host": host})
            assert answer.status_code == 421, host
            assert answer.json()["error"]["code"] == "unknown_host"


def test_a_length_that_is_no_number_is_a_bad_request(guarded: Served) -> None:
    assert b" 400 " in exchange(guarded, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"x" * 2000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 400 + b"\r\n",
        b"GET /health?" + b"x" * 2000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 2000,
    ],
)
def test_headers_have_a_limit(guarded: Served, head: bytes) -> None:
    answer = exchange(guarded, head)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"The headers are too large.")


def test_another_protocol_s_beginning_is_a_bad_request(guarded: Served) -> None:
    """Routers probe for HTTP/2, and go on with HTTP/1.1."""
    assert exchange(guarded, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_headers_must_come_in_time(guarded: Served) -> None:
    assert exchange(guarded, b"GET /health HTTP/1.1\r\nHost: x\r\n") == b""


def test_a_body_must_come_in_time(guarded: Served) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\n"
    answer = exchange(guarded, f"{head}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{{".encode())
    assert b"HTTP/1.1 408 " in answer


def test_no_answer_shows_a_key_or_a_path(client: httpx.Client, guarded: Served) -> None:
    for method, path in routes(guarded):
        if "profile" not in path:
            text = client.request(method, path, headers=key(ADMIN)).text
            assert not any(secret in text for secret in (ALICE, BOB, ADMIN, "hash_key", "/work", "/tmp"))
    assert not any(secret in repr(guarded.server.settings) for secret in (ALICE, BOB, ADMIN))


def exchange(running: Served, data: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", running.port), 10) as connection:
        connection.sendall(data)
        received = b""
        while part := connection.recv(4096):
            received += part
    return received


def test_files_of_keys_have_names_and_comments() -> None:
    keys = read_keys(["# ours", "", "first-key-1", "bob  second-key-2"], "api")
    assert [(each.name, each.key) for each in keys] == [("api-3", "first-key-1"), ("bob", "second-key-2")]
    assert "second-key-2" not in repr(keys)


@pytest.mark.parametrize(
    "lines",
    [
        ["a b c"],
        ["long-enough scopes=metrics"],
        ["long-enough! a"],
        ["short"],
        ["n\u00e4me long-enough"],
        ["a long-enough", "a long-enough-2"],
    ],
)
def test_bad_files_of_keys_are_refused_and_not_shown(lines: list[str]) -> None:
    with pytest.raises(ValueError, match="key") as caught:
        read_keys(lines, "api")
    assert "long-enough" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        *("scopes=all", "scopes=", "expires=soon", "requests=0", "requests=1.5", "tokens=-1", "tenant=a,b", "what=1"),
        *("requests=1 requests=2", "more", "tokens=1 more"),
    ],
)
def test_options_of_keys_are_checked(options: str) -> None:
    with pytest.raises(ValueError, match=r"key 2|ann|names of keys") as caught:
        read_keys(["first-key-1", f"ann long-enough {options}"], "api")
    assert "long-enough" not in str(caught.value)


def test_what_clients_send_wrongly_fills_no_log(guarded: Served, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", guarded.port), 10) as connection:
            connection.sendall(b"no request\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    assert caplog.messages == []


def test_one_key_can_t_be_two_people_s() -> None:
    with pytest.raises(ValueError, match="different keys"):
        ServerSettings(api_keys=(ApiKey("a", "12345678"),), admin_keys=(ApiKey("b", "12345678"),))


@pytest.mark.parametrize(
    ("address", "headers", "is_admin"),
    [
        ("127.0.0.1", {"host": "localhost:8000"}, True),
        ("127.0.0.9", {"host": "127.0.0.9"}, True),
        ("::1", {"host": "[::1]:8000"}, True),
        ("::ffff:127.0.0.1", {"host": "127.0.0.1"}, True),
        ("192.0.2.7", {"host": "localhost"}, False),
        ("::ffff:192.0.2.7", {"host": "localhost"}, False),
        ("127.0.0.1", {"host": "evil.example"}, False),  # whose name was made to point here
        ("127.0.0.1", {"host": "localhost", "x-forwarded-for": "192.0.2.7"}, False),  # of a proxy on this host
        ("127.0.0.1", {"host": "localhost", "x-real-ip": "192.0.2.7"}, False),
        ("127.0.0.1", {"host": "localhost", "x-forwarded-proto": "https"}, False),
        ("127.0.0.1", {"host": "localhost", "origin": "https://evil.example"}, False),  # of a page in a browser here
        (None, {"host": "localhost"}, False),
    ],
)
def test_without_keys_clients_on_the_host_alone_are_administrators(
    address: str | None, headers: dict[str, str], is_admin: bool
) -> None:
    async def ask(path: str) -> tuple[list[bool], int | None]:
        asked, statuses = list[bool](), list[int]()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            asked.append(scope["state"]["client"].is_admin)

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        sent = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "path": path, "method": "POST", "headers": sent, "client": address and (address, 1)}
        await AuthMiddleware(app, ServerSettings(), KeyRing([]), AuditLog(None))(scope, None, send)  # type: ignore[arg-type]
        return asked, statuses[0] if statuses else None

    for path in ("/drain", "/resume", "/cluster/register", "/load", "/abort_requests"):
        assert asyncio.run(ask(path)) == (([True], None) if is_admin else ([], 403)), path
    assert asyncio.run(ask("/v1/completions")) == ([is_admin], None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "server.example"])
def test_a_server_that_lets_others_in_needs_keys(host: str) -> None:
    def settings(*flags: str) -> ServerSettings:
        return server_settings(command_parser("serve").parse_args(["--host", host, *flags]))

    for flags in ([], ["--admin-key", ADMIN], ["--allow-host", "server.example"]):
        with pytest.raises(
            ValueError, match=f"--host {host} lets other hosts in.*--api-key-file, or --allow-anonymous"
        ):
            settings(*flags)
    assert settings("--allow-anonymous") == ServerSettings()
    assert settings("--api-key", ALICE).api_keys
    assert settings("--host", "127.0.0.2").allow_hosts == ("127.0.0.1", "localhost", "::1", "127.0.0.2")
