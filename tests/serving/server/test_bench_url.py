"""`longctx bench --url`: our server, and foreign ones that stream otherwise, fail in the middle or say less."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from fake_device import VOCAB
from served import NAME, Served

from longctx.cli import main
from longctx.simulation.http_replay import read_events

MIX = ["--requests", "6", "--prompt-tokens", "20:40", "--output-tokens", "5"]


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary of letters is smaller than any other."""
    monkeypatch.setattr("longctx.simulation.http_replay.PROMPT_TOKENS", VOCAB)


def bench(url: str, *more: str) -> int:
    return main(["bench", "-q", "--url", url, *more])


def results(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def events(*values: Any, end: bytes = b"\n\n") -> bytes:
    return b"".join(b"data: " + json.dumps(value).encode() + end for value in values)


def chunk(text: str = "x", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None} | more]}


LAST = chunk("", finish_reason="length")
USAGE = {"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 3, "total_tokens": 33}}
DONE = b"data: [DONE]\n\n"


class Foreign(ThreadingHTTPServer):
    """A server of another kind, whose answers a test writes.

    Attributes:
      bodies: of the requests, with the times when they came.
    """

    daemon_threads = True

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler, int], None]) -> None:
        self.bodies: list[tuple[float, dict[str, Any], str | None]] = []
        foreign = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                body = json.dumps({"object": "list", "data": [{"id": "theirs"}]}).encode()
                self.send_response(200 if self.path == "/v1/models" else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                foreign.bodies.append((time.monotonic(), body, self.headers.get("authorization")))
                self.close_connection = True
                answer(self, len(foreign.bodies))

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def foreign(answer: Callable[[BaseHTTPRequestHandler, int], None]) -> Iterator[Foreign]:
    with Foreign(answer) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def stream(handler: BaseHTTPRequestHandler, *parts: bytes, kind: str = "text/event-stream; charset=utf-8") -> None:
    handler.send_response(200)
    handler.send_header("content-type", kind)
    handler.send_header("connection", "close")
    handler.end_headers()
    for part in parts:
        handler.wfile.write(part)
        handler.wfile.flush()
        time.sleep(0.005)


def test_our_server_is_measured(letters: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    assert bench(f"{letters.url}/v1", *MIX, "--shared-prefix", "8", "--rate", "200", "--json", str(path)) == 0
    printed = capsys.readouterr().out
    for figure in ("TTFT", "TPOT", "end to end", "output tokens/s", "found in the cache"):
        assert figure in printed
    found = results(path)
    summary = found["summary"]
    assert (found["model"], found["url"]) == (NAME, f"{letters.url}/v1")
    assert (summary["requests"], summary["failed"], summary["errors"]) == (6, 0, {})
    assert summary["output_tokens"] == 30
    assert 28 * 6 <= summary["prompt_tokens"] <= 48 * 6
    # The first prompts may run side by side; the last one comes when some are done.
    assert summary["cached_tokens"] >= 8
    assert summary["without_usage"] == summary["without_cached"] == 0
    assert 0 < summary["ttft"]["p50"] <= summary["e2e"]["p50"]
    assert len({request["due"] for request in found["requests"]}) == 6


def test_users_wait_for_answers(letters: Served, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert bench(letters.url, *MIX, "--users", "2", "--json", str(path)) == 0
    found = results(path)
    assert max(found["timeline"]["running"]) <= 2
    assert found["summary"]["requests"] == 6


def test_agents_are_sent(letters: Served, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    session = {"id": "a", "block_size": 16, "requests": []}
    for at in range(3):
        turn = {"t": 0.02 * at, "in": 40 + 16 * at, "out": 2, "hash_ids": list(range(3 + at)), "api_time": 0.01}
        session["requests"].append(turn)  # type: ignore[attr-defined]
    (tmp_path / "trace.json").write_text(json.dumps(session))
    assert bench(letters.url, "--workload", str(tmp_path / "trace.json"), "--seed", "5", "--json", str(path)) == 0
    requests = sorted(results(path)["requests"], key=lambda request: request["number"])
    assert [request["prompt_tokens"] for request in requests] == [40, 56, 72]
    assert [request["cached_tokens"] for request in requests] == [0, 40, 56]  # whole pages of the turn before


def test_odd_pieces_comments_and_no_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(handler: BaseHTTPRequestHandler, number: int) -> None:
        whole = b": keep-alive\r\n\r\nevent: message\r\nretry: 3\r\n" + events(
            chunk("caf\u00e9"), chunk(), end=b"\r\n\r\n"
        )
        whole += b":\n\n" + b'data:{"choices":[{"index":0,"text":"z",\ndata:"finish_reason":"length"}]}\n\n'
        if number % 2:
            whole += DONE
        stream(handler, *(whole[at : at + 7] for at in range(0, len(whole), 7)))

    path = tmp_path / "found.json"
    with foreign(answer) as server:
        assert bench(server.url, *MIX, "--api-key", "secret", "--json", str(path)) == 0
        assert {key for _, _, key in server.bodies} == {"Bearer secret"}
        assert {body["model"] for _, body, _ in server.bodies} == {"theirs"}
    summary = results(path)["summary"]
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (6, 0, 18)
    assert summary["without_usage"] == summary["without_cached"] == 6
    assert "6 answers, whose tokens are counted by chunks" in capsys.readouterr().out


def test_errors_are_counted_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(handler: BaseHTTPRequestHandler, number: int) -> None:
        match number:
            case 1:
                body = b'{"error": {"message": "slow down"}}'
                handler.send_response(429)
                handler.send_header("content-length", str(len(body)))
                handler.end_headers()
                handler.wfile.write(body)
            case 2:
                stream(handler, events(chunk()), events({"error": {"message": "m", "code": "engine_error"}}))
            case 3:
                stream(handler, events(chunk()))
            case 4:
                stream(handler, events(LAST), DONE)
            case 5:
                stream(handler, b"data: {not json}\n\n")
            case 6:
                stream(handler, b"{}", kind="application/json")
            case 7:
                handler.connection.close()
            case 8:
                stream(handler, events({"choices": ["x"]}))
            case _:
                stream(handler, events(chunk(), chunk(), chunk(), LAST, USAGE), DONE)

    path = tmp_path / "found.json"
    with foreign(answer) as server:
        more = ["--requests", "9", "--users", "1", "--model", "other", "--json", str(path)]
        assert bench(server.url, *more) == 1
        # One user: what follows a request that failed is not sent.
        assert len(server.bodies) == 1
        assert results(path)["summary"]["not_sent"] == 8
        del server.bodies[:]
        assert bench(server.url, "--requests", "10", "--rate", "20", "--model", "other", "--json", str(path)) == 1
        assert {body["model"] for _, body, _ in server.bodies} == {"other"}
    summary = results(path)["summary"]
    errors = summary["errors"]
    broken = [kind for kind in errors if kind.startswith("a broken connection")]
    assert len(broken) == 1
    del errors[broken[0]]
    assert errors == {
        "status 429": 1,
        "an error in the stream: engine_error": 1,
        "a stream that ends before the answer": 1,
        "an answer without tokens": 1,
        "an event that is no JSON": 1,
        "an answer that is no stream of events": 1,
        "an event whose choices are no objects": 1,
    }
    assert (summary["requests"], summary["failed"]) == (2, 8)
    assert (summary["output_tokens"], summary["prompt_tokens"]) == (6, 60)
    assert (summary["without_usage"], summary["without_cached"]) == (0, 2)
    printed = capsys.readouterr()
    assert "failed: 8 of 10 requests" in printed.err
    assert 'first error      {"error": {"message": "slow down"}}' in printed.out


def test_an_open_loop_does_not_wait(tmp_path: Path) -> None:
    def answer(handler: BaseHTTPRequestHandler, number: int) -> None:
        stream(handler, events(chunk()))
        time.sleep(0.5)
        handler.wfile.write(events(LAST))

    path = tmp_path / "found.json"
    with foreign(answer) as server:
        assert bench(server.url, "--requests", "5", "--rate", "inf", "--json", str(path)) == 0
        times = [at for at, _, _ in server.bodies]
    assert max(times) - min(times) < 0.5
    assert max(results(path)["timeline"]["running"]) == 4  # when the first of five has ended


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--num-pages", "64"], "--num-pages contradicts --url"),
        (["--context", "2"], "--context contradicts --url"),
        (["--profile", __file__], "--profile contradicts --url"),
        (["--users", "2", "--rate", "3"], "--rate contradicts --users"),
        (["--agents", "2", "--requests", "3"], "--requests contradicts --agents"),
    ],
)
def test_flags_of_engines_are_refused(flags: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("http://127.0.0.1:1", *flags) == 2
    assert match in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("http://127.0.0.1:1") == 2
    assert "--url: http://127.0.0.1:1/v1/models does not list a model" in capsys.readouterr().err
    assert bench("ftp://127.0.0.1") == 2
    assert main(["bench", "--api-key", "x"]) == 2
    assert "--api-key needs --url" in capsys.readouterr().err


def test_events_do_not_depend_on_pieces() -> None:
    whole = b': c\r\n\r\ndata: {"a": 1}\n\nid: 3\ndata:x\ndata: y\r\n\r\ndata: [DONE]'

    async def parts(size: int) -> AsyncIterator[bytes]:
        for at in range(0, len(whole), size):
            yield whole[at : at + size]

    async def found(size: int) -> list[bytes]:
        return [data async for data in read_events(parts(size))]

    for size in (1, 2, 3, 5, 100):
        assert asyncio.run(found(size)) == [b'{"a": 1}', b"x\ny", b"[DONE]"]
