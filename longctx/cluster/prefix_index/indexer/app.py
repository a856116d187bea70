"""The HTTP API of a `KvIndexer`: Mooncake's `/register`, `/unregister`, `/query` and `/query_by_hash`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from fastapi import APIRouter, FastAPI, Request, Response
from msgspec import Meta
from starlette.concurrency import run_in_threadpool

from longctx.cluster.prefix_index.connection import check_endpoint
from longctx.cluster.prefix_index.indexer.indexer import Context, InstanceHits, KvIndexer, Publisher
from longctx.cluster.prefix_index.indexer.sequence_hash import sequence_hashes
from longctx.cluster.prefix_index.reader import KvEventReader
from longctx.serving.server.errors import ApiError

_LARGEST = 1 << 27  # bytes of a body
_MOST_PUBLISHERS = 4096
_TYPES = ("vllm", "sglang", "longctx", "mooncake")

_Name = Annotated[str, Meta(min_length=1, max_length=500)]
_Part = Annotated[str, Meta(min_length=1, max_length=500, pattern=r"^[^|]*$")]  # of a publisher's name
_Text = Annotated[str, Meta(max_length=500)]
_BlockSize = Annotated[int, Meta(ge=1, le=1 << 20)]
_Rank = Annotated[int, Meta(ge=0, le=1 << 20)]
_Token = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Hash = Annotated[int, Meta(ge=0)]
_Body = TypeVar("_Body", bound=msgspec.Struct)


class RegisterBody(msgspec.Struct):
    """A publisher of KV events."""

    endpoint: _Name
    type: _Name
    modelname: _Name
    instance_id: _Part
    block_size: _BlockSize
    dp_rank: _Rank
    replay_endpoint: str | None = None
    lora_name: _Text | None = None
    tenant_id: _Part = "default"
    additionalsalt: _Text | None = None


class UnregisterBody(msgspec.Struct):
    """Who publishes no more; `instance_id`, `tenant_id` and `dp_rank` say who."""

    instance_id: _Part
    dp_rank: _Rank
    tenant_id: _Part = "default"
    type: _Text | None = None
    modelname: _Text | None = None
    block_size: _BlockSize | None = None
    lora_name: _Text | None = None


class _Question(msgspec.Struct, kw_only=True):
    model: _Name
    block_size: _BlockSize
    lora_name: _Text | None = None
    lora_id: int | None = None
    tenant_id: _Part = "default"
    instance_id: _Part | None = None
    cache_salt: _Text | None = None

    @property
    def context(self) -> Context:
        return Context(self.tenant_id, self.model, self.lora_name or "", self.block_size, self.cache_salt or "")


class QueryBody(_Question, kw_only=True):
    """A prompt."""

    token_ids: list[_Token]


class QueryByHashBody(_Question, kw_only=True):
    """A prompt's hashes; `block_hash` is what older clients call them."""

    seq_hashes: list[_Hash] | None = None
    block_hash: list[_Hash] | None = None


def make_app(indexer: KvIndexer, reader: KvEventReader) -> FastAPI:
    """An app that closes the reader in the end."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(reader.close)

    app = FastAPI(title="longctx kv-index", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.include_router(indexer_router(indexer, reader))

    @app.exception_handler(ApiError)
    async def failed(request: Request, error: ApiError) -> Response:
        return error.response

    return app


def indexer_router(indexer: KvIndexer, reader: KvEventReader) -> APIRouter:
    """Its routes; whoever may call them decides whom this process connects to."""
    router = APIRouter(tags=["index"])

    @router.post("/register")
    async def register(request: Request) -> Response:
        """Read a publisher's events from now on."""
        body = await _read(request, RegisterBody)
        kind = body.type.lower()
        if kind not in _TYPES:
            raise ApiError(400, f"type must be vLLM, SGLang, longctx or Mooncake, got {body.type[:80]!r}", "type")
        names = body.instance_id, body.tenant_id, body.dp_rank, body.modelname, body.block_size
        publisher = Publisher(*names, body.lora_name or "", body.additionalsalt or "", kind == "mooncake")
        if len(indexer.publishers) >= _MOST_PUBLISHERS:
            raise ApiError(429, f"{_MOST_PUBLISHERS} publishers are registered already", "instance_id", retry_after=60)
        try:
            check_endpoint("endpoint", body.endpoint)
            if body.replay_endpoint:
                check_endpoint("replay_endpoint", body.replay_endpoint)
        except ValueError as error:
            raise ApiError(400, str(error), str(error).split()[0]) from error
        indexer.register(publisher)  # first: its events may come at once
        reader.add(publisher.name, body.endpoint, body.replay_endpoint or None)
        return _json({"status": "registered successfully", "instance_id": body.instance_id})

    @router.post("/unregister")
    async def unregister(request: Request) -> Response:
        """Read its events no more, and forget what it has."""
        body = await _read(request, UnregisterBody)
        name = f"{body.instance_id}|{body.tenant_id}|{body.dp_rank}"
        if name not in {publisher.name for publisher in indexer.publishers}:
            raise ApiError(404, f"no publisher is registered as {name!r}", "instance_id")
        indexer.unregister(name)
        reader.remove(name)
        return _json({"status": "unregistered successfully", "removed_instances": [name]})

    @router.post("/query")
    async def query(request: Request) -> Response:
        """What instances have of a prompt."""
        body = await _read(request, QueryBody)
        _check(body)

        def hits() -> dict[str, InstanceHits]:
            tokens = np.array(body.token_ids, "<u4").tobytes()
            hashes = sequence_hashes(tokens, body.block_size, indexer.seed)
            return indexer.hits(body.context, hashes, body.instance_id)

        return _answer(body, await run_in_threadpool(hits))

    @router.post("/query_by_hash")
    async def query_by_hash(request: Request) -> Response:
        """What instances have of a prompt whose blocks' hashes the client has computed."""
        body = await _read(request, QueryByHashBody)
        _check(body)
        hashes = body.seq_hashes if body.seq_hashes is not None else body.block_hash
        if hashes is None or (body.seq_hashes is not None and body.block_hash is not None):
            raise ApiError(400, "seq_hashes must be given, or block_hash, and not both", "seq_hashes")
        try:
            keys = np.array(hashes, np.uint64)
        except OverflowError as error:
            raise ApiError(400, "seq_hashes must be numbers below 2^64", "seq_hashes") from error
        return _answer(body, await run_in_threadpool(indexer.hits, body.context, keys, body.instance_id))

    @router.get("/health")
    async def health() -> Response:
        """Whether it runs, and which publishers it reads."""
        states = {name: state._asdict() for name, state in reader.publishers.items()}
        for name, state in states.items():
            state["unplaced_blocks"] = indexer.unplaced(name)
        return _json({"status": "ok", "num_blocks": indexer.num_blocks, "publishers": states})

    return router


def _check(body: _Question) -> None:
    if body.lora_id is not None:
        raise ApiError(400, "lora_id must be left out: lora_name says which adapter it is", "lora_id")


def _answer(body: _Question, hits: dict[str, InstanceHits]) -> Response:
    instances = {}
    for name, (longest, ranks, (device, host, disk)) in hits.items():
        by_rank = {str(rank): tokens for rank, tokens in sorted(ranks.items())}
        instances[name] = {"longest_matched": longest, "GPU": device, "DP": by_rank, "CPU": host, "DISK": disk}
    return _json({body.tenant_id: instances})


async def _read(request: Request, kind: type[_Body]) -> _Body:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _LARGEST:
            raise ApiError(413, f"the body must be {_LARGEST} bytes at most")
        parts.append(part)
    try:
        return await run_in_threadpool(msgspec.json.decode, b"".join(parts), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`").partition("[")[0] or (text.split("`")[1] if "required field" in text else None)
        raise ApiError(
            400, f"{field}: {text}" if field else f"the body is no such JSON object: {text}", field
        ) from error


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
