"""The log and the metrics of HTTP requests: a line and a count for each, whatever becomes of it."""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from served import Served, fake_engine, served

from longctx.serving.server.settings import ApiKey, ServerSettings

KEY = "the-key-of-ann"
BODY = {"prompt": "1234567", "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def closed() -> Iterator[Served]:
    settings = ServerSettings(prepare_processes=0, api_keys=(ApiKey("ann", KEY),))
    with served(fake_engine(), settings) as running:
        yield running


def lines(caplog: pytest.LogCaptureFixture, of: str = "http") -> list[dict[str, Any]]:
    found = [record for record in caplog.records if record.name == "longctx.access" and record.msg == of]
    return [record.fields for record in found]  # type: ignore[attr-defined]


def counts(running: Served) -> dict[tuple[str, str, str], float]:
    running.server.metrics.render(max_age=0)
    text = running.server.metrics.render(max_age=0).decode()
    pattern = r'^longctx:http_requests_total\{method="(\w+)",path="([^"]*)",status="(\d+)"\} (\S+)$'
    found = re.findall(pattern, text, re.MULTILINE)
    return {(method, path, status): float(count) for method, path, status, count in found}


def test_each_request_has_a_line(closed: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "longctx.access"), closed.http_client() as client:
        key = {"authorization": f"Bearer {KEY}"}
        for stream in (False, True):
            assert client.post("/v1/completions", json=BODY | {"stream": stream}, headers=key).status_code == 200
        client.post("/v1/completions", json={"prompt": 5}, headers=key)
        client.post("/v1/completions", json=BODY)
        client.get("/v1/nothing/\u2028%0aGET", headers=key)
        client.get("/health")
        closed.wait_until("all lines are there", lambda: len(lines(caplog)) >= 5)
    found = lines(caplog)
    assert [(each["method"], each["status"]) for each in found] == [
        ("POST", 200),
        ("POST", 200),
        ("POST", 400),
        ("POST", 401),
        ("GET", 404),
    ]
    for each in found[:2]:
        assert (each["prompt_tokens"], each["output_tokens"], each["tenant"]) == (7, 5, "ann")
        assert each["ttft"] >= 0
        assert each["seconds"] >= 0
    assert "tenant" not in found[3]
    assert all(each["path"].isprintable() and each["path"].isascii() for each in found)
    assert not any("1234567" in str(each) for each in found)


def test_metrics_have_templates_of_paths(closed: Served) -> None:
    with closed.http_client() as client:
        before = counts(closed)
        for number in range(50):
            client.get(f"/v1/models/model-{number}", headers={"authorization": f"Bearer {KEY}"})
            client.get(f"/coffee/{number}", headers={"authorization": f"Bearer {KEY}"})
        after = counts(closed)
    grown = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert grown[("GET", "/v1/models/{name:path}", "404")] == 50
    assert grown[("GET", "other", "404")] == 50
    assert len(grown) == 2
    text = closed.server.metrics.render(max_age=0).decode()
    assert 'longctx:http_request_seconds_bucket{le="+Inf",path="/v1/models/{name:path}"}' in text


def test_the_load_is_logged_while_there_is_some(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longctx.serving.server.server._REPORT_SECONDS", 0.05)
    with (
        caplog.at_level(logging.INFO, "longctx.access"),
        served(fake_engine(), ServerSettings(prepare_processes=0)) as running,
        running.http_client() as client,
    ):
        assert not lines(caplog, "load")
        running.executor.pause = 0.02
        client.post("/v1/completions", json=BODY | {"max_tokens": 40})
        running.wait_until("the load is told", lambda: lines(caplog, "load"))
    assert any(each["output_tokens_per_second"] > 0 for each in lines(caplog, "load"))


@pytest.mark.parametrize("is_wanted", [False, True])
def test_no_lines_are_logged_where_none_are_wanted(is_wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(fake_engine(), ServerSettings(prepare_processes=0, access_log=is_wanted)) as running:
        # Its own logger: the log of the process has the lines of other tests' servers too.
        logged = Mock()
        monkeypatch.setattr(running.server.http, "_logger", logged)
        with running.http_client() as client:
            client.post("/v1/completions", json=BODY)
        assert counts(running)[("POST", "/v1/completions", "200")] == 1
        stats = running.server.engine.stats()
        running.server.http.report_load(stats, replace(stats, output_tokens=0), 1.0, 8)
        assert [call.args[0] for call in logged.info.call_args_list] == (["http", "load"] if is_wanted else [])


def test_a_browser_may_send_any_header_from_an_allowed_page() -> None:
    settings = ServerSettings(prepare_processes=0, allow_origins=("https://ours.example",))
    with served(fake_engine(), settings) as running, running.http_client() as client:
        asked = "authorization,content-type,x-stainless-arch,x-stainless-retry-count,anthropic-version"
        headers = {"access-control-request-method": "POST", "access-control-request-headers": asked}
        for origin, status in (("https://ours.example", 200), ("https://elsewhere.example", 400)):
            answer = client.options("/v1/chat/completions", headers=headers | {"origin": origin})
            assert answer.status_code == status
            assert answer.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
