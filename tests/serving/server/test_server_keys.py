"""Keys of a server: hashes, scopes, expiry and files that change; limits of tenants; and the audit log."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import NAME, Served, fake_engine, served
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from longctx.cli import command_parser, main
from longctx.cli.serve_settings import server_settings, watch_keys
from longctx.serving.kv_cache.secret import check_private
from longctx.serving.server.auth import AuthMiddleware, KeyRing, make_grant
from longctx.serving.server.errors import ApiError
from longctx.serving.server.limits import TenantLimit
from longctx.serving.server.logs import AuditLog
from longctx.serving.server.settings import SCOPES, ApiKey, ServerSettings, hash_key, read_keys

KEYS = {scope: f"the-key-with-scope-{scope}" for scope in SCOPES}
BODY = {"model": NAME, "prompt": "ABCD" * 5, "max_tokens": 4, "ignore_eos": True}
READ = {"do_remote_decode": True}
PAST, FUTURE = time.time() - 1, time.time() + 3600


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} | more


@contextlib.contextmanager
def guarded(*lines: str, **options: Any) -> Iterator[tuple[Served, httpx.Client]]:
    """A server whose file of keys has these lines."""
    settings = ServerSettings(api_keys=read_keys(lines, "api"), prepare_processes=0, **options)
    with served(fake_engine(), settings) as running, running.http_client() as client:
        yield running, client


def test_scopes_open_what_they_are_for_and_nothing_else() -> None:
    lines = [f"{scope} {hash_key(key)} scopes={scope}" for scope, key in KEYS.items()]
    paths: dict[str, tuple[str, set[str]]] = {
        "/v1/models": ("GET", {"generate"}),
        "/v1/completions": ("POST", {"generate"}),
        "/page/model": ("GET", {"generate"}),
        "/metrics": ("GET", {"metrics"}),
        "/predictor": ("GET", {"metrics"}),
        "/get_load": ("GET", {"metrics"}),
        "/resume": ("POST", {"migrate"}),
        "/kv_swap": ("POST", {"migrate"}),
        "/cluster/register": ("POST", {"join"}),
        "/cluster/instances": ("GET", set()),
        "/drain": ("POST", set()),
        "/start_profile": ("POST", set()),
        "/load": ("GET", set(SCOPES)),
        "/version": ("GET", set(SCOPES)),
    }
    with guarded(*lines) as (_, client):
        for path, (method, allowed) in paths.items():
            for scope, key in KEYS.items():
                answer = client.request(method, path, headers=bearer(key), json={"drain": False})
                is_refused = answer.status_code == 403 and answer.json()["error"]["code"] == "admin_key_needed"
                assert is_refused == (scope not in allowed | {"admin"}), (path, scope, answer.text)
        for scope, key in KEYS.items():
            sent = bearer(key, **{"x-longctx-tenant": "other"})
            answer = client.get("/version", headers=sent)
            assert answer.status_code == (200 if scope in ("migrate", "admin") else 403), scope


def test_a_file_of_clients_without_clients_lets_none_in() -> None:
    with guarded("router the-router-s-key scopes=admin") as (_, client):
        for path in ("/v1/models", "/version", "/metrics", "/load"):
            assert client.get(path).status_code == 401, path
            assert client.get(path, headers=bearer("the-router-s-key")).status_code == 200, path


def test_a_hash_opens_nothing_by_itself_and_keys_expire() -> None:
    lines = [
        f"ann {hash_key('key-of-ann')}",
        f"bob key-of-bob expires={time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(PAST))}",
        f"cid key-of-cid expires={time.strftime('%Y-%m-%d', time.gmtime(FUTURE + 86_400))}",
    ]
    with guarded(*lines) as (_, client):
        for key, status in (
            ("key-of-ann", 200),
            ("key-of-cid", 200),
            ("key-of-bob", 401),
            (hash_key("key-of-ann"), 401),
        ):
            assert client.get("/v1/models", headers=bearer(key)).status_code == status, key
        assert "expired" in client.get("/v1/models", headers=bearer("key-of-bob")).json()["error"]["message"]
        assert client.get("/health", headers=bearer("key-of-bob")).status_code == 200
    with pytest.raises(ValueError, match="different keys"):
        ServerSettings(api_keys=read_keys(["a key-of-ann", f"b {hash_key('key-of-ann')}"], "api"))


def test_clients_see_their_own_requests_alone() -> None:
    with guarded("ann key-of-ann", "bob key-of-bob", "boss the-boss-key scopes=metrics") as (running, client):
        running.executor.go.clear()
        with ThreadPoolExecutor(1) as pool:
            sent = bearer("key-of-ann", **{"x-request-id": "one-of-ann"})
            answer = pool.submit(client.post, "/v1/completions", json=BODY, headers=sent)
            running.wait_until("it runs", lambda: running.server.calls)
            loads = {key: client.get("/load", headers=bearer(key)).json() for key in ("key-of-ann", "key-of-bob")}
            assert loads["key-of-ann"]["request_ids"] == ["one-of-ann"]
            assert (loads["key-of-bob"]["request_ids"], loads["key-of-bob"]["num_reqs"]) == ([], 0)
            assert client.get("/load", headers=bearer("the-boss-key")).json()["request_ids"] == ["one-of-ann"]
            aborted = client.post("/abort_requests", json={"request_ids": ["one-of-ann"]}, headers=bearer("key-of-bob"))
            assert aborted.json() == {"aborted": []}
            running.executor.go.set()
            assert answer.result().status_code == 200


def test_the_page_shows_a_client_its_own_requests_alone() -> None:
    with guarded("ann key-of-ann", "bob key-of-bob", "boss the-boss-key scopes=metrics,generate") as (_, client):

        def seen(key: str) -> dict[str, Any]:
            with client.stream("GET", "/page/events", headers=bearer(key)) as stream:
                line = next(each for each in stream.iter_lines() if each.startswith("data:"))
            message: dict[str, Any] = json.loads(line.removeprefix("data:"))
            return message

        for name in ("ann", "bob", "bob"):
            assert client.post("/v1/completions", json=BODY, headers=bearer(f"key-of-{name}")).status_code == 200
        counts = {key: len(seen(key)["ended"]) for key in ("key-of-ann", "key-of-bob", "the-boss-key")}
        assert counts == {"key-of-ann": 1, "key-of-bob": 2, "the-boss-key": 3}
        own, all_of_it = seen("key-of-ann"), seen("the-boss-key")
        assert (own["steps"], own["load"]["pages"], own["load"]["held"]) == ([], 0, [0])
        assert all_of_it["steps"]
        assert all_of_it["load"]["pages"] == 400
        assert own.keys() == all_of_it.keys()


def test_files_of_keys_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"

    def write(text: str) -> None:
        new = tmp_path / "new"
        new.touch(mode=0o600)
        new.write_text(text)
        new.rename(file)

    write("ann key-of-ann\n")
    options = command_parser("serve").parse_args(["--api-key-file", str(file), "--admin-key", "the-boss-key"])
    now = [0.0]
    ring = KeyRing(server_settings(options).keys, clock=lambda: now[0])
    watch_keys(ring, options)

    def opened() -> set[str]:
        now[0] += 1
        return {key for key in ("key-of-ann", "key-of-bob", "the-boss-key") if ring.find(key.encode()) is not None}

    assert opened() == {"key-of-ann", "the-boss-key"}
    write(f"bob {hash_key('key-of-bob')}\n")
    assert opened() == {"key-of-bob", "the-boss-key"}
    for wrong in ("", "bob key-of-bob what=1\n", "bob the-boss-key\n"):
        write(wrong)  # those of before stay
        assert opened() == {"key-of-bob", "the-boss-key"}, wrong
    file.unlink()
    assert opened() == {"key-of-bob", "the-boss-key"}
    write("ann key-of-ann\n")
    ring.reload()
    assert opened() == {"key-of-ann", "the-boss-key"}


@pytest.mark.parametrize("flag", ["--api-key-file", "--admin-key-file"])
def test_files_of_keys_that_others_may_read_are_refused(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann key-of-ann\n")
    options = command_parser("serve").parse_args([flag, str(file)])
    for mode in (0o644, 0o604, 0o620, 0o660, *(() if os.geteuid() == 0 else (0o640,))):
        file.chmod(mode)
        with pytest.raises(ValueError, match=f"{flag}: others than its owner have access .*chmod 600"):
            server_settings(options)
    file.chmod(0o600)
    assert [key.name for key in server_settings(options).keys] == ["ann"]


@pytest.mark.parametrize(
    ("mode", "owner", "is_fine"),
    [
        *((0o440, owner, owner != "own") for owner in ("own", "root", "other")),
        *((0o444, owner, False) for owner in ("own", "root", "other")),
        *((0o660, "root", False), (0o600, "own", True)),
    ],
)
def test_groups_may_read_what_others_own(
    mode: int, owner: str, is_fine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes mounts secrets with fsGroup: root's, of mode 0440."""
    file = tmp_path / "secret"
    file.touch()
    fields = list(file.stat())
    fields[0], fields[4] = fields[0] & ~0o777 | mode, {"own": 1000, "root": 0, "other": 1001}[owner]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with contextlib.nullcontext() if is_fine else pytest.raises(ValueError, match="chmod 600"):
        check_private("key", file, os.stat_result(fields))


def test_a_key_is_made_with_the_line_of_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["api-key", "ann"]) == 0
    printed = capsys.readouterr()
    [key] = read_keys(printed.out.splitlines(), "api")
    assert (key.name, key.key) == ("ann", hash_key(printed.err.strip()))
    assert printed.err.strip() not in printed.out
    assert main(["api-key", "not a name"]) == 2


# Limits of tenants.


def test_no_minute_has_more_than_the_limit() -> None:
    now = [0.0]
    limit = TenantLimit(lambda: now[0])
    limit.requests = 10
    taken: list[float] = []
    for step in range(4000):
        now[0] = step * 0.05
        with contextlib.suppress(ApiError):
            limit.take_request()
            taken.append(now[0])
    for first in taken:
        assert sum(first <= each < first + 60 for each in taken) <= 10
    assert len(taken) == 40
    with pytest.raises(ApiError) as caught:
        limit.take_request()
    now[0] += float(caught.value.headers["retry-after-ms"]) / 1000
    limit.take_request()


def test_requests_that_a_server_could_not_serve_count_no_longer() -> None:
    statuses = iter([503, 200, 503, 400, 200])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("", next(statuses))(scope, receive, send)

    settings = ServerSettings(api_keys=read_keys(["ann key-of-ann requests=2"], "api"))
    guard = AuthMiddleware(app, settings, KeyRing(settings.keys, needs_key=True), AuditLog(None))

    async def ask() -> list[tuple[int, str]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://test") as client:
            answers = [await client.post("/v1/completions", headers=bearer("key-of-ann")) for _ in range(5)]
        return [(each.status_code, each.headers["x-ratelimit-remaining-requests"]) for each in answers]

    assert asyncio.run(ask()) == [(503, "2"), (200, "1"), (503, "1"), (400, "0"), (429, "0")]


def test_tokens_that_are_not_used_count_no_longer() -> None:
    now = [0.0]
    limit = TenantLimit(lambda: now[0])
    limit.tokens = 100
    settle = limit.take_tokens(80)
    with pytest.raises(ApiError, match="80 are used, 30 more asked"):
        limit.take_tokens(30)
    settle(20)
    limit.take_tokens(80)
    assert limit.headers["x-ratelimit-remaining-tokens"] == "0"
    assert (limit.headers["x-ratelimit-limit-tokens"], limit.headers["x-ratelimit-reset-tokens"]) == ("100", "60.000s")
    with pytest.raises(ApiError, match=r"101 tokens.* 100 in a minute") as caught:
        limit.take_tokens(101)
    assert caught.value.headers["x-should-retry"] == "false"


def test_limits_are_exact_under_concurrency() -> None:
    with guarded("ann key-of-ann requests=10", "bob key-of-bob", "cid key-of-cid tokens=120") as (running, client):

        def ask(key: str) -> httpx.Response:
            return client.post("/v1/completions", json=BODY, headers=bearer(key))

        with ThreadPoolExecutor(16) as pool:
            statuses = [answer.status_code for answer in pool.map(ask, ["key-of-ann"] * 40)]
            assert (statuses.count(200), statuses.count(429)) == (10, 30)
            assert [answer.status_code for answer in pool.map(ask, ["key-of-bob"] * 12)] == [200] * 12
        refused = ask("key-of-ann")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 0 < int(refused.headers["retry-after"]) <= 60
        shown = {name: value for name, value in refused.headers.items() if name.startswith("x-ratelimit")}
        assert shown["x-ratelimit-limit-requests"] == "10"
        assert shown["x-ratelimit-remaining-requests"] == "0"
        assert shown.keys() == {f"x-ratelimit-{each}-requests" for each in ("limit", "remaining", "reset")}
        assert running.server.metrics.refusals["rate_limit"] == 31
        # A prompt of 20 letters and 4 tokens of an answer: five of them fit into 120.
        answers = [ask("key-of-cid") for _ in range(6)]
        used = [answer.json()["usage"]["total_tokens"] for answer in answers[:5]]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429]
        assert answers[4].headers["x-ratelimit-remaining-tokens"] == str(120 - sum(used))


# The audit log.


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_audit_log_has_actions_refusals_and_failures_without_keys_and_prompts(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    lines = ["ann key-of-ann requests=1", "boss the-boss-key scopes=admin"]
    with guarded(*lines, audit_log=path) as (_, client):
        client.get("/v1/models", headers=bearer("sk-wrong-wrong"))
        client.get('/v1/a%0A{"event": "action"}%1b[2J', headers=bearer("sk-wrong-wrong"))
        client.post("/drain", json={}, headers=bearer("key-of-ann"))
        client.post("/drain", json={"drain": False}, headers=bearer("the-boss-key"))
        for _ in range(2):
            client.post("/v1/completions", json=BODY, headers=bearer("key-of-ann"))
    assert path.stat().st_mode & 0o777 == 0o600
    found = lines_of(path)
    assert [(each["event"], each.get("key"), each["status"]) for each in found] == [
        ("authentication_failed", None, 401),
        ("authentication_failed", None, 401),
        ("refused", "ann", 403),
        ("action", "boss", 200),
        ("refused", "ann", 429),
    ]
    assert {each["address"] for each in found} == {"127.0.0.1"}
    assert (found[3]["method"], found[3]["path"]) == ("POST", "/drain")
    text = path.read_text()
    assert text.isascii()
    assert not any(secret in text for secret in ("key-of-ann", "the-boss-key", "sk-wrong", "ABCD", "\x1b"))


def test_a_flood_hides_no_action_and_stays_small(tmp_path: Path) -> None:
    now, path = [0.0], tmp_path / "audit"
    log = AuditLog(path, lambda: now[0])
    for number in range(20_000):
        log.write("authentication_failed", path="/x" * 4000, number=number)
    log.write("action", path="/drain")
    now[0] = 61.0
    for _ in range(log.LINES + 5):
        log.write("authentication_failed", path="/y")
    log.close()
    found = lines_of(path)
    assert len(found) == 2 * log.LINES + 2
    assert [each["event"] for each in found].count("action") == 1
    assert sum(each.get("left_out", 0) for each in found) == 20_000 - log.LINES + 5
    assert path.stat().st_size < 400 * len(found)


def test_a_file_that_can_t_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "no" / "folder", tmp_path, tmp_path / "link"):
        with pytest.raises(ValueError, match="audit_log: "):
            AuditLog(path)


def test_the_audit_log_follows_a_file_that_is_moved(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    log = AuditLog(path)
    log.write("action", number=1)
    end = time.monotonic() + 20
    while not path.stat().st_size and time.monotonic() < end:
        time.sleep(0.01)
    path.rename(tmp_path / "audit.1")
    log.write("action", number=2)
    log.close()
    assert [each["number"] for each in (*lines_of(tmp_path / "audit.1"), *lines_of(path))] == [1, 2]


# Grants.


def test_a_grant_opens_one_instance_for_one_tenant() -> None:
    grant = make_grant("key-of-router", "ann")
    plain, hashed = ApiKey("router", "key-of-router", frozenset({"migrate"})), ApiKey("r", hash_key("key-of-router"))
    assert KeyRing([plain]).granted(grant) == "ann"
    for others in ([hashed], [ApiKey("x", "key-of-router", frozenset({"generate"}))], [ApiKey("x", "another-key")]):
        assert KeyRing(others).granted(grant) is None
    _, payload, signature = grant.split(".")
    other = make_grant("key-of-router", "bob").split(".")[1]
    for wrong in (f"grant.{other}.{signature}", f"grant.{payload}", f"grant.{payload}.", "grant.é.é", f"{grant}.x"):
        assert KeyRing([plain]).granted(wrong) is None, wrong
    with guarded("ann key-of-ann", "router key-of-router scopes=migrate") as (_, client):
        sent = bearer(grant)
        asked = client.post("/v1/completions", json=BODY | {"kv_transfer_params": READ}, headers=sent)
        assert (asked.status_code, "--role" in asked.text) == (400, True)  # this server reads for no other one
        assert client.get("/server_info", headers=sent).status_code == 200
        denied = ["GET /metrics", "POST /resume", "POST /drain", "POST /kv_swap", "GET /v1/caches", "POST /v1/caches"]
        for method, path in map(str.split, [*denied, "POST /tokenize", "POST /v1/chat/completions", "GET /v1/models"]):
            assert client.request(method, path, json={}, headers=sent).status_code == 403, path
        for params in (None, {}, READ | {"do_remote_prefill": True}):
            body = BODY | {"kv_transfer_params": params}
            assert client.post("/v1/completions", json=body, headers=sent).status_code == 403, params
        assert client.get("/server_info", headers=sent | {"x-longctx-tenant": "bob"}).status_code == 403
