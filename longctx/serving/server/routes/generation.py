"""`/v1/completions` and `/v1/chat/completions`: streaming and not."""

import asyncio
import math
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from longctx.serving.request.output import Output
from longctx.serving.server.active_call import ActiveCall
from longctx.serving.server.answers import Answers, make_answers
from longctx.serving.server.call_stream import CallStream
from longctx.serving.server.disaggregation import answer_params, begin_transfer
from longctx.serving.server.errors import ApiError
from longctx.serving.server.frontend import Frontend
from longctx.serving.server.gate import visitor_of
from longctx.serving.server.read_call import Kind, Origin
from longctx.serving.server.schemas.base import body_of
from longctx.serving.server.schemas.chat import ChatBody
from longctx.serving.server.schemas.completions import CompletionBody
from longctx.serving.server.schemas.responses import encode

_TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
_TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
_UNBUFFERED = {"cache-control": "no-store", "x-accel-buffering": "no"}
_GONE = 499  # nobody reads this answer
_LARGE = 20_000  # tokens and log probabilities of an answer that takes long to write


def generation_router(server: Frontend) -> APIRouter:
    """The routes that generate text."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/completions", openapi_extra=body_of(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        return await _answer(server, request, "completions")

    @router.post("/v1/chat/completions", openapi_extra=body_of(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        return await _answer(server, request, "chat")

    return router


async def _answer(server: Frontend, request: Request, kind: Kind) -> Response:
    server.check_accepting()
    arrival = server.now()
    visitor = visitor_of(request)
    call_id = visitor.request_id
    async with server.bodies.read(request) as body:
        call = await server.read(kind, body, origin_of(request))
    try:
        call, received = begin_transfer(server.transfers, call, request.headers, visitor.is_admin)
    except ApiError as error:
        server.note_refusal(error)
        raise
    active = await server.begin(call_id, visitor.shown_id, call, arrival, request.headers, received)
    answers = make_answers(call, call_id, server.model_name, server.token_bytes)
    if call.body.stream:
        return CallStream(server, call_id, _chunks(active, answers), "text/event-stream", _UNBUFFERED)
    try:
        outputs = await _unless_gone(request, active)
    finally:
        server.end(call_id)
    if outputs is None:
        return Response(status_code=_GONE)
    answers.transfer_params = answer_params(server.transfers, call, outputs)
    size = sum(len(output.token_ids) for output in outputs.values()) * call.copies
    size *= 1 + (call.requests[0].request.sampling.logprobs or 0)
    if size > _LARGE:  # other clients don't wait for it
        data = await asyncio.to_thread(lambda: encode(answers.whole(outputs)))
    else:
        data = encode(answers.whole(outputs))
    return Response(data, media_type="application/json")


def origin_of(request: Request) -> Origin:
    """Where a request comes from; ApiError for headers that are no numbers."""
    visitor, headers = visitor_of(request), request.headers
    targets = []
    for names in (_TTFT_HEADERS, _TPOT_HEADERS):
        name = next((name for name in names if name in headers), None)
        targets.append(None if name is None else _milliseconds(name, headers[name]))
    ttft, tpot = targets
    return Origin(visitor.tenant, visitor.request_id, ttft, tpot)


def _milliseconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e12:
        raise ApiError(400, f"the header {name} must be milliseconds, more than 0, got {text[:40]!r}", name)
    return value / 1000


async def _unless_gone(request: Request, active: ActiveCall) -> dict[tuple[int, int], Output] | None:
    """The outputs of a call; None if its client leaves before they are there."""
    reading = asyncio.ensure_future(active.outputs())
    watching = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({reading, watching}, return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        for task in (reading, watching):
            task.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _chunks(active: ActiveCall, answers: Answers) -> AsyncIterator[bytes]:
    """The events of a stream. An error is one of them, which is the last."""
    try:
        if first := b"".join(_event(encode(chunk)) for chunk in answers.begin()):
            yield first
        while active.is_open:
            taken = await active.take()
            pieces = [_event(encode(piece)) for number, events in taken for piece in answers.pieces(number, events)]
            if pieces or not taken:
                yield b"".join(pieces) if taken else KEEPALIVE_COMMENT
        last = [encode(chunk) for chunk in answers.end()]
    except ApiError as error:
        yield _event(encode(error.body))
        return
    yield b"".join(map(_event, [*last, b"[DONE]"]))


def _event(data: bytes) -> bytes:
    return format_sse_event(data_str=data.decode())
