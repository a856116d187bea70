"""Requests that move from one server to another of another plan, while their clients read."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from disaggregated import make_transfers
from hypothesis import given
from hypothesis import strategies as st
from served import Served, fake_engine, served

from longctx.models import load_checkpoint, load_tokenizer
from longctx.models.builtin import TINY
from longctx.serving import Engine, EngineConfig, ParallelPlan
from longctx.serving.server.relay import split_lines
from longctx.serving.server.settings import ApiKey, ServerSettings

NAME = "tiny"
TEXT = "The pass key of lemon is 5312. " * 8
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7, "n": 2, "logprobs": 2},
    {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2}},
    {"logit_bias": {"17": 3.0}, "stop": ["zq"]},
]


def make_engine(plan: ParallelPlan | None = None, **options: Any) -> Engine:
    model, params = load_checkpoint(TINY)
    config = EngineConfig(
        **{
            "max_length": 1024,
            "num_pages": 256,
            "page_size": 16,
            "max_running": 8,
            "token_budget": 64,
            "buckets": (64,),
            "max_logprobs": 5,
            "hash_key": bytes(16),
            "transfers": True,
        }
        | options
    )
    return Engine(model, params, config, tokenizer=load_tokenizer(TINY), plan=plan)


@pytest.fixture(scope="module")
def source() -> Iterator[Served]:
    settings = ServerSettings(prepare_processes=0)
    engine = make_engine(ParallelPlan(stage=2))
    with served(engine, settings, names=(NAME,), make_transfers=make_transfers) as running:
        yield running


@pytest.fixture(scope="module")
def target() -> Iterator[Served]:
    settings = ServerSettings(prepare_processes=0, ping_interval=0.2)
    engine = make_engine(ParallelPlan(tensor=2))
    with served(engine, settings, names=("another-name",), make_transfers=make_transfers) as running:
        yield running


def migrate(source: Served, to: str, **fields: Any) -> Any:
    with source.http_client() as client:
        return client.post("/migrate", json={"to": to, "drain": False} | fields).json()


def ask(server: Served, max_tokens: int = 60, **options: Any) -> Any:
    extra = {"ignore_eos": True} | options.pop("extra_body", {})
    given = {"model": NAME, "prompt": TEXT, "max_tokens": max_tokens, "temperature": 0} | options
    return server.openai().completions.create(extra_body=extra, **given)


def texts(answer: Any, on_first: Any = None) -> "Texts":
    """Text, reason and log probabilities of each choice of a stream or of an answer."""
    found: Texts = {}
    for chunk in [answer] if hasattr(answer, "choices") else answer:
        for choice in chunk.choices:
            text, reason, logprobs = found.get(choice.index, ("", "", []))
            more = [] if choice.logprobs is None else choice.logprobs.token_logprobs
            found[choice.index] = text + choice.text, choice.finish_reason or reason, logprobs + more
        if on_first is not None and found and all(len(text) > 3 for text, *_ in found.values()):
            on_first()
            on_first = None
    return found


def assert_same(
    found: dict[int, tuple[str, str, list[float]]], expected: dict[int, tuple[str, str, list[float]]]
) -> None:
    assert found.keys() == expected.keys()
    for index, (text, reason, logprobs) in expected.items():
        assert found[index][:2] == (text, reason)
        assert found[index][2] == pytest.approx(logprobs, abs=1e-4)


def test_streams_go_on_with_the_same_tokens(source: Served, target: Served) -> None:
    expected = [texts(ask(source, prompt=f"{i} {TEXT}", **options)) for i, options in enumerate(OPTIONS)]
    begun = threading.Barrier(len(OPTIONS) + 1, timeout=60)

    def stream(number: int, options: dict[str, Any]) -> Any:
        return texts(ask(source, stream=True, prompt=f"{number} {TEXT}", **options), begun.wait)

    before = target.server.engine.stats().output_tokens
    with ThreadPoolExecutor(len(OPTIONS) + 1) as pool:
        whole = pool.submit(lambda: texts(ask(source, prompt=f"1 {TEXT}", **OPTIONS[1])))
        streams = [pool.submit(stream, i, options) for i, options in enumerate(OPTIONS)]
        begun.wait()
        moved = migrate(source, target.url)
        assert len(moved["moved"]) >= 4, moved
        for future, there in zip([*streams, whole], [*expected, expected[1]], strict=True):
            assert_same(future.result(60), there)
    assert target.server.engine.stats().output_tokens > before
    stats = target.server.transfers.receiver.stats  # type: ignore[union-attr]
    assert stats.bytes > 0
    assert stats.outcomes["complete"] >= len(OPTIONS), stats.outcomes
    source.wait_idle()
    target.wait_idle()
    source.wait_until("no lease is left", lambda: not len(source.server.engine.core.leases))


@pytest.mark.slow
def test_a_stream_goes_on_over_context_ranks(source: Served) -> None:
    """From 2x1x1 to 1x2x2, whose programs are compiled when they are needed."""
    expected = texts(ask(source, 200, **OPTIONS[1]))
    engine, settings = make_engine(ParallelPlan(context=2, tensor=2)), ServerSettings(prepare_processes=0)
    with served(engine, settings, make_transfers=make_transfers, warm_up=lambda engine: None) as other:

        def move() -> None:
            assert migrate(source, other.url)["moved"]

        assert_same(texts(ask(source, 200, stream=True, **OPTIONS[1]), move), expected)
        assert other.server.engine.stats().output_tokens > 0


def test_a_request_that_can_not_move_goes_on(source: Served, target: Served) -> None:
    expected = texts(ask(source, **OPTIONS[1]))
    addresses = ["http://127.0.0.1:9", f"{target.url}/nothing", source.url]

    def move() -> None:
        for address in addresses:
            answer = migrate(source, address, drain=address != source.url)
            assert (answer["moved"], len(answer["kept"]), answer["draining"]) == ([], 1, False), answer

    assert_same(texts(ask(source, stream=True, **OPTIONS[1]), move), expected)
    source.wait_idle()


def test_a_server_of_another_model_or_a_full_one_is_left_alone(source: Served) -> None:
    expected = texts(ask(source))
    engine = make_engine(page_size=8)  # its pages are of another kind
    with served(engine, ServerSettings(prepare_processes=0), names=(NAME,), make_transfers=make_transfers) as other:

        def move() -> None:
            assert "of another" in next(iter(migrate(source, other.url)["kept"].values()))

        assert_same(texts(ask(source, stream=True), move), expected)
        assert other.server.engine.stats().output_tokens == 0


def test_a_server_that_dies_gives_the_request_back(source: Served) -> None:
    expected = texts(ask(source, 200, **OPTIONS[1]))
    settings = ServerSettings(prepare_processes=0, shutdown_timeout=0)
    with served(make_engine(), settings, names=(NAME,), make_transfers=make_transfers) as other:

        def move() -> None:
            assert migrate(source, other.url)["moved"]
            other.http_loop().call_soon_threadsafe(other.http.begin_shutdown)

        assert_same(texts(ask(source, 200, stream=True, **OPTIONS[1]), move), expected)
    source.wait_idle()


LIES = [
    b"",
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\n{}",
    *(
        b"HTTP/1.1 200 OK\r\ncontent-length: 999999\r\n\r\n" + line
        for line in (b"\n", b"[[0,[3],", b"{}\n", b'[[7,[3],"a",[],null]]\n', b'[[0,[99999],"a",[],null]]\n')
    ),
]


@pytest.mark.parametrize("lie", LIES)
def test_who_breaks_off_or_answers_nonsense_gives_the_request_back(source: Served, lie: bytes) -> None:
    expected = texts(ask(source))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                while not (received := connection.recv(2**20)).endswith(b"}}"):
                    assert received
                connection.sendall(lie)

        def move() -> None:
            migrate(source, f"http://127.0.0.1:{listener.getsockname()[1]}")

        thread = threading.Thread(target=answer)
        thread.start()
        assert_same(texts(ask(source, stream=True), move), expected)
        thread.join(10)
    source.wait_idle()


def test_a_client_that_leaves_ends_its_request_over_there(source: Served, target: Served) -> None:
    stream = ask(source, 600, stream=True)
    next(iter(stream))
    assert migrate(source, target.url)["moved"]
    stream.close()
    target.wait_idle()
    source.wait_idle()


def test_a_request_is_aborted_wherever_it_is(source: Served, target: Served) -> None:
    stream = ask(source, 600, stream=True, extra_headers={"x-request-id": "mine"})
    next(iter(stream))
    assert migrate(source, target.url, request_ids=["mine", "unknown"])["moved"]
    with source.http_client() as client:
        assert client.post("/abort_requests", json={"request_ids": ["mine"]}).json() == {"aborted": ["mine"]}
    assert texts(stream)[0][1] == "abort"
    target.wait_idle()
    source.wait_idle()


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 400),
        ({"to": "ftp://localhost"}, 400),
        ({"to": "http://user@localhost"}, 400),
        ({"to": "http://[::1"}, 400),
        ({"to": "http://localhost:99999999"}, 400),
        ({"to": "http://localhost:9/\x01"}, 400),
        ({"to": "http://example.org:80"}, 403),
        ({"to": "http://localhost:9", "request_ids": 3}, 400),
    ],
)
def test_bad_addresses_are_refused(source: Served, fields: dict[str, Any], status: int) -> None:
    with source.http_client() as client:
        answer = client.post("/migrate", json={"drain": False} | fields)
        assert answer.status_code == status, answer.text


class NoPages:
    """`Transfers` of an engine whose pages nobody can have."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def lease(self, wanted: str | None) -> str:
        return "0" * 32

    def params(self, outputs: Any) -> dict[str, Any]:
        return {}

    def check_peer(self, host: str) -> None:
        pass

    def dispatch(self, prepared: Any, headers: Any) -> None:
        pass

    def release(self, handoff: Any) -> None:
        for each in handoff.completions:
            self._engine.pages.release(each.lease)

    def close(self) -> None:
        pass

    counts: ClassVar[dict[str, Any]] = {}
    prefills = None


def test_a_client_that_leaves_while_its_request_does_holds_up_nobody() -> None:
    with served(fake_engine(), ServerSettings(prepare_processes=0), make_transfers=NoPages) as running:
        running.executor.pause = 0.05
        body = {"prompt": "abc", "max_tokens": 60, "stream": True, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool, running.http_client() as client:
            with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                running.executor.go.clear()
                moved = pool.submit(migrate, running, "http://127.0.0.1:9")
                running.wait_until("it leaves", lambda: running.server.thread._migrations)
            running.wait_until("the client has left", lambda: not running.server.calls)
            running.executor.go.set()
            assert list(moved.result(10)["kept"].values()) == ["it was cancelled"]
        running.wait_idle()
        assert not running.server.thread._migrations
        assert running.server.migration._at_once._value == 8  # type: ignore[union-attr]


def test_a_failure_of_our_own_gives_the_request_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(fake_engine(), ServerSettings(prepare_processes=0), make_transfers=NoPages) as running:
        running.executor.pause = 0.05
        monkeypatch.setattr(running.server.transfers, "params", lambda outputs: 1 / 0)
        body = {"prompt": "abc", "max_tokens": 60, "stream": True, "ignore_eos": True}
        with running.http_client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert list(migrate(running, "http://127.0.0.1:9")["kept"].values()) == ["division by zero"]
            assert [line for line in lines if line][-1] == "data: [DONE]"


@given(st.lists(st.text(st.sampled_from("ab\u2028\u2029\x85\r\v"), min_size=1)), st.integers(1, 7))
def test_only_line_feeds_end_lines(lines: list[str], size: int) -> None:
    sent = "".join(f"{line}\n\n" for line in lines).encode()

    async def parts() -> Any:
        for i in range(0, len(sent), size):
            yield sent[i : i + size]

    async def received() -> list[str]:
        return [line.decode() async for line in split_lines(parts())]

    assert asyncio.run(received()) == lines


def resume_body(lease: str | None = None, **more: Any) -> dict[str, Any]:
    handoff = {"seed": 1, "completions": [{"lease": lease, "length": 0, "tokens": [5]}]}
    params = {"remote_host": "127.0.0.1", "remote_port": 9, "handoff": handoff}
    return {"request": {"prompt": [1, 2, 3]}, "kv_transfer_params": params} | more


@pytest.mark.parametrize(
    "body",
    [
        {},
        resume_body(request={"prompt": [1, 2, 3], "sampling": {"top_k": 2**31}}),
        resume_body(request={"prompt": [10**9]}),
        resume_body(request={"prompt": []}),
        resume_body(kv_transfer_params={"handoff": {}}),
        resume_body(lease="0" * 32),  # no fingerprint
    ],
)
def test_bad_requests_are_not_resumed(target: Served, body: dict[str, Any]) -> None:
    with target.http_client() as client:
        assert client.post("/resume", json=body).status_code in (400, 409)
    assert target.server.engine.stats().running == 0


def test_only_administrators_move_requests() -> None:
    settings = ServerSettings(prepare_processes=0, api_keys=(ApiKey("user", "k" * 16),))
    with (
        served(make_engine(), settings, names=(NAME,), make_transfers=make_transfers, is_ready=False) as running,
        running.http_client(headers={"authorization": "Bearer " + "k" * 16}) as client,
    ):
        for path, body in (("/migrate", {"to": "http://localhost:9"}), ("/resume", resume_body())):
            assert client.post(path, json=body).status_code == 403


def test_a_drained_server_takes_nothing_new() -> None:
    settings = ServerSettings(prepare_processes=0)
    with served(make_engine(), settings, names=(NAME,), make_transfers=make_transfers) as running:
        assert migrate(running, "http://localhost:9", drain=True) == {"moved": [], "kept": {}, "draining": True}
        with running.http_client() as client:
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
