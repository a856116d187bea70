"""OpenAI's API: completions and chats, streaming or not, tokens, models, and caches of documents."""

import asyncio
import dataclasses
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.sse import KEEPALIVE_COMMENT

from longctx.models.tokenizer import TokenBytes
from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.auth import Client, client_of
from longctx.serving.server.caches import CacheDeleted, CacheList
from longctx.serving.server.calls import Document, Kind, Origin, ParsedCall
from longctx.serving.server.chat_schemas import CacheBody, ChatBody, TokenizeBody
from longctx.serving.server.embeddings import EmbeddingBody, embedding_list
from longctx.serving.server.errors import IGNORED, ApiError, no_such_model
from longctx.serving.server.frontend import ActiveCall, CallStream, Frontend
from longctx.serving.server.messages_schemas import CountBody, MessagesBody
from longctx.serving.server.messages_writer import MessagesWriter
from longctx.serving.server.preparer import unless_gone
from longctx.serving.server.response_writer import ChatWriter, CompletionWriter, ResponseWriter, encode
from longctx.serving.server.responses_body import ResponsesBody
from longctx.serving.server.responses_writer import ResponsesWriter
from longctx.serving.server.resumption import LAST_EVENT_ID, ResumableStream, resumable_stream
from longctx.serving.server.schemas import CompletionBody, DetokenizeBody, body_of
from longctx.serving.server.transfers import begin_transfer, response_params

logger = logging.getLogger(__name__)

_TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
_TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
_UNBUFFERED = {"cache-control": "no-store", "x-accel-buffering": "no"}
_NAMES, _NAME_LENGTH, _MOST_LOGGED = 20, 60, 1000  # unknown fields: those that are named, and their characters
_LARGE = 20_000  # tokens and log probabilities of an answer that takes long to write


def openai_router(server: Frontend) -> APIRouter:
    """Return the routes that an engine's server and a router of a cluster have in common."""
    router = APIRouter(tags=["openai"])
    started = int(time.time())

    async def prepare(request: Request, kind: Kind) -> Any:
        async with server.bodies.read(request) as body:
            return await unless_gone(request, server.preparer.read(kind, body, origin_of(request)))

    async def render(request: Request, kind: Kind) -> tuple[list[dict[str, Any]], dict[str, str]]:
        async with server.bodies.read(request) as body:
            call = await unless_gone(request, server.read(kind, body, origin_of(request)))
        return _rendered(server, call), _note_ignored(call.ignored)

    @functools.cache
    def described() -> bytes:
        return encode(server.chat_format.tokenizer_info(server.max_length))

    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "longctx",
            "root": server.model_name,
            "parent": None,
            "max_model_len": server.max_length,
        }

    @router.post("/v1/completions", openapi_extra=body_of(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        return await respond(server, request, "completions")

    @router.post("/v1/chat/completions", openapi_extra=body_of(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        return await respond(server, request, "chat")

    @router.post("/v1/embeddings", openapi_extra=body_of(EmbeddingBody))
    async def embeddings(request: Request) -> Response:
        """Return an embedding of each input."""
        return await respond(server, request, "embeddings")

    @router.post("/v1/messages", openapi_extra=body_of(MessagesBody))
    async def messages(request: Request) -> Response:
        """Answer a chat in the form of Anthropic's API."""
        return await respond(server, request, "messages")

    @router.post("/v1/messages/count_tokens", openapi_extra=body_of(CountBody))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a message's prompt."""
        count, ignored = await prepare(request, "count_tokens")
        return _json({"input_tokens": count}, _note_ignored(ignored))

    @router.post("/v1/completions/render", openapi_extra=body_of(CompletionBody))
    async def render_completions(request: Request) -> Response:
        """Return the tokens of each prompt, and how others would be drawn."""
        return _json(*await render(request, "completions"))

    @router.post("/v1/chat/completions/render", openapi_extra=body_of(ChatBody))
    async def render_chat(request: Request) -> Response:
        """Return the tokens of a chat by its template, and how others would be drawn."""
        (rendered,), ignored = await render(request, "chat")
        return _json(rendered, ignored)

    @router.post("/tokenize", openapi_extra=body_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a text, or of a chat."""
        tokens, names, ignored = await prepare(request, "tokenize")
        answer = {"count": len(tokens), "max_model_len": server.max_length, "tokens": tokens}
        return _json(answer | {"token_strs": names}, _note_ignored(ignored))

    @router.post("/detokenize", openapi_extra=body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens."""
        return _json({"prompt": await prepare(request, "detokenize")})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Return the tokenizer's configuration, with its chat template and special tokens."""
        return Response(described(), media_type="application/json")

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the names of the model."""
        return {"object": "list", "data": [model(name) for name in server.model_names]}

    @router.get("/v1/models/{name:path}")
    async def model_named(name: str) -> dict[str, Any]:
        """Describe the model by one of its names."""
        if name not in server.model_names:
            raise no_such_model(name)
        return model(name)

    return router


def caches_router(server: Frontend) -> APIRouter:
    """Return the routes of caches. Each tenant has its own, and has no access to those of others."""
    router = APIRouter(tags=["caches"])

    @router.post("/v1/caches", openapi_extra=body_of(CacheBody))
    async def create_cache(request: Request) -> Response:
        """Read a document when there is nothing more urgent, and keep its pages; it answers at once."""
        server.check_accepting()
        async with server.bodies.read(request) as body:
            reading = server.preparer.read("cache", body, origin_of(request))
            document: Document = await unless_gone(request, reading)
        client = client_of(request)
        _charge(server, client, len(document.prepared.tokens))
        return _json(server.caches.create(client.tenant, document), _note_ignored(document.ignored))

    @router.get("/v1/caches")
    async def list_caches(request: Request) -> Response:
        """List the tenant's caches."""
        return _json(CacheList(server.caches.of(client_of(request).tenant)))

    @router.get("/v1/caches/{cache_id}")
    async def get_cache(request: Request, cache_id: str) -> Response:
        """Return how far a cache is read, and where its pages are."""
        return _json(server.caches.get(client_of(request).tenant, cache_id))

    @router.delete("/v1/caches/{cache_id}")
    async def delete_cache(request: Request, cache_id: str) -> Response:
        """Release a cache's pages."""
        server.caches.delete(client_of(request).tenant, cache_id)
        return _json(CacheDeleted(cache_id))

    return router


Keep = Callable[[ParsedCall, ResponseWriter], object]
"""Is called with an answer that has ended, before its client has all of it."""


async def respond(server: Frontend, request: Request, kind: Kind, keep: Keep = lambda call, writer: None) -> Response:
    """Answer a request that generates tokens, as a whole or as a stream."""
    server.check_accepting()
    arrival = server.now()
    client = client_of(request)
    call_id = client.request_id
    async with server.bodies.read(request) as body:
        call = await unless_gone(request, server.read(kind, body, origin_of(request)))
    stream = resumable_stream(call, call_id, request.headers.get(LAST_EVENT_ID) or None)
    if stream is not None:
        call = call._replace(requests=stream.requests_of(call))
    params = call.body.kv_transfer_params
    if client.is_granted and not (params is not None and params.do_remote_decode and not params.do_remote_prefill):
        message = "a grant is for prompts that are read for another server: kv_transfer_params with do_remote_decode"
        raise ApiError(403, message, "kv_transfer_params", "admin_key_needed")
    try:
        call, received = begin_transfer(
            server.transfers, call, request.headers, client.may("migrate") or client.is_granted
        )
    except ApiError as error:
        server.count_refusal(error)
        raise
    settle = _charge(server, client, sum(map(_most_tokens, call.requests)))
    try:
        active = await server.start_call(call_id, client.shown_id, call, arrival, request.headers, received)
    except BaseException:
        settle(0)
        raise
    active.settle, client.usage = settle, active.usage
    ignored = _note_ignored(call.ignored)
    if isinstance(call.body, EmbeddingBody):
        return await _embeddings(server, request, ignored, call.body, call_id, active)
    writer = make_writer(call, call_id if stream is None else stream.name, server.model_name, server.token_bytes)
    if stream is not None:
        writer.created = stream.created
    if call.body.stream:
        pieces, end = _chunks(active, writer, keep, stream), functools.partial(server.end_call, call_id)
        return CallStream(end, pieces, "text/event-stream", _UNBUFFERED | ignored)
    try:
        outputs = await unless_gone(request, active.outputs())
    finally:
        server.end_call(call_id)
    writer.transfer_params = response_params(server.transfers, call, outputs)
    size = sum(len(output.token_ids) for output in outputs.values()) * call.copies
    size *= 1 + (call.requests[0].request.sampling.logprobs or 0)
    # Other clients don't wait for a large one.
    answer = await asyncio.to_thread(writer.whole, outputs) if size > _LARGE else writer.whole(outputs)
    keep(call, writer)
    return await asyncio.to_thread(_json, answer, ignored) if size > _LARGE else _json(answer, ignored)


def make_writer(call: ParsedCall, call_id: str, model: str, token_bytes: TokenBytes) -> ResponseWriter:
    """Return the writer of a call's API."""
    if isinstance(call.source, ResponsesBody):
        return ResponsesWriter(call, call_id, model, token_bytes)
    if isinstance(call.source, MessagesBody):
        return MessagesWriter(call, call_id, model, token_bytes)
    kind = ChatWriter if isinstance(call.body, ChatBody) else CompletionWriter
    return kind(call, call_id, model, token_bytes)


async def _embeddings(
    server: Frontend, request: Request, ignored: dict[str, str], body: EmbeddingBody, call_id: str, active: ActiveCall
) -> Response:
    try:
        outputs = await unless_gone(request, active.outputs())
    finally:
        server.end_call(call_id)
    return await asyncio.to_thread(lambda: _json(embedding_list(body, outputs, server.model_name), ignored))


def _most_tokens(prepared: PreparedRequest) -> int:
    """Return how many tokens a request may use, its prompt's and those that its answer may have."""
    sampling = prepared.request.sampling
    return len(prepared.tokens) + sampling.n * sampling.max_tokens


def _charge(server: Frontend, client: Client, tokens: int) -> Callable[[int], None]:
    """Count tokens for a client's limit, see `TenantLimit.take_tokens`."""
    if client.limit is None:
        return lambda used: None
    try:
        return client.limit.take_tokens(tokens)
    except ApiError as error:
        server.count_refusal(error)
        raise


def origin_of(request: Request) -> Origin:
    """Return the source of a request; raise ApiError for headers that are no numbers."""
    client, headers = client_of(request), request.headers
    targets = []
    for names in (_TTFT_HEADERS, _TPOT_HEADERS):
        name = next((name for name in names if name in headers), None)
        targets.append(None if name is None else _seconds(name, headers[name]))
    ttft, tpot = targets
    return Origin(client.tenant, client.request_id, ttft, tpot)


def _seconds(name: str, milliseconds: str) -> float:
    try:
        value = float(milliseconds)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e12:
        raise ApiError(400, f"the header {name} must be milliseconds, more than 0, got {milliseconds[:40]!r}", name)
    return value / 1000


async def _chunks(
    active: ActiveCall, writer: ResponseWriter, keep: Keep, stream: ResumableStream | None
) -> AsyncIterator[bytes]:
    """Yield the events of a stream. An error is among the last ones."""
    event, written_of = writer.event, writer.stream
    if stream is not None:
        event, written_of = functools.partial(stream.event, writer), functools.partial(stream.events, writer)
    try:
        if first := b"".join(map(event, writer.begin())):
            yield first
        while active.is_open:
            taken = await active.take()
            written = b"".join([written_of(number, events) for number, events in taken])
            if written or not taken:
                yield written or KEEPALIVE_COMMENT
        last = [*map(event, writer.end()), writer.done]
        if stream is not None:
            stream.check_end()
    except ApiError as error:
        yield b"".join(map(writer.event, writer.failed(error)))
        return
    keep(active.call, writer)
    yield b"".join(last)


def _json(answer: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(answer), headers=headers, media_type="application/json")


_logged: set[str] = set()  # names of fields that have been logged


def _note_ignored(names: Sequence[str]) -> dict[str, str]:
    """Log fields that no server is known to have, each once, and return the header that names them."""
    shown = [ascii(name[:_NAME_LENGTH])[1:-1].replace(",", "") for name in names[:_NAMES]]
    for name in shown:
        if name not in _logged and len(_logged) < _MOST_LOGGED:
            _logged.add(name)
            logger.warning("longctx: requests have the unknown field %s, which is ignored", name)
    return {IGNORED: ", ".join(shown)} if shown else {}


def _rendered(server: Frontend, call: ParsedCall) -> list[dict[str, Any]]:
    return [
        {
            "request_id": prepared.request.request_id,
            "model": server.model_name,
            "token_ids": prepared.tokens.tolist(),
            "prompt": server.tokenizer.decode(prepared.tokens.tolist()),
            "sampling_params": dataclasses.asdict(prepared.request.sampling),
            "priority": prepared.request.priority,
            "ttft_deadline": prepared.request.ttft_deadline,
            "tpot_target": prepared.request.tpot_target,
        }
        for prepared in call.requests
    ]
