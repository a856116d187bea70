"""`/migrate` and `/resume`: requests that move from one server to another."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.active_call import ActiveCall
from longctx.serving.server.call_stream import CallStream
from longctx.serving.server.errors import ApiError, not_servable
from longctx.serving.server.event_lines import encode_events
from longctx.serving.server.gate import visitor_of
from longctx.serving.server.read_call import Call
from longctx.serving.server.schemas.base import body_of
from longctx.serving.server.schemas.completions import CompletionBody
from longctx.serving.server.schemas.other import MigrateBody, ResumeBody
from longctx.serving.server.server import Server
from longctx.serving.server.transfers import Transfers

_ALIVE_SECONDS = 2.0  # after which a line says that the request lives, though nothing has come


def migration_router(server: Server) -> APIRouter:
    """The routes by which requests move; they need the key of an administrator, where there is one."""
    router = APIRouter(tags=["migration"])

    @router.post("/migrate", openapi_extra=body_of(MigrateBody))
    async def migrate(request: Request) -> JSONResponse:
        """Move running requests to another server, which must know the same key. Their streams go on here."""
        _check(server, request)
        body = await server.bodies.fields(request, MigrateBody)
        if server.migration is None:
            raise ApiError(503, "the server is not ready yet: see /ready", None, "server_is_overloaded", 1.0)
        migration, authorization = server.migration, request.headers.get("authorization")
        url = migration.check(body.to)
        was_draining, server.is_draining = server.is_draining, server.is_draining or body.drain
        moved = await migration.move(url, _ids(server, body), authorization)
        if moved.kept and not moved.moved:  # the other server is not there, or not for these requests
            server.is_draining = was_draining
        return JSONResponse({**moved._asdict(), "draining": server.is_draining})

    @router.post("/resume", openapi_extra=body_of(ResumeBody))
    async def resume(request: Request) -> CallStream:
        """Begin or go on with a request of another server: lines of JSON, one for the events of each step."""
        transfers = _check(server, request)
        server.check_accepting()
        arrival, visitor = server.engine.now(), visitor_of(request)
        body = await server.bodies.fields(request, ResumeBody)
        params = body.kv_transfer_params
        if params is not None and params.remote_engine_id == transfers.info()["engine_id"]:
            raise ApiError(409, "a request can't move to the server that it comes from", "to", "cannot_move")
        prepared = await asyncio.to_thread(_prepare, server, body)
        received = transfers.resume(params, body.prefill, prepared, request.headers)
        call = Call(CompletionBody.model_validate({"prompt": "", "stream": True}), [prepared], [], 1)
        active = await server.begin(visitor.request_id, visitor.shown_id, call, arrival, None, received)
        return CallStream(server, visitor.request_id, _lines(active), "application/x-ndjson")

    return router


def _check(server: Server, request: Request) -> Transfers:
    if not visitor_of(request).is_admin:
        raise ApiError(403, "this needs the key of an administrator", code="admin_key_needed")
    if server.transfers is None:
        raise ApiError(409, "this server moves no requests: start it with --role", code="cannot_move")
    return server.transfers


def _ids(server: Server, body: MigrateBody) -> list[str]:
    """The engine's names of the requests that clients, or their answers, call so."""
    names = body.request_ids
    calls = [*server.calls.values()] if names is None else [call for name in names for call in server.find(name)]
    return list(dict.fromkeys(request_id for call in calls for request_id in call.request_ids))


def _prepare(server: Server, body: ResumeBody) -> PreparedRequest:
    try:
        return server.engine.prepare(body.request)
    except (TypeError, ValueError) as error:
        raise not_servable(error) from None


async def _lines(active: ActiveCall) -> AsyncIterator[bytes]:
    try:
        yield b"\n"
        while active.is_open:
            taken = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ALIVE_SECONDS):
                    taken = await active.take()
            yield b"".join(encode_events(events) for _, events in taken) or b"\n"
    except ApiError:
        return  # the other server goes on by itself
