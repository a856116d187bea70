"""Connections to instances end with their requests, whenever these are cancelled."""

import asyncio
import itertools

import pytest

from longctx.cluster.router.instance_client import InstanceClient
from longctx.serving.server.relay import EventLine


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


@pytest.mark.parametrize("steps", range(5))
def test_one_who_is_cancelled_closes_its_connection(steps: int) -> None:
    async def run() -> None:
        gone, begun = asyncio.Event(), asyncio.Event()
        async with await asyncio.start_server(lambda *ends: endless(*ends, gone), "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            count = itertools.count()

            def take(events: list[EventLine]) -> bool:
                if next(count) == 5:
                    begun.set()
                return False

            resuming = InstanceClient(f"http://127.0.0.1:{port}", None).resume(b"{}", "name", take)
            task = asyncio.create_task(resuming)
            await begun.wait()
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await asyncio.wait_for(gone.wait(), 3)

    asyncio.run(run())
