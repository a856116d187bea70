"""What viewers of the page are told, with an engine on fake devices."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from fake_device import make_engine

from longctx.serving import Event, Request, SamplingParams
from longctx.serving.engine.thread import EngineThread
from longctx.serving.server.page_feed import BUFFERED, ID_LENGTH, MAX_VIEWERS, STEPS_KEPT, EngineFeed, TooManyViewers


class Served:
    """A feed of an engine, and the outputs of the requests that `serve` sends it."""

    def __init__(self, interval: float = 0.01, **options: Any) -> None:
        self.thread = EngineThread(make_engine(**options))
        self.feed = EngineFeed(self.thread, interval)
        self.thread.on_step.append(self.feed.observe_step)
        self.thread.on_end.append(self.feed.observe_end)
        self.ended = threading.Semaphore(0)

    def __enter__(self) -> "Served":
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.thread.close()

    def submit(self, prompt: list[int], request_id: str, max_tokens: int = 4) -> None:
        def sink(events: list[Event]) -> None:
            for event in events:
                if event.output is not None:
                    self.ended.release()

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.thread.submit(self.thread.engine.prepare(Request(prompt, sampling, request_id=request_id)), sink)


async def collect(feed: EngineFeed, is_enough: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Messages until there are enough."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(30), aclosing(feed.messages()) as messages:
        async for message in messages:
            found.append(json.loads(message))
            if is_enough(found):
                break
    return found


def num_ended(messages: list[dict[str, Any]]) -> int:
    return sum(len(message["ended"]) for message in messages)


def test_every_row_and_every_end_is_told_once() -> None:
    async def watch(served: Served) -> list[dict[str, Any]]:
        watching = asyncio.create_task(collect(served.feed, lambda messages: num_ended(messages) == 2))
        await asyncio.sleep(0)  # the first message is of the time before
        served.submit(list(range(40)), "first-request-of-all")
        served.submit([1, 2, 3], "short", max_tokens=6)
        return await watching

    with Served() as served:
        messages = asyncio.run(watch(served))
    steps = [step for message in messages for step in message["steps"]]
    assert [step["number"] for step in steps] == list(range(len(steps)))
    read: dict[str, int] = {}
    for step in steps:
        for request_id, rows in step["prompts"]:
            read[request_id] = read.get(request_id, 0) + rows
    assert read == {"first-reques": 40, "short": 3}
    assert sum(step["decodes"] for step in steps) == 3 + 5
    ends = {end["id"]: end for message in messages for end in message["ended"]}
    assert {name: end["prompt_tokens"] for name, end in ends.items()} == read
    assert [ends["short"]["output_tokens"], ends["short"]["finish_reason"]] == [6, "length"]
    assert all(end["ttft"] > 0 and end["tpot"] > 0 for end in ends.values())


def test_who_comes_later_is_told_what_was() -> None:
    with Served() as served:
        served.submit(list(range(20)), "before")
        assert served.ended.acquire(timeout=30)
        [message] = asyncio.run(collect(served.feed, lambda messages: True))
    assert sum(rows for step in message["steps"] for _, rows in step["prompts"]) == 20
    assert [end["id"] for end in message["ended"]] == ["before"]
    assert message["load"]["running"] == 0
    assert message["load"]["pages"] == 24


def test_progress_of_a_prompt_grows_to_its_length() -> None:
    async def watch(served: Served) -> list[dict[str, Any]]:
        watching = asyncio.create_task(collect(served.feed, lambda messages: num_ended(messages) == 1))
        await asyncio.sleep(0)
        served.submit(list(range(40)) * 5, "book")
        return await watching

    with Served(num_pages=60, token_budget=8) as served:
        served.thread.on_step.append(lambda step, load: time.sleep(0.01))  # steps that take longer than a message
        messages = asyncio.run(watch(served))
    told = [entry for message in messages for entry in message["reading"]]
    assert {(name, total) for name, _, total in told} == {("book", 200)}
    done = [done for _, done, _ in told]
    assert done == sorted(done)
    assert len(set(done)) > 3
    assert messages[-1]["reading"] == []


def test_messages_hold_nothing_of_prompts_and_little_of_ids() -> None:
    marker = 49  # a token that is in no count here
    with Served() as served:
        served.submit([marker] * 30, "patient-4711-has-a-rare-disease")
        assert served.ended.acquire(timeout=30)
        [message] = asyncio.run(collect(served.feed, lambda messages: True))
    numbers = [value for step in message["steps"] for value in (step["number"], step["decodes"], *step["prompts"])]
    assert marker not in numbers
    assert "disease" not in json.dumps(message)
    assert {len(name) for step in message["steps"] for name, _ in step["prompts"]} == {ID_LENGTH}


def test_messages_are_no_more_than_one_an_interval_and_one_for_all_viewers() -> None:
    async def watch(served: Served) -> tuple[list[list[dict[str, Any]]], float]:
        start = time.monotonic()
        watching = [collect(served.feed, lambda messages: num_ended(messages) == 1) for _ in range(3)]
        tasks = [asyncio.create_task(one) for one in watching]
        await asyncio.sleep(0)
        served.submit([1, 2, 3], "long", max_tokens=200)
        return await asyncio.gather(*tasks), time.monotonic() - start

    with Served(interval=0.05, num_pages=60) as served:
        served.thread.on_step.append(lambda step, load: time.sleep(0.002))
        everyone, took = asyncio.run(watch(served))
    assert everyone[0][1:] == everyone[1][1:] == everyone[2][1:]
    assert 2 < len(everyone[0]) <= 2 + took / 0.05


def test_a_slow_viewer_misses_messages_and_holds_nothing() -> None:
    async def watch(served: Served) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        fast = asyncio.create_task(collect(served.feed, lambda messages: num_ended(messages) == 1))
        async with aclosing(served.feed.messages()) as slow:
            await anext(slow)
            served.submit([1, 2, 3], "long", max_tokens=200)
            everything = await fast
            kept = [json.loads(await anext(slow))]
            while num_ended(kept) == 0:
                kept.append(json.loads(await anext(slow)))
        assert served.feed.num_viewers == 0
        return kept, everything

    with Served(interval=0.001, num_pages=60) as served:
        served.thread.on_step.append(lambda step, load: time.sleep(0.003))
        kept, messages = asyncio.run(watch(served))
    assert len(messages) > BUFFERED + 10
    assert BUFFERED - 5 < len(kept) <= BUFFERED
    assert kept == messages[-len(kept) :]


def test_nothing_is_made_for_nobody() -> None:
    async def watch(served: Served) -> None:
        async with aclosing(served.feed.messages()) as messages:
            await anext(messages)
        assert served.feed.num_viewers == 0
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1  # this one
        served.submit([1], "a", max_tokens=200)
        assert await asyncio.to_thread(served.ended.acquire, timeout=30)

    with Served(num_pages=60) as served:
        for _ in range(2):
            asyncio.run(watch(served))  # an event loop of its own each time
        [message] = asyncio.run(collect(served.feed, lambda messages: True))
        assert len(message["steps"]) == STEPS_KEPT


def test_one_viewer_too_many_is_refused() -> None:
    async def watch(feed: EngineFeed) -> None:
        viewers = [feed.messages() for _ in range(MAX_VIEWERS)]
        for viewer in viewers:
            await anext(viewer)
        with pytest.raises(TooManyViewers, match=str(MAX_VIEWERS)):
            await anext(feed.messages())
        await viewers.pop().aclose()
        another = feed.messages()
        await anext(another)
        for viewer in [*viewers, another]:
            await viewer.aclose()

    with Served() as served:
        asyncio.run(watch(served.feed))
