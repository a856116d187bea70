"""POSTs over connections that are kept, to servers that behave and to others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from longctx.cluster.router.http_stream import Head, HttpStream

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Some: thing\r\n\r\n"


async def ask(stream: HttpStream, body: bytes = b"{}") -> tuple[Head, bytes]:
    head, said = None, b""
    async for part in stream.post("/resume", {"x-request-id": "one"}, body):
        if isinstance(part, Head):
            head = part
        else:
            said += part
    assert head is not None
    return head, said


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head, await reader.readexactly(length)


def run(answer: Answer, test: Callable[[HttpStream], Awaitable[Any]], silence: float = 5.0) -> tuple[Any, int]:
    """What a test gives with a server of such answers, and how many connections it took."""
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        try:
            await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def whole() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        stream = HttpStream(f"http://127.0.0.1:{port}", silence)
        try:
            return await test(stream)
        finally:
            stream.close()
            server.close()

    return asyncio.run(whole()), count


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send each body back in pieces."""
    while True:
        head, body = await read_request(reader)
        assert head.startswith(b"POST /resume HTTP/1.1\r\n")
        writer.write(CHUNKED)
        for i in range(0, len(body), 5):
            piece = body[i : i + 5]
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")


def test_answers_come_in_pieces_over_one_connection() -> None:
    async def test(stream: HttpStream) -> None:
        for number in range(3):
            body = b"%d and more" % number
            head, said = await ask(stream, body)
            assert (head.status, head.headers["x-some"], said) == (200, "thing", body)

    assert run(echo, test)[1] == 1


def test_at_once_there_are_several_connections() -> None:
    async def test(stream: HttpStream) -> list[Any]:
        return await asyncio.gather(*(ask(stream, b"%d" % i) for i in range(4)))

    answers, count = run(echo, test)
    assert [said for _, said in answers] == [b"0", b"1", b"2", b"3"]
    assert count == 4


def test_who_leaves_in_the_middle_closes_the_connection() -> None:
    ended: list[bool] = []

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"2\r\nab\r\n")
        ended.append(await reader.read() == b"")

    async def test(stream: HttpStream) -> None:
        parts = stream.post("/resume", {}, b"")
        await anext(parts)
        assert await anext(parts) == b"ab"
        await parts.aclose()
        while not ended:
            await asyncio.sleep(0.001)

    run(endless, test)
    assert ended == [True]


def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async def test(stream: HttpStream) -> None:
        for _ in range(3):
            assert (await ask(stream))[1] == b"ok"

    assert run(once, test)[1] == 3


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"", httpx.ReadError),
        (b"no HTTP at all\r\n\r\n", httpx.ReadError),
        (CHUNKED + b"5\r\nab", httpx.ReadError),
        (CHUNKED + b"zz\r\nab\r\n", httpx.ReadError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nok", httpx.ReadError),
    ],
)
def test_answers_that_break_off_are_errors(said: bytes, kind: type[Exception]) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(said)

    async def test(stream: HttpStream) -> None:
        with pytest.raises(kind):
            await ask(stream)

    run(broken, test)


def test_silence_is_an_error_and_so_is_nobody() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def test(stream: HttpStream) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await ask(stream)

    run(silent, test, 0.05)

    async def nobody() -> None:
        with pytest.raises(httpx.ConnectError):
            await ask(HttpStream("http://127.0.0.1:1"))

    asyncio.run(nobody())


def test_a_large_answer_waits_for_its_reader() -> None:
    size = 8 * 2**20

    async def large(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // 2**16):
            writer.write(bytes(2**16))
            await writer.drain()

    async def test(stream: HttpStream) -> int:
        found, most = 0, 0
        async for part in stream.post("/resume", {}, b""):
            if isinstance(part, bytes):
                found, most = found + len(part), max(most, len(part))
                await asyncio.sleep(0.002)
        assert most < 2 * 2**20
        return found

    assert run(large, test)[0] == size
