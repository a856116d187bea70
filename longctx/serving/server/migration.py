"""Migration of a server's requests to another server during generation, which their clients do not notice.

The other server may have another plan: pages are cut anew on their way. It goes on where this one has stopped, with the
same seed, so that the tokens are the same; its events come back to the clients' streams here.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx
import msgspec

from longctx.serving.engine.active_request import MigratedRequest, MigratingRequest
from longctx.serving.engine.thread import EngineThread
from longctx.serving.request.handoff import Handoff
from longctx.serving.server.errors import ApiError
from longctx.serving.server.relay import Lines, Relay, RelayBroken, decode_events, split_lines
from longctx.serving.server.transfers import Transfers

logger = logging.getLogger(__name__)

_AT_ONCE = 8  # requests that stand still between two servers
_CONNECT, _SILENCE = 5.0, 60.0  # seconds; a stream says that it lives every `ping_interval`


class Moved(NamedTuple):
    """Result of a migration: the ids of moved requests; and why others were kept, by id."""

    moved: list[str]
    kept: dict[str, str]


class Migration:
    """Moves requests, and passes on their events. For the event loop's thread.

    Args:
      thread: of the engine whose requests move.
      flush: see `EngineThread`.
    """

    def __init__(self, thread: EngineThread, transfers: Transfers, flush: Callable[[], object]) -> None:
        self._thread, self._transfers, self._flush = thread, transfers, flush
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(_SILENCE, connect=_CONNECT),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def move(self, url: str, request_ids: Sequence[str], authorization: str | None) -> Moved:
        """Move requests; return when each of them runs there, or goes on here.

        Args:
          url: of the other server, from `resume_url`.
          authorization: the header for it.
        """
        ends = await asyncio.gather(*(self._begin(url, request_id, authorization) for request_id in request_ids))
        by_id = dict(zip(request_ids, ends, strict=True))
        return Moved(
            [request_id for request_id, why in by_id.items() if why is None],
            {request_id: why for request_id, why in by_id.items() if why is not None},
        )

    async def close(self) -> None:
        """End all relays: their clients are told."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    def resume_url(self, to: str) -> str:
        """Return the URL at which another server takes requests.

        Args:
          to: its address.

        Raises:
          ApiError: none can be moved, or not to this address.
        """
        if not self._thread.engine.takes_handoffs:
            message = "requests of an engine that is recorded can't be moved"
            raise ApiError(409, message, code="cannot_move")
        try:
            url = httpx.URL(to)
        except httpx.InvalidURL as error:
            raise ApiError(400, f"to must be http://HOST:PORT, got {to[:100]!r}: {error}", "to") from None
        is_odd = url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment
        if is_odd or not 0 < (url.port or 80) < 2**16:
            raise ApiError(400, f"to must be http://HOST:PORT, got {to[:100]!r}", "to")
        self._transfers.check_peer(url.host)
        return str(url).rstrip("/") + "/resume"

    async def _begin(self, url: str, request_id: str, authorization: str | None) -> str | None:
        """Move a request; return why that was not possible, or None."""
        async with self._at_once:
            migration = self._thread.move(request_id, self._transfers.lease(None))
            if migration is None:
                return "it has ended, leaves already, or is a prefill for another server"
            accepted: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._run(url, migration, authorization, accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return await accepted

    async def _run(
        self, url: str, migration: MigratingRequest, authorization: str | None, accepted: asyncio.Future[str | None]
    ) -> None:
        """Follow a request from when it leaves to its end."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        left = asyncio.wrap_future(migration.left)  # it comes with a step, whatever else happens
        while not left.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([left])
        migrated = left.result()
        if migrated is None:
            _tell(accepted, "it has ended")
            return
        relay = Relay(self._thread, migration, migrated, self._flush)
        migration.on_cancel = lambda: None if task is None else loop.call_soon_threadsafe(task.cancel)
        try:
            if migration.is_cancelled or self._is_closing:
                raise asyncio.CancelledError
            await relay.follow(self._lines(url, migrated, authorization, accepted))
        except asyncio.CancelledError:
            relay.end("cancelled")
        except Exception as error:  # whatever it is, the client waits
            expected = isinstance(error, httpx.HTTPError | RelayBroken | msgspec.DecodeError)
            logger.warning("request %s comes back: %s", migration.request_id, error, exc_info=not expected)
            _tell(accepted, str(error) or type(error).__name__)
            relay.resume_locally()
        finally:
            _tell(accepted, "it was cancelled")
            self._transfers.release(Handoff.of(migrated.outputs))

    async def _lines(
        self, url: str, migrated: MigratedRequest, authorization: str | None, accepted: asyncio.Future[str | None]
    ) -> Lines:
        """Yield the events that the other server sends."""
        headers = {"content-type": "application/json"}
        if authorization is not None:
            headers["authorization"] = authorization
        # Another thread writes long prompts.
        content = await asyncio.to_thread(_body, migrated, self._transfers.params(migrated.outputs))
        async with self._client.stream("POST", url, content=content, headers=headers) as response:
            if response.status_code != 200:
                raise RelayBroken(f"the other server says {response.status_code}: {await _reason(response)}")
            _tell(accepted, None)
            async for line in split_lines(response.aiter_bytes()):
                yield decode_events(line)


def _body(migrated: MigratedRequest, params: dict[str, Any]) -> bytes:
    prepared = migrated.prepared
    request: Any = dataclasses.replace(prepared.request, prompt=prepared.tokens.tolist(), request_id=None)
    return msgspec.json.encode({"request": request, "kv_transfer_params": params})


async def _reason(response: httpx.Response) -> str:
    text = (await response.aread())[:1000].decode("utf-8", "replace")
    try:
        return str(msgspec.json.decode(text)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return text


def _tell(accepted: asyncio.Future[str | None], why: str | None) -> None:
    if not accepted.done():
        accepted.set_result(why)
