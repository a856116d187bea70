"""What nobody should send: each gets an answer in OpenAI's form that is no 500, and the engine lives on."""

import json
from typing import Any

import httpx
import pytest
from served import NAME, Served

ROUTES = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_requests"]
JSON = {"content-type": "application/json"}


def check(letters: Served, path: str, content: bytes, headers: dict[str, str] = JSON) -> httpx.Response:
    with letters.http_client() as client:
        answer = client.post(path, content=content, headers=headers)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["message"]
        assert len(answer.content) < 2000
        assert set(error) == {"message", "type", "param", "code"}
        assert client.get("/health").status_code == 200
    return answer


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"a": ' + b"[" * 100_000,
        b'{"a": ' + b'{"a": ' * 100_000,
        b"1" * 100_000,
        b'{"prompt": "1", "prompt": ',
    ],
    ids=range(13),
)
def test_what_is_no_body(letters: Served, path: str, content: bytes) -> None:
    check(letters, path, content)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "tpot_ms"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"1"', "true", "[]", "1" * 5000, "{}"])
def test_numbers_that_are_none(letters: Served, field: str, value: str) -> None:
    answer = check(letters, "/v1/completions", f'{{"prompt": "1", "{field}": {value}}}'.encode())
    assert answer.json()["error"]["param"] in (field, None)


@pytest.mark.parametrize("field", ["max_tokens", "n", "seed", "top_k", "logprobs", "min_tokens", "priority"])
@pytest.mark.parametrize("value", ["NaN", "1.5", "1e3", '"1"', "true", "9" * 30, "1" * 5000, "-9" + "9" * 30])
def test_integers_that_are_none(letters: Served, field: str, value: str) -> None:
    answer = check(letters, "/v1/completions", f'{{"prompt": "1", "{field}": {value}}}'.encode())
    assert answer.json()["error"]["param"] in (field, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [1, "1"]},
        {"prompt": [[1], "1"]},
        {"prompt": [1.5]},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"prompt": [10**30]},
        {"prompt": [[]]},
        {"prompt": [["1"]]},
        {"prompt": {}},
        {"prompt": None},
        {"prompt": ["1"] * 1025},
        {"prompt": "1" * 100_000},
        {"prompt": [1] * 100_000},
        {"prompt": ["1"] * 20_000},
        {"prompt": [True]},
        {"prompt": "1", "stop": [["a"]]},
        {"prompt": "1", "stop": "a" * 2000},
        {"prompt": "1", "stop_token_ids": [50]},
        {"prompt": "1", "stop_token_ids": [-1]},
        {"prompt": "1", "logit_bias": {"50": 1}},
        {"prompt": "1", "logit_bias": {"-1": 1}},
        {"prompt": "1", "logit_bias": {"\u0661": 1}},
        {"prompt": "1", "logit_bias": {str(i): 1 for i in range(301)}},
        {"prompt": "1", "logit_bias": {"1" * 5000: 1}},
        {"prompt": "1", "logit_bias": []},
        {"prompt": "1", "stream": "yes"},
        {"prompt": "1", "stream_options": []},
        {"prompt": "1", "prompt_cache_key": "k" * 2000},
        {"prompt": "1", "cache_salt": 5},
        {"prompt": "1", "model": 5},
        {"prompt": "1", "ttft_ms": 0},
        {"prompt": "1", "tpot_ms": -5},
        {"prompt": "1", "temperature": 1e-9},
    ],
)
def test_fields_of_completions(letters: Served, fields: dict[str, Any]) -> None:
    check(letters, "/v1/completions", json.dumps(fields).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "hi"},
        {"messages": [{}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": "x"}] * 5000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2000}]},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}],
            "tool_choice": "required",
        },
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}] * 600},
        {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True, "add_generation_prompt": True},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"add_generation_prompt": 1}},
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0},
    ],
)
def test_fields_of_chats(letters: Served, fields: dict[str, Any]) -> None:
    check(letters, "/v1/chat/completions", json.dumps(fields).encode())


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-llm-d-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["", "x", "nan", "inf", "-1", "0", "1e99"])
def test_headers_that_are_no_milliseconds(letters: Served, name: str, value: str) -> None:
    answer = check(letters, "/v1/completions", b'{"prompt": "1"}', JSON | {name: value})
    assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize("sent", ["a b", "x" * 300, "", "\u00e9"])
def test_strange_request_ids_are_replaced(letters: Served, sent: str) -> None:
    with letters.http_client() as client:
        answer = client.get("/health", headers={"x-request-id": sent.encode()})
    assert len(answer.headers["x-request-id"]) == 32


def test_two_requests_may_have_the_same_id(letters: Served) -> None:
    """Retries have."""
    with letters.http_client(headers={"x-request-id": "again"}) as client:
        ids = set()
        for _ in range(3):
            answer = client.post("/v1/completions", json={"prompt": ["1", "2"], "max_tokens": 2})
            assert answer.headers["x-request-id"] == "again"
            ids.add(answer.json()["id"])
    assert len(ids) == 3
    assert all(each.startswith("cmpl-again-") for each in ids)


def test_wrong_methods_and_paths(letters: Served) -> None:
    with letters.http_client() as client:
        for method, path, status in [
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("POST", "/health", 405),
            ("GET", "/v1/completions/", 404),
            ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
            ("GET", "/v1/models/nobody", 404),
            ("GET", f"/v1/models/{NAME}", 200),
        ]:
            answer = client.request(method, path)
            assert answer.status_code == status, (method, path)
            if status >= 400:
                assert answer.json()["error"]["message"]


def test_websockets_are_refused(letters: Served) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "x"}
    with letters.http_client() as client:
        assert client.get("/v1/completions", headers=headers).status_code == 405
