"""A server's life: warming up, ready, failing, draining; and what it says of itself."""

import contextlib
import io
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fake_device import LENGTH, expected_tokens
from letter_tokenizer import LetterTokenizer
from served import NAME, Served, fake_engine, served

from longctx.serving import Engine, SamplingParams
from longctx.serving.config import AdmissionLimits
from longctx.serving.server import preparer
from longctx.serving.server.preparer import LONG_BYTES, SHORT_BYTES
from longctx.serving.server.request_parser import parse_body
from longctx.serving.server.settings import ObserverSettings, ServerSettings

TEXT = LetterTokenizer()
BODY = {"prompt": "ABCD", "max_tokens": 6, "ignore_eos": True, "temperature": 0}
ANSWER = TEXT.decode(expected_tokens(TEXT.encode("ABCD"), SamplingParams(max_tokens=6, ignore_eos=True)))
ENDLESS = BODY | {"max_tokens": 200}


def status(client: httpx.Client, path: str) -> int:
    return client.get(path).status_code


def test_a_server_listens_before_it_is_warm() -> None:
    go = threading.Event()

    def warm_up(engine: Engine) -> None:
        assert go.wait(20)
        engine.warm_up()

    with served(fake_engine(), is_ready=False, warm_up=warm_up) as running, running.http_client() as client:
        assert [status(client, path) for path in ("/health", "/ready", "/ping", "/v1/models")] == [200, 503, 200, 200]
        refused = client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_is_overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 1000
        go.set()
        running.wait_until("it is ready", lambda: status(client, "/ready") == 200)
        assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == ANSWER


def test_an_engine_that_can_t_be_started_is_not_healthy() -> None:
    def warm_up(engine: Engine) -> None:
        raise MemoryError("no room")

    with served(fake_engine(), is_ready=False, warm_up=warm_up) as running, running.http_client() as client:
        running.wait_until("it is not healthy", lambda: status(client, "/health") == 503)
        assert status(client, "/ready") == 503
        assert client.post("/v1/completions", json=BODY).status_code == 500
        assert running.server.has_failed


def test_health_answers_while_a_step_runs_until_it_takes_too_long(letters: Served) -> None:
    settings = ServerSettings(prepare_processes=0, stall_timeout=0.3)
    with served(fake_engine(), settings) as running, running.http_client() as client:
        running.executor.go.clear()
        try:
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(lambda: httpx.post(f"{running.url}/v1/completions", json=BODY, timeout=20))
                running.wait_until("a step runs", lambda: running.server.thread.stalled_seconds > 0)
                assert status(client, "/health") == 200
                running.wait_until("it takes too long", lambda: status(client, "/health") == 503)
                assert "a step" in client.get("/health").json()["status"]
                running.executor.go.set()
                assert answer.result().json()["choices"][0]["text"] == ANSWER
            assert status(client, "/health") == 200
        finally:
            running.executor.go.set()


def test_a_failing_engine_tells_everybody() -> None:
    """Who streams, who waits, who is in the queue, and who comes later; and /health."""
    with served(fake_engine()) as running, running.http_client() as client, ThreadPoolExecutor(10) as pool:
        running.executor.pause = 0.005

        def ask(body: dict[str, Any]) -> httpx.Response:
            return httpx.post(f"{running.url}/v1/completions", json=body, timeout=20)

        answers = [pool.submit(ask, ENDLESS | {"stream": i % 2 == 0}) for i in range(10)]
        running.wait_until("all are there", lambda: len(running.server.calls) == 10)
        running.wait_until("some run and some wait", lambda: running.server.engine.stats().waiting == 4)
        running.executor.fail = True
        for i, answer in enumerate(answers):
            response = answer.result(20)
            assert response.status_code == (200 if i % 2 == 0 else 500)
            assert "a device is lost" in response.text
            assert "engine_error" in response.text
            assert "[DONE]" not in response.text
        assert status(client, "/health") == status(client, "/ready") == 503
        assert ask(BODY).status_code == 500
        assert ask(BODY | {"stream": True}).status_code == 500
        assert status(client, "/v1/models") == status(client, "/metrics") == 200
        assert running.server.has_failed
        assert not running.server.calls


def test_the_client_raises_when_a_stream_breaks() -> None:
    with served(fake_engine()) as running:
        running.executor.pause = 0.005
        stream = running.openai().completions.create(
            model=NAME, prompt="AB", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        running.executor.fail = True
        with pytest.raises(openai.APIError, match="a device is lost"):
            list(stream)


def drain(running: Served) -> None:
    running.http_loop().call_soon_threadsafe(running.http.begin_shutdown)


def test_draining_lets_running_requests_finish_and_answers_probes() -> None:
    with served(fake_engine()) as running, running.http_client() as client, ThreadPoolExecutor(2) as pool:
        running.executor.pause = 0.01
        whole = pool.submit(
            lambda: httpx.post(f"{running.url}/v1/completions", json=BODY | {"max_tokens": 60}, timeout=20)
        )
        streamed = pool.submit(
            lambda: httpx.post(
                f"{running.url}/v1/completions", json=BODY | {"max_tokens": 60, "stream": True}, timeout=20
            )
        )
        running.wait_until("both run", lambda: running.server.engine.stats().running == 2)
        drain(running)
        running.wait_until("it drains", lambda: running.server.is_draining)
        assert [status(client, path) for path in ("/health", "/ready", "/metrics")] == [200, 503, 200]
        refused = httpx.post(f"{running.url}/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert refused.headers["x-llm-d-request-dropped-reason"] == "draining"
        assert whole.result().json()["usage"]["completion_tokens"] == 60
        assert streamed.result().text.endswith("data: [DONE]\n\n")
        running.thread.join(10)
        assert not running.thread.is_alive()


def test_what_takes_longer_than_the_shutdown_may_is_cancelled() -> None:
    settings = ServerSettings(prepare_processes=0, shutdown_timeout=0.3)
    with served(fake_engine(), settings) as running, ThreadPoolExecutor(1) as pool:
        running.executor.pause = 0.05
        answer = pool.submit(lambda: httpx.post(f"{running.url}/v1/completions", json=ENDLESS, timeout=20))
        running.wait_until("it runs", lambda: running.server.engine.stats().running == 1)
        drain(running)
        choice = answer.result().json()["choices"][0]
        assert choice["finish_reason"] == "abort"
        running.thread.join(10)
        assert not running.thread.is_alive()


@pytest.fixture
def crowded() -> Iterator[Served]:
    with served(fake_engine(max_running=1), limits=AdmissionLimits(max_waiting=2)) as running:
        yield running


def test_who_finds_the_queue_full_is_told_when_to_come_again(crowded: Served) -> None:
    crowded.executor.pause = 0.1
    with ThreadPoolExecutor(3) as pool, crowded.http_client() as client:
        body = ENDLESS | {"max_tokens": 60}

        def post() -> Future[httpx.Response]:
            return pool.submit(lambda: httpx.post(f"{crowded.url}/v1/completions", json=body, timeout=20))

        posts = [post()]
        crowded.wait_until("one runs", lambda: crowded.pages_held() and not crowded.server.thread.control.num_waiting)
        posts += [post(), post()]
        crowded.wait_until("the queue is full", lambda: crowded.server.engine.stats().waiting == 2)
        refused = client.post("/v1/completions", json=BODY)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "slow_down"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["x-llm-d-request-dropped-reason"] == "queue"
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 1
        with pytest.raises(openai.RateLimitError):
            crowded.openai().completions.create(model=NAME, prompt="1")
        # Of several prompts none is begun if one is refused.
        assert client.post("/v1/completions", json=BODY | {"prompt": ["1", "2"]}).status_code == 429
        assert crowded.server.thread.control.num_waiting == 2
        crowded.executor.pause = 0
        assert [post.result().status_code for post in posts] == [200] * 3
    crowded.wait_idle()


def test_prompts_are_in_the_log_only_if_asked_for() -> None:
    for shows in (False, True):
        observers, stream = ObserverSettings(log_format="json", log_prompts=shows), io.StringIO()
        with (
            contextlib.redirect_stderr(stream),
            served(fake_engine(), observers=observers) as running,
            running.http_client() as client,
        ):
            assert client.post("/v1/completions", json=BODY | {"prompt": [4, 5, 6]}).status_code == 200
        (line,) = [line for line in map(json.loads, stream.getvalue().splitlines()) if line["message"] == "request"]
        assert line.get("prompt") == ([4, 5, 6] if shows else None)
        assert ("answers" in line) == shows


def test_more_completions_than_may_wait_are_no_overload(crowded: Served) -> None:
    with crowded.http_client() as client:
        answer = client.post("/v1/completions", json=BODY | {"prompt": ["1", "2", "3"]})
        assert answer.status_code == 400
        assert "ask for 3 completions, and 2 may wait" in answer.json()["error"]["message"]
        assert crowded.server.engine.stats().prompt_tokens == 0


def test_choices_are_bounded_though_copies_cost_the_engine_nothing() -> None:
    with served(fake_engine()) as running, running.http_client() as client:
        most = running.server.engine.config.max_running
        answer = client.post("/v1/completions", json=BODY | {"n": most})
        assert [choice["text"] for choice in answer.json()["choices"]] == [ANSWER] * most
        answer = client.post("/v1/completions", json=BODY | {"n": most + 1})
        assert answer.status_code == 400
        assert f"n must be at most max_running={most}, got {most + 1}" in answer.json()["error"]["message"]


def test_large_answers_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longctx.serving.server.routes.openai._LARGE", 1)
    with served(fake_engine()) as running, running.http_client() as client:
        assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == ANSWER


def test_slos_and_priorities_reach_the_engine_within_their_limits() -> None:
    settings = ServerSettings(prepare_processes=0, max_priority=3, min_tpot=0.05)
    with served(fake_engine(), settings) as running, running.http_client() as client:

        def rendered(fields: dict[str, Any], headers: dict[str, str]) -> list[Any]:
            answer = client.post("/v1/completions/render", json=BODY | fields, headers=headers).json()[0]
            return [answer[name] for name in ("ttft_deadline", "tpot_target", "priority")]

        assert rendered({}, {}) == [None, None, 0]
        assert rendered({"ttft_ms": 500, "tpot_ms": 80, "priority": 2}, {}) == [0.5, 0.08, 2]
        assert rendered({"tpot_ms": 1, "priority": 99}, {}) == [None, 0.05, 3]
        less = client.post("/v1/completions/render", json=BODY | {"priority": -5})
        assert (less.status_code, less.json()["error"]["param"]) == (400, "priority")
        assert rendered({"priority": -1}, {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "100"}) == [0.25, 0.1, -1]
        assert rendered({"ttft_ms": 1}, {"x-llm-d-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "9"}) == [0.25, 0.05, 0]
    with served(fake_engine()) as running, running.http_client() as client:
        answer = client.post("/v1/completions/render", json=BODY | {"tpot_ms": 1, "priority": 9}).json()[0]
        assert (answer["tpot_target"], answer["priority"]) == (running.server.engine.config.slo.tpot, 0)


def test_long_prompts_are_read_in_a_process_and_answered_alike() -> None:
    """What the process refuses is refused in the same form."""
    before = {*multiprocessing.active_children()}
    with served(fake_engine(), ServerSettings(prepare_processes=1)) as running, running.http_client() as client:
        padded = BODY | {"user": "x" * LONG_BYTES}
        assert client.post("/v1/completions", json=padded).json()["choices"][0]["text"] == ANSWER
        assert client.post("/v1/completions", json=padded | {"stream": True}).text.endswith("data: [DONE]\n\n")
        refused = client.post("/v1/completions", json=padded | {"max_tokens": 10**6})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        missing = client.post("/v1/completions", json=padded | {"model": "other"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert client.post("/tokenize", json={"prompt": "12", "padding": "x" * LONG_BYTES}).json()["count"] == 2
        # A process that is killed costs the requests that it reads, and no other.
        (child,) = {*multiprocessing.active_children()} - before
        child.kill()
        running.wait_until(
            "another one reads", lambda: client.post("/v1/completions", json=padded).status_code == 200, 30
        )
        running.wait_idle()


def test_it_says_what_it_serves(letters: Served) -> None:
    with letters.http_client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["owned_by"], model["max_model_len"]) == (NAME, "longctx", LENGTH)
        assert letters.openai().models.retrieve(NAME).id == NAME
        assert client.get("/version").json()["version"]
        for path in ("/server_info", "/get_server_info"):
            assert client.get(path).json()["max_total_num_tokens"] == 1600
        for path in ("/model_info", "/get_model_info"):
            assert client.get(path).json()["is_generation"] is True
        assert client.get("/v1/caches").json() == {"object": "list", "data": []}
        for method in ("GET", "HEAD"):
            for path in ("/health", "/ready", "/ping", "/metrics"):
                assert client.request(method, path).status_code == 200
        assert client.post("/ping").status_code == 200


def test_loads_are_those_of_the_engine(letters: Served) -> None:
    letters.executor.pause = 0.005
    try:
        with letters.http_client() as client, ThreadPoolExecutor(8) as pool:
            posts = [
                pool.submit(
                    lambda: httpx.post(f"{letters.url}/v1/completions", json=ENDLESS | {"max_tokens": 100}, timeout=20)
                )
                for _ in range(8)
            ]
            letters.wait_until("some wait", lambda: letters.server.thread.load.waiting == 2)
            load = client.get("/load").json()
            assert (load["server_load"], load["num_running_reqs"], load["num_waiting_reqs"]) == (8, 6, 2)
            assert load["num_used_tokens"] > 0
            assert client.get("/get_load").json()[0]["num_reqs"] == 8
            for path in ("/loads", "/v1/loads?include=core"):
                assert client.get(path).json()["loads"][0]["num_waiting_reqs"] == 2
            assert all(post.result().status_code == 200 for post in posts)
    finally:
        letters.executor.pause = 0.0


def test_tokens_and_texts(letters: Served) -> None:
    with letters.http_client() as client:
        tokens = client.post("/tokenize", json={"prompt": "AB1", "return_token_strs": True}).json()
        assert tokens == {"count": 3, "max_model_len": LENGTH, "tokens": [17, 18, 1], "token_strs": ["A", "B", "1"]}
        assert client.post("/detokenize", json={"tokens": [17, 18, 1]}).json() == {"prompt": "AB1"}
        for body in ({}, {"prompt": "1", "messages": [{"role": "user", "content": "1"}]}):
            assert client.post("/tokenize", json=body).status_code == 400
        assert client.post("/detokenize", json={"tokens": [50]}).status_code == 400
        info = client.get("/tokenizer_info").json()
        assert info == client.get("/tokenizer_info").json()
        assert (info["vocab_size"], info["model_max_length"], info["eos_token"]) == (TEXT.vocab_size, LENGTH, None)
        rendered = client.post("/v1/completions/render", json=BODY | {"prompt": ["AB", "1"]}).json()
        assert [each["token_ids"] for each in rendered] == [[17, 18], [1]]


def test_traces_go_where_the_server_was_told(tmp_path: Any) -> None:
    settings = ServerSettings(prepare_processes=0, profile_dir=tmp_path)
    with served(fake_engine(), settings) as running, running.http_client(timeout=60) as client:
        assert client.post("/stop_profile").status_code == 409
        assert client.post("/start_profile", json={"output_dir": "/elsewhere"}).json() == {"status": "started"}
        assert client.post("/start_profile").status_code == 409
        assert client.post("/stop_profile").json() == {"status": "stopped"}
        assert client.post("/stop_profile").status_code == 409
    assert any(tmp_path.rglob("*.pb"))


def test_pings_keep_a_silent_stream_open() -> None:
    settings = ServerSettings(prepare_processes=0, ping_interval=0.05)
    with served(fake_engine(), settings) as running:
        running.executor.go.clear()
        with (
            running.http_client() as client,
            client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer,
        ):
            lines = answer.iter_lines()
            assert next(lines).startswith(": ping")
            time.sleep(0.1)
            running.executor.go.set()
            assert [line for line in lines if line.startswith("data")][-1] == "data: [DONE]"


def test_asyncio_is_not_blocked_by_what_is_prepared(letters: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """While more prompts are read than there are threads, probes and short calls are answered."""
    go, held, begun = threading.Event(), 8, list[bytes]()

    def read_when_told(reader: Any, kind: Any, body: bytes, origin: Any) -> Any:
        if len(body) > SHORT_BYTES:
            begun.append(body)
            assert go.wait(60)
        return parse_body(reader, kind, body, origin)

    monkeypatch.setattr(preparer, "parse_body", read_when_told)
    with ThreadPoolExecutor(held) as pool, letters.http_client() as client:
        padded = BODY | {"user": "x" * SHORT_BYTES}
        url = f"{letters.url}/v1/completions"
        try:
            calls = [pool.submit(lambda: httpx.post(url, json=padded, timeout=60)) for _ in range(held)]
            letters.wait_until("all threads read", lambda: len(begun) >= held // 2)
            for _ in range(20):
                assert status(client, "/health") == 200
                assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == ANSWER
            assert not any(call.done() for call in calls)
        finally:
            go.set()
        assert [call.result().json()["choices"][0]["text"] for call in calls] == [ANSWER] * held
