"""Clients that leave, and clients that read slowly: their pages come back, and nobody else waits for them."""

import json
import socket
import threading
from typing import Any

import httpx
import pytest
from fake_device import expected_tokens
from letter_tokenizer import LetterTokenizer
from served import NAME, Served, fake_engine, served

from longctx.serving import SamplingParams
from longctx.serving.server.settings import ServerSettings

TEXT = LetterTokenizer()
PROMPT = "ABCDEFGH"


def post(running: Served, fields: dict[str, Any], buffer: int | None = None) -> socket.socket:
    """Send a request, and read nothing; `buffer`: bytes that the client's side of the connection holds."""
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", running.port))
    body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "temperature": 0} | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + body)
    return connection


def half_closed(running: Served, request: bytes) -> bytes:
    """What comes until the server closes the connection of a client that sends nothing after a request."""
    with socket.create_connection(("127.0.0.1", running.port), 20) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while part := connection.recv(65536):
            received += part
    return received


def steps(running: Served) -> int:
    return running.server.engine.stats().steps


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_in_decode_frees_pages_within_a_step(letters: Served, stream: bool) -> None:
    letters.executor.pause = 0.02
    try:
        with post(letters, {"stream": stream, "prompt": [PROMPT, "12"]}):
            letters.wait_until("both decode", lambda: letters.server.engine.stats().output_tokens and steps(letters))
            letters.wait_until("pages are held", lambda: letters.pages_held() > 0)
            before = steps(letters)
        letters.wait_until("the pages are back", lambda: letters.pages_held() == 0)
        # Besides the step that ran: the news comes through the event loop, and two steps are in flight.
        assert steps(letters) - before <= 4
    finally:
        letters.executor.pause = 0.0


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_in_prefill_frees_pages_within_a_step(letters: Served, stream: bool) -> None:
    letters.executor.go.clear()
    try:
        with post(letters, {"stream": stream, "prompt": "Z" * 200, "max_tokens": 8}):
            letters.wait_until("it is prefilled", lambda: letters.pages_held() > 0)
            before = letters.server.engine.stats().output_tokens
        letters.wait_until("the server knows", lambda: not letters.server.calls)
    finally:
        letters.executor.go.set()
    letters.wait_idle()
    assert letters.server.engine.stats().output_tokens == before


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_the_queue_is_never_admitted(letters: Served, stream: bool) -> None:
    letters.executor.pause = 0.01
    running = [post(letters, {}) for _ in range(6)]  # all slots
    try:
        letters.wait_until("all slots are taken", lambda: letters.server.engine.stats().running == 6)
        with post(letters, {"stream": stream, "prompt": "111"}):
            letters.wait_until("it waits", lambda: letters.server.engine.stats().waiting == 1)
        letters.wait_until("it waits no more", lambda: letters.server.engine.stats().waiting == 0)
        assert letters.server.engine.stats().running == 6
    finally:
        for connection in running:
            connection.close()
        letters.executor.pause = 0.0
    letters.wait_idle()
    assert letters.server.thread.control.num_waiting == 0


def test_a_slow_reader_is_cancelled_and_told_and_holds_nobody_back() -> None:
    settings = ServerSettings(prepare_processes=0, stream_buffer=64)
    with served(fake_engine(max_logprobs=5, num_pages=800), settings) as running:
        slow = post(running, {"stream": True, "logprobs": 5, "prompt": [PROMPT] * 6, "max_tokens": 240}, buffer=4096)
        answer = running.openai().completions.create(
            model=NAME, prompt=PROMPT, max_tokens=32, temperature=0, extra_body={"ignore_eos": True}
        )
        expected = expected_tokens(TEXT.encode(PROMPT), SamplingParams(max_tokens=32, ignore_eos=True))
        assert answer.choices[0].text == TEXT.decode(expected)
        running.wait_until("the slow one is cancelled", lambda: running.pages_held() == 0)
        received = b""
        with slow:
            slow.settimeout(10)
            while b"\r\n0\r\n\r\n" not in received:
                received += slow.recv(65536)
        assert b'"code":"slow_reader"' in received
        assert b"[DONE]" not in received
        running.wait_idle()


def test_a_client_that_takes_nothing_is_left_in_the_end() -> None:
    settings = ServerSettings(prepare_processes=0, stream_buffer=64, slow_reader_timeout=0.5)
    with served(fake_engine(max_logprobs=5, num_pages=800), settings) as running:
        with post(running, {"stream": True, "logprobs": 5, "prompt": [PROMPT] * 6, "max_tokens": 240}, buffer=4096):
            running.wait_until("it is cancelled", lambda: steps(running) and not running.pages_held())
            running.wait_until("the connection is closed", lambda: not running.http.server_state.connections)
        running.wait_idle()


def test_an_aborted_request_ends_with_what_there_is(letters: Served) -> None:
    letters.executor.pause = 0.01
    answers: list[httpx.Response] = []
    try:
        with letters.http_client() as client, letters.http_client(headers={"x-request-id": "mine"}) as other:
            body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
            waiting = threading.Thread(target=lambda: answers.append(other.post("/v1/completions", json=body)))
            waiting.start()
            letters.wait_until("it runs", lambda: letters.pages_held() > 0)
            aborted = client.post("/abort_requests", json={"request_ids": ["other", "mine"]})
            assert aborted.json() == {"aborted": ["mine"]}
            waiting.join(10)
            assert client.post("/abort_requests", json={"request_ids": ["mine"]}).json() == {"aborted": []}
    finally:
        letters.executor.pause = 0.0
    (answer,) = answers
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
def test_who_sends_nothing_more_gets_the_answer(letters: Served, stream: bool) -> None:
    letters.executor.pause = 0.01
    fields = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": stream}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    try:
        received = half_closed(letters, f"{head}\r\n\r\n".encode() + body)
    finally:
        letters.executor.pause = 0.0
    expected = TEXT.decode(expected_tokens(TEXT.encode(PROMPT), SamplingParams(max_tokens=40, ignore_eos=True)))
    if stream:
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert json.loads(received.rpartition(b"\r\n\r\n")[2])["choices"][0]["text"] == expected
    letters.wait_until("the connection is closed", lambda: not letters.http.server_state.connections)


def test_who_sends_nothing_more_gets_quick_answers_and_none_to_half_a_request(letters: Served) -> None:
    assert half_closed(letters, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").endswith(b'{"status":"ok"}')
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    assert half_closed(letters, head + b"{") == b""
    assert half_closed(letters, b"GET /health HTTP/1.1\r\n") == b""


@pytest.mark.parametrize("stream", [False, True])
def test_who_sends_nothing_more_and_leaves_later_frees_pages(letters: Served, stream: bool) -> None:
    letters.executor.pause = 0.02
    try:
        with post(letters, {"stream": stream}) as connection:
            connection.shutdown(socket.SHUT_WR)
            letters.wait_until("pages are held", lambda: letters.pages_held() > 0)
            before = steps(letters)
            letters.wait_until("it goes on", lambda: steps(letters) > before + 3)
        letters.wait_until("the pages are back", lambda: letters.pages_held() == 0, 3)
    finally:
        letters.executor.pause = 0.0
