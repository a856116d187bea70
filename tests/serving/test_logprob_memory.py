"""Log probabilities are numbers in arrays until they are written, and of a bounded size."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_device import make_engine
from served import fake_engine, served

from longctx.models import ByteTokenizer
from longctx.models.tokenizer import TokenBytes
from longctx.serving import EngineThread, Request, SamplingParams, TokenLogprob
from longctx.serving.config import AdmissionLimits
from longctx.serving.engine.admission_control import AdmissionControl, Refused, check_logprobs
from longctx.serving.request.output import Logprobs
from longctx.serving.server.response_writer import LogprobLists, chat_logprobs, encode, whole_chat_logprobs

TOP = 20
BYTES = TokenBytes(ByteTokenizer())
ECHO = SamplingParams(max_tokens=1, logprobs=5, prompt_logprobs=5)


def drawn(count: int) -> Iterator[TokenLogprob]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        values = np.sort(rng.standard_normal(TOP).astype(np.float32))[::-1].tolist()
        yield TokenLogprob(values[3], tuple(zip(rng.integers(0, 256, TOP).tolist(), values, strict=True)))


def measured(make: Any) -> tuple[Any, int, int]:
    """Return what `make` makes, the bytes that it takes, and the most bytes meanwhile."""
    tracemalloc.start()
    try:
        made = make()
        return made, *tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def test_they_are_what_was_put_in() -> None:
    values = list(drawn(50))
    kept = Logprobs(values[:20])
    kept.extend(Logprobs(values[20:40]))
    for each in values[40:]:
        kept.append(each)
    assert kept == values
    assert [kept[0], kept[-1], *kept[7:9]] == [values[0], values[-1], *values[7:9]]
    assert Logprobs([TokenLogprob(-1.0, ())]) == [TokenLogprob(-1.0, ())]
    assert Logprobs() == []
    with pytest.raises(IndexError):
        kept[50]


def test_a_token_takes_little_memory() -> None:
    values = list(drawn(2000))
    _, size, _ = measured(lambda: Logprobs(values))
    assert size / 2000 < 250  # 180, and the room to grow of the arrays; it was 2,400


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 700])
def test_whole_answers_are_those_of_their_parts(count: int) -> None:
    tokens, values = list(range(256)) * 3, Logprobs(drawn(count))
    whole = LogprobLists(BYTES, -2).write_whole(tokens[:count], values)
    parts = LogprobLists(BYTES, -2).write(tokens[:count], values)
    assert msgspec.json.decode(encode(whole)) == msgspec.json.decode(encode(parts))
    echoed = LogprobLists(BYTES).write_whole(tokens[: count + 1], values, 1)
    parts = LogprobLists(BYTES).write(tokens[: count + 1], [None, *values])
    assert msgspec.json.decode(encode(echoed)) == msgspec.json.decode(encode(parts))
    chat = whole_chat_logprobs(BYTES, tokens[:count], values)
    assert msgspec.json.decode(chat) == msgspec.to_builtins(chat_logprobs(BYTES, tokens[:count], values))


@pytest.mark.parametrize("write", [whole_chat_logprobs, lambda *args: LogprobLists(args[0]).write_whole(*args[1:])])
def test_writing_takes_little_more_than_the_text(write: Any) -> None:
    """Some tokens at a time are Python's objects. The budget of a number is that of the array and its JSON."""
    count = 6000
    tokens, values = [65] * count, Logprobs(drawn(count))
    text, _, most = measured(lambda: write(BYTES, tokens, values))
    assert most < 2 * len(bytes(text)) + 3 * 2**20
    engine = make_engine(max_logprobs=TOP)
    prepared = engine.prepare(Request([1] * 10, SamplingParams(max_tokens=2, logprobs=TOP)))
    assert prepared.logprob_bytes == 128 * 2 * (TOP + 1)


def control(**limits: int) -> EngineThread:
    engine = make_engine(max_logprobs=5, num_pages=100)
    return EngineThread(engine, AdmissionControl(engine, AdmissionLimits(**limits)))  # which runs no step


def submit(thread: EngineThread, tenant: str = "", length: int = 99, params: SamplingParams = ECHO) -> str:
    prepared = thread.engine.prepare(Request([1] * length, params, tenant=tenant))
    return thread.submit(prepared, lambda events: None)


def test_more_than_there_may_ever_be_is_an_error_that_names_the_argument() -> None:
    limit = 128 * 6 * 100
    thread = control(max_logprob_bytes=limit)
    submit(thread)
    with pytest.raises(ValueError, match=r"logprobs must be of fewer tokens.* prompts of 100 tokens .*77,568 bytes"):
        submit(thread, "other", length=100)
    prepared = thread.engine.prepare(Request([1] * 99, ECHO))
    check_logprobs([prepared], limit)
    with pytest.raises(ValueError, match="max_logprob_bytes"):
        check_logprobs([prepared], limit, copies=2)
    thread.start()
    thread.close()


def test_those_of_all_requests_are_bounded_and_tenants_have_shares() -> None:
    thread = control(max_logprob_bytes=128 * 6 * 200)
    first = submit(thread, "a")
    submit(thread, "a")
    with pytest.raises(Refused, match="log probabilities") as refused:
        submit(thread, "a")
    assert refused.value.reason == "tokens"
    submit(thread, "a", params=SamplingParams(max_tokens=1))  # which asks for none
    submit(thread, "b")
    with pytest.raises(Refused):
        submit(thread, "b")
    thread.start()
    assert thread.wait_idle(20)
    assert submit(thread, "a") != first
    thread.close()


def test_a_server_counts_copies_of_greedy_answers() -> None:
    """Each is written, though the engine computes one."""
    limits = AdmissionLimits(max_logprob_bytes=128 * 6 * 40)
    with served(fake_engine(max_logprobs=5), limits=limits) as running, running.http_client() as client:
        body = {"prompt": "ABCD", "max_tokens": 8, "temperature": 0, "logprobs": 5, "ignore_eos": True}
        assert client.post("/v1/completions", json=body | {"n": 5}).status_code == 200
        refused = client.post("/v1/completions", json=body | {"n": 6})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
        assert client.post("/v1/completions", json=body | {"n": 2, "echo": True}).status_code == 200
        assert client.post("/v1/completions", json=body | {"n": 4, "echo": True}).status_code == 400
