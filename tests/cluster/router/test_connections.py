"""Connections to instances end with their requests, whenever these are cancelled."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from longctx.cluster.router.instance_client import InstanceClient


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gone: asyncio.Event) -> None:
    """Answers with events for ever, until nobody reads."""
    line = b'[[0,[65],"A",[],null]]\n'
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"%x\r\n%s\r\n" % (len(line), line))
            await writer.drain()
            await asyncio.sleep(0.001)
    except ConnectionError:
        pass
    finally:
        writer.close()
        gone.set()


async def follow(lines: AsyncIterator[Any], begun: asyncio.Event, count: int) -> None:
    """Read some lines, and leave."""
    try:
        async for _ in lines:
            count -= 1
            if count == 0:
                begun.set()
                return
    finally:
        await lines.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps", range(5))
def test_one_who_is_cancelled_while_it_closes_closes_all_the_same(steps: int) -> None:
    async def run() -> None:
        gone, begun = asyncio.Event(), asyncio.Event()
        async with await asyncio.start_server(lambda *ends: endless(*ends, gone), "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with httpx.AsyncClient(trust_env=False) as http:
                lines = InstanceClient(http, f"http://127.0.0.1:{port}", None).resume(b"{}", "name")
                task = asyncio.create_task(follow(lines, begun, 5))
                await begun.wait()
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                await asyncio.wait_for(gone.wait(), 3)

    asyncio.run(run())
