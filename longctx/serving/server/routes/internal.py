"""Routes by which a cluster's router sends requests to its instances, and controls them.

`AuthMiddleware` lets administrators alone use them, where there are keys.
"""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from longctx.serving.request.handoff import Handoff
from longctx.serving.request.request import Request as ServedRequest
from longctx.serving.server.auth import client_of
from longctx.serving.server.calls import ParsedCall
from longctx.serving.server.errors import ApiError, refusals_answered
from longctx.serving.server.frontend import ActiveCall, CallStream
from longctx.serving.server.kv_events import block_hash
from longctx.serving.server.relay import encode_events
from longctx.serving.server.resumption import KeptStream
from longctx.serving.server.schemas import CompletionBody, DrainBody, ResumeBody, SwapBody, body_of
from longctx.serving.server.server import Server

_ALIVE_SECONDS = 2.0  # after which an empty line says that the request lives
_SWAP_SECONDS = 30.0


def internal_router(server: Server) -> APIRouter:
    """Return the routes that other servers use."""
    router = APIRouter(tags=["internal"])

    @router.post("/resume", openapi_extra=body_of(ResumeBody))
    async def resume(request: Request) -> CallStream:
        """Begin or go on with a request of another server: lines of JSON, one for the events of each step."""
        transfers = server.transfers
        if transfers is None:
            raise ApiError(409, "this server moves no requests: start it with --role", code="cannot_move")
        arrival, client = server.engine.now(), client_of(request)
        body = await server.bodies.fields(request, ResumeBody)
        with refusals_answered():
            body.request = _with_tokens(body)
        params, kept = body.kv_transfer_params, _find_kept(server, body)
        if kept is not None:
            return _follow(kept, client.shown_id)
        server.check_accepting()
        if params is not None and params.remote_engine_id == transfers.info()["engine_id"]:
            raise ApiError(409, "a request can't move to the server that it comes from", "to", "cannot_move")
        with refusals_answered():
            prepared = await asyncio.to_thread(server.engine.prepare, body.request)
        received = transfers.resume(params, body.prefill, prepared, request.headers)
        call = ParsedCall(CompletionBody.model_validate({"prompt": "", "stream": True}), [prepared], [], 1)
        active = await server.start_call(client.request_id, client.shown_id, call, arrival, None, received)
        if body.request.stream_id is not None:
            return _follow(server.kept.keep(body.request, client.request_id, active), client.shown_id)
        end = functools.partial(server.end_call, client.request_id)
        return CallStream(end, _lines(active), "application/x-ndjson")

    @router.post("/drain", openapi_extra=body_of(DrainBody))
    async def drain(request: Request) -> JSONResponse:
        """Take no new requests from now on, or take some again; those that run go on."""
        body = await server.bodies.fields(request, DrainBody)
        server.set_draining(body.drain)
        return JSONResponse({"draining": server.is_draining, "requests": len(server.calls)})

    @router.post("/kv_swap", openapi_extra=body_of(SwapBody))
    async def kv_swap(request: Request) -> JSONResponse:
        """Evict unused blocks from the devices or the host's memory; slower tiers keep what they have."""
        body = await server.bodies.fields(request, SwapBody)
        if not server.engine.takes_handoffs:
            raise ApiError(409, "pages of an engine that is recorded stay", code="cannot_swap")
        wanted = frozenset(body.keys)
        if body.tier == "pins":
            return JSONResponse({"evicted": server.caches.release(lambda key: block_hash(key) in wanted)})
        evicted = server.engine.pages.evict(body.tier, lambda key: block_hash(key) in wanted)
        try:
            async with asyncio.timeout(_SWAP_SECONDS):
                return JSONResponse({"evicted": await asyncio.wrap_future(evicted)})
        except TimeoutError:
            raise ApiError(503, "no step has ended meanwhile", code="server_is_overloaded", retry_after=1.0) from None

    return router


def _with_tokens(body: ResumeBody) -> ServedRequest:
    if body.tokens is None:
        return body.request
    if len(body.tokens) % 4:
        raise ValueError(f"tokens must be base64 of int32, got {len(body.tokens)} bytes")
    tokens: Any = np.frombuffer(body.tokens, "<i4")
    return dataclasses.replace(body.request, prompt=tokens)


def _find_kept(server: Server, body: ResumeBody) -> KeptStream | None:
    """Return the kept stream of a request; None: there is none, or its client has had tokens of another instance."""
    handoff = None if body.kv_transfer_params is None else body.kv_transfer_params.handoff
    if body.request.stream_id is None:
        return None
    with refusals_answered():
        if handoff is not None and any(each.tokens for each in Handoff.from_dict(handoff).completions):
            return None
    return server.kept.find(body.request)


def _follow(kept: KeptStream, shown_id: str) -> CallStream:
    turn = kept.attach(shown_id)
    return CallStream(functools.partial(kept.detach, turn), kept.follow(turn), "application/x-ndjson")


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
