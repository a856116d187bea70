"""POSTs over connections that are kept, to servers that behave and to others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from longctx.cluster import http_stream
from longctx.cluster.http_stream import Head, HttpStream

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Some: thing\r\n\r\n"


async def ask(stream: HttpStream, body: bytes = b"{}") -> tuple[Head, bytes]:
    parts: list[Any] = []
    await stream.send("POST", "/resume", {"x-request-id": "one"}, body, parts.append)
    return parts[0], b"".join(parts[1:])


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
        parts: list[Any] = []
        asking = asyncio.create_task(stream.send("POST", "/resume", {}, b"", parts.append))
        while b"ab" not in parts:
            await asyncio.sleep(0.001)
        asking.cancel()
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


def test_an_error_of_who_reads_ends_the_answer() -> None:
    def read(part: Head | bytes) -> None:
        if part == b"0":
            raise LookupError("not this one")

    async def test(stream: HttpStream) -> None:
        with pytest.raises(LookupError, match="not this one"):
            await stream.send("POST", "/resume", {}, b"0", read)
        assert (await ask(stream, b"1"))[1] == b"1"

    assert run(echo, test)[1] == 2  # what is left of the first answer is not read


@pytest.mark.parametrize(("has_end", "count"), [(True, 1), (False, 2)])
def test_the_end_of_an_answer_is_awaited_a_little(has_end: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_stream, "_END_SECONDS", 0.1)

    found: list[Head | bytes] = []

    def read(part: Head | bytes) -> bool:
        found.append(part)
        return part == b"last"

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(CHUNKED + b"4\r\nlast\r\n")
            await asyncio.sleep(0.02)
            writer.write(b"4\r\nmore\r\n")
            if has_end:
                writer.write(b"0\r\n\r\n")

    async def test(stream: HttpStream) -> None:
        for _ in range(2):
            await stream.send("POST", "/resume", {}, b"", read)
        assert [part for part in found if isinstance(part, bytes)] == [b"last", b"last"]

    assert run(slow, test)[1] == count


def test_a_large_answer_comes_whole() -> None:
    size = 8 * 2**20

    async def large(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // 2**16):
            writer.write(bytes(2**16))
            await writer.drain()

    async def test(stream: HttpStream) -> int:
        return len((await ask(stream))[1])

    assert run(large, test)[0] == size
