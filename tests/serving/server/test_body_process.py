"""`BodyProcess` with a parser whose bodies say what happens to it."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from longctx.serving.server import body_process
from longctx.serving.server.body_process import BodyProcess, ProcessEnded
from longctx.serving.server.calls import Origin
from longctx.serving.server.errors import ApiError

ORIGIN = Origin("someone", "request")


class Stuck(Exception):
    """An error that can't be sent."""

    def __reduce__(self) -> Any:
        raise TypeError("it stays")


class Parser:
    """What it does is the first word of a body."""

    def completions(self, body: bytes, origin: Origin) -> Any:
        word, _, rest = body.decode().partition(" ")
        if word == "end":
            os._exit(1)
        if word == "sleep":
            time.sleep(float(rest))
        if word == "refuse":
            raise ApiError(400, rest, "prompt")
        if word == "stuck":
            raise Stuck(rest)
        if word == "stay":
            return lambda: None
        return os.getpid() if word == "pid" else rest


@asynccontextmanager
async def running() -> AsyncIterator[tuple[BodyProcess, Callable[[str], Awaitable[Any]]]]:
    process = BodyProcess(Parser())  # type: ignore[arg-type]
    try:
        yield process, lambda text: process.submit("completions", text.encode(), ORIGIN)
    finally:
        await asyncio.to_thread(process.close)


def test_answers_and_errors_come_in_their_order() -> None:
    async def check() -> None:
        async with running() as (_, read):
            texts = [f"say {number}" + "x" * (number % 5 * 400_000) for number in range(40)]
            assert await asyncio.gather(*map(read, texts)) == [text[4:] for text in texts]
            with pytest.raises(ApiError) as refused:
                await read("refuse it is too long")
            assert (refused.value.status, refused.value.message) == (400, "it is too long")
            assert await read("pid") == await read("pid") != os.getpid()

    asyncio.run(check())


@pytest.mark.parametrize("text", ["stuck here", "stay"])
def test_what_cannot_be_sent_is_an_error_and_no_end(text: str) -> None:
    async def check() -> None:
        async with running() as (_, read):
            before = await read("pid")
            with pytest.raises(Exception, match=r"it stays|Stuck|pickle"):
                await read(text)
            assert await read("pid") == before

    asyncio.run(check())


def test_a_body_that_ends_two_processes_is_given_up_and_no_other() -> None:
    async def check() -> None:
        async with running() as (_, read):
            results = await asyncio.gather(*map(read, ["say a", "end", "say b", "say c"]), return_exceptions=True)
            assert [results[0], *results[2:]] == ["a", "b", "c"]
            assert isinstance(results[1], ProcessEnded)

    asyncio.run(check())


def test_what_is_abandoned_ends_with_the_process_or_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_process, "_ABANDONED_SECONDS", 0.2)

    async def check() -> None:
        async with running() as (process, read):
            before = await read("pid")
            jobs: list[Any] = [read("sleep 600"), read("sleep 600")]
            await asyncio.sleep(0.1)
            for job in jobs:
                process.abandon(job)
            async with asyncio.timeout(60):
                assert await read("pid") != before
            assert all(job.cancelled() for job in jobs)

    asyncio.run(check())


def test_what_is_abandoned_and_soon_parsed_costs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_process, "_ABANDONED_SECONDS", 0.5)

    async def check() -> None:
        async with running() as (process, read):
            before = await read("pid")
            job: Any = read("sleep 0.1")
            await asyncio.sleep(0)
            process.abandon(job)
            await asyncio.sleep(0.7)
            assert await read("pid") == before

    asyncio.run(check())


def test_one_that_is_closed_reads_nothing_more() -> None:
    async def check() -> None:
        async with running() as (process, read):
            await read("pid")
            job = read("sleep 600")
            await asyncio.sleep(0.1)
            await asyncio.to_thread(process.close)
            for each in (job, read("say a")):
                with pytest.raises(ProcessEnded):
                    await each

    asyncio.run(check())


def test_one_that_cannot_be_started_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with running() as (_, read):
            with monkeypatch.context() as patched:
                patched.setattr(socket, "socketpair", lambda: (_ for _ in ()).throw(OSError(24, "too many files")))
                with pytest.raises(ProcessEnded):
                    await read("say a")
            assert await read("say a") == "a"

    asyncio.run(check())
