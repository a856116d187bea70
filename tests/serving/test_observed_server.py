"""`longctx serve` as others watch it: metrics by vLLM's names, KV events over sockets, a log of requests."""

import json
import urllib.error
import urllib.request
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from serve_process import ServeProcess, free_port

FLAGS = ("--max-running", "8", "--token-budget", "64", "--max-length", "512", "--page-size", "16", "--no-compile-cache")
PROMPT = "A long enough text to fill some pages of the cache, which is then found again. " * 2


def get(url: str, method: str = "GET", body: dict | None = None) -> tuple[Any, bytes]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-request-id": "mine"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=60) as answer:
        return answer.headers, answer.read()


def ask(server: ServeProcess, **fields: Any) -> dict:
    body = {"model": "longctx-tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | fields
    return json.loads(get(server.url + "/v1/completions", "POST", body)[1])


def value(text: bytes, name: str, **labels: str) -> float:
    (found,) = [
        sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found


@pytest.mark.slow
def test_a_server_is_watched_from_outside() -> None:
    events = f"tcp://127.0.0.1:{free_port()}"
    flags = (*FLAGS, "--metrics-prefix", "vllm", "--log-format", "json", "--kv-events", events)
    topic = "kv@pod@longctx-tiny"
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
        ServeProcess(*flags, "--kv-events-topic", topic) as server,
    ):
        socket.setsockopt(zmq.SUBSCRIBE, b"kv@pod")
        socket.rcvtimeo, socket.linger = 20_000, 0
        socket.connect(events)
        answers = [ask(server) for _ in range(2)]
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
        cached = answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(server, max_tokens=100_000)
        with refused.value as error:
            assert error.code == 400
        first, number, payload = socket.recv_multipart()
        assert (first.decode(), int.from_bytes(number, "big")) == (topic, 0)
        _, (stored, *_), rank = msgspec.msgpack.decode(payload)
        assert (stored["type"], stored["block_size"], rank) == ("BlockStored", 16, 0)
        headers, text = get(server.url + "/metrics")
        while value(text, "vllm:request_success_total", finished_reason="length") < 2:
            headers, text = get(server.url + "/metrics")
        assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert value(text, "vllm:prefix_cache_hits_total") == cached
        assert value(text, "vllm:generation_tokens_total") == 8
        assert value(text, "vllm:num_requests_running") == value(text, "vllm:num_requests_waiting") == 0
        assert value(text, "vllm:cache_config_info", block_size="16") == 1
        assert value(text, "vllm:time_to_first_token_seconds_count", model_name="longctx-tiny") == 2
        assert get(server.url + "/metrics", "HEAD")[1] == b""
        lines = [json.loads(line) for line in server.log.splitlines() if '"longctx.requests"' in line]
        assert "A long enough text" not in server.log
    assert len(lines) == 2
    assert all(line["id"].startswith("mine") and line["reason"] == "length" for line in lines)
    assert lines[1]["cached_tokens"] == cached
