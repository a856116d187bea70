"""EventDispatcher from the engine's thread to the event loop: nothing is lost, one wake-up a step, and no time is."""

import asyncio
import random
import threading
import time
from typing import Any

import pytest

from longctx.models import ByteTokenizer
from longctx.models.tokenizer import TokenBytes
from longctx.serving import Event, Metrics, Output, TokenLogprob
from longctx.serving.server.request_parser import token_text
from longctx.serving.server.response_writer import LogprobLists, chat_logprobs
from longctx.serving.server.streams import EventDispatcher, Stream


def event(number: int, is_last: bool = False) -> Event:
    output = Output("r", 0, [number], "", "stop", Metrics(0.0, 1)) if is_last else None
    return Event("r", 0, (number,), "", (), output)


def test_nothing_is_lost_or_comes_twice_whoever_is_quicker() -> None:
    """Many steps of many streams, with random pauses on either side."""
    streams, steps = 20, 300

    async def run() -> list[list[int]]:
        dispatcher = EventDispatcher(asyncio.get_running_loop())
        made = [Stream(10**6, lambda: None) for _ in range(streams)]
        sinks = [dispatcher.sink(stream, 0, False) for stream in made]
        rng = random.Random(0)

        def engine() -> None:
            for step in range(steps):
                for sink in sinks:
                    sink([event(step)])
                dispatcher.flush()
                if rng.random() < 0.1:
                    time.sleep(rng.random() * 0.002)

        async def read(stream: Stream) -> list[int]:
            got: list[int] = []
            while len(got) < steps:
                got += [each.token_ids[0] for _, events in await stream.take() for each in events]
                if rng.random() < 0.05:
                    await asyncio.sleep(rng.random() * 0.002)
            return got

        thread = threading.Thread(target=engine)
        thread.start()
        results = await asyncio.wait_for(asyncio.gather(*map(read, made)), 20)
        thread.join()
        return results

    assert asyncio.run(run()) == [list(range(steps))] * streams


def test_steps_wake_the_loop_once() -> None:
    """However many streams there are, until it comes round."""

    class Loop:
        calls: list[Any] = []  # noqa: RUF012

        def call_soon_threadsafe(self, call: Any) -> None:
            self.calls.append(call)

    loop: Any = Loop()
    dispatcher = EventDispatcher(loop)
    streams = [Stream(10**6, lambda: None) for _ in range(128)]
    sinks = [dispatcher.sink(stream, 0, False) for stream in streams]
    for step in range(5):
        for sink in sinks:
            sink([event(step)])
        dispatcher.flush()
    assert len(loop.calls) == 1
    loop.calls.pop()()
    dispatcher.flush()
    assert loop.calls == []  # nothing has come since


def test_who_waits_for_the_whole_is_woken_for_the_end_alone() -> None:
    async def run() -> None:
        dispatcher = EventDispatcher(asyncio.get_running_loop())
        stream = Stream(1, lambda: None)
        sink = dispatcher.sink(stream, 3, True)
        for step in range(100):
            sink([event(step)])
            dispatcher.flush()
        await asyncio.sleep(0)
        sink([event(100, is_last=True)])
        dispatcher.flush()
        ((number, (last,)),) = await stream.take()
        assert (number, last.token_ids) == (3, (100,))

    asyncio.run(run())


def test_a_stream_that_overflows_says_so_once_and_ends() -> None:
    calls: list[int] = []

    async def run() -> None:
        stream = Stream(2, lambda: calls.append(1))
        for step in range(5):
            stream.add((0, [event(step)]))
        assert await stream.take() == []
        assert await stream.take() == []
        assert stream.has_ended

    asyncio.run(run())
    assert calls == [1]


def test_a_silent_stream_is_nudged_and_no_other() -> None:
    async def run() -> None:
        stream = Stream(2, lambda: None)
        stream.nudge()
        stream.add((0, [event(0)]))
        stream.nudge()  # something has come since the last time
        assert len(await stream.take()) == 1
        stream.nudge()
        assert await asyncio.wait_for(stream.take(), 1) == []
        assert not stream.has_ended

    asyncio.run(run())


def test_a_closed_loop_is_no_failure_of_the_engine() -> None:
    loop = asyncio.new_event_loop()
    dispatcher = EventDispatcher(loop)
    loop.close()
    dispatcher.sink(Stream(2, lambda: None), 0, False)([event(0)])
    dispatcher.flush()


TEXT = "a\u00e9\u4f60\U0001f680b"
BYTES = TokenBytes(ByteTokenizer())


def logprob(value: float = -1.0, *top: int) -> TokenLogprob:
    return TokenLogprob(value, tuple((token, -0.5 * i) for i, token in enumerate(top)))


def test_tokens_that_are_parts_of_characters_have_bytes() -> None:
    tokens = list(TEXT.encode())
    content = chat_logprobs(BYTES, tokens, [logprob(-1.0, 0xC3, 97) for _ in tokens]).content
    assert bytes(byte for entry in content for byte in entry.bytes) == TEXT.encode()
    assert [entry.token for entry in content[:3]] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert [(top.token, top.bytes) for top in content[0].top_logprobs] == [("bytes:\\xc3", [0xC3]), ("a", [97])]


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_offsets_are_those_of_characters_however_they_come(step: int) -> None:
    tokens = list(TEXT.encode())
    writer = LogprobLists(BYTES)
    lists = [
        writer.write(tokens[i : i + step], [logprob()] * len(tokens[i : i + step])) for i in range(0, len(tokens), step)
    ]
    offsets = [offset for each in lists for offset in each.text_offset]
    assert offsets == [len(TEXT.encode()[:i].decode(errors="ignore")) for i in range(len(tokens))]


def test_what_json_can_t_say_is_very_unlikely() -> None:
    (entry,) = chat_logprobs(BYTES, [97], [logprob(float("-inf"))]).content
    assert entry.logprob == -9999.0
    lists = LogprobLists(BYTES).write([97, 98], [None, logprob(float("-inf"), 97)])
    assert lists.token_logprobs == [None, -9999.0]
    assert lists.top_logprobs == [None, {"b": -9999.0, "a": 0.0}]


def test_token_text_of_bytes() -> None:
    assert [token_text(token) for token in (b"a", b"\xff\x00", b"", "\u00e9".encode())] == [
        "a",
        "bytes:\\xff\\x00",
        "",
        "\u00e9",
    ]
