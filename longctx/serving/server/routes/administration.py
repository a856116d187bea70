"""Routes for monitors, balancers and administrators: health, metrics, load, sizes, aborts and profiles."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import jax
import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from longctx.serving.predictor.file import predictor_to_dict
from longctx.serving.server.auth import client_of
from longctx.serving.server.errors import ApiError
from longctx.serving.server.frontend import Frontend
from longctx.serving.server.schemas import AbortBody, body_of
from longctx.serving.server.server import Server

_NO_RETRY = {"x-should-retry": "false"}
_LINES = "application/x-ndjson"
_ALIVE_SECONDS = 1.0  # after which a line comes again that has not changed


def monitoring_router(server: Frontend) -> APIRouter:
    """Return the routes that an engine's server and a router of a cluster have in common.

    Those of health wait for nothing, so they answer while a step runs or compiles.
    """
    router = APIRouter(tags=["monitoring"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    @router.head("/ping", include_in_schema=False)
    @router.post("/ping", include_in_schema=False)
    @router.get("/ping")
    async def health() -> Response:
        """Return 200 while the engine lives, though it may be busy or warming up; 503: the process should be ended."""
        return _status(server.problem)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        """Return 200 while requests are taken: after warming up, and before shutting down."""
        problem = _problem(server)
        if problem is None and server.is_draining:
            problem = "the server is shutting down"
        return _status(problem)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of longctx."""
        return {"version": server.version}

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        """Describe the model."""
        return {
            "model_path": server.model_name,
            "served_model_name": server.model_name,
            "is_generation": True,
            "max_model_len": server.max_length,
            "vocab_size": server.vocab_size,
            "has_chat_template": server.chat_format.has_template,
        }

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics")
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(server.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @router.post("/abort_requests", openapi_extra=body_of(AbortBody))
    @router.post("/abort_request", openapi_extra=body_of(AbortBody))
    async def abort_requests(request: Request) -> JSONResponse:
        """End requests of the client's tenant: their answers have what there is, with `finish_reason` abort."""
        body, client = await server.bodies.fields(request, AbortBody), client_of(request)
        tenant = None if client.is_admin else client.tenant
        client.subject = f"{len(body.request_ids)} requests"
        return JSONResponse({"aborted": [name for name in body.request_ids if server.abort(name, tenant)]})

    return router


def administration_router(server: Server) -> APIRouter:
    """Return the routes of one engine: its load, its sizes and rules, and traces of its devices."""
    router = APIRouter(tags=["administration"])
    profiling = asyncio.Lock()

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info(request: Request) -> JSONResponse:
        """Return the engine's sizes and rules: no path, no key; to routers also where KV events are."""
        info = _server_info(server)
        if server.transfers is not None:
            info |= {"kv_transfer": server.transfers.info()}
            if client_of(request).may("migrate"):
                info |= {"kv_events": server.observers.kv_events}
        return JSONResponse(info)

    @router.get("/predictor")
    async def predictor() -> JSONResponse:
        """Return the predictor of the seconds of steps, with its present corrections: see `predictor_from_dict`."""
        own = server.engine.predictor
        try:
            found = predictor_to_dict(own.predictor)
        except ValueError as error:
            raise ApiError(409, str(error), code="custom_predictor") from None
        factors = {"prompt_factor": own.prompt_factor, "decode_factor": own.decode_factor}
        return JSONResponse({"predictor": found, **factors})

    @router.get("/load")
    async def load(request: Request, every: Annotated[float, Query(ge=1e-3, le=_ALIVE_SECONDS)] = 0.25) -> Response:
        """Return the load of the server; to clients without the scope `metrics` that of their own requests alone.

        To `Accept: application/x-ndjson` come lines: one whenever it has changed, at most once in `every` seconds.
        """
        client = client_of(request)
        if not client.sees_all:
            return JSONResponse(own_load(server, client.tenant))
        if _LINES in request.headers.get("accept", ""):
            return StreamingResponse(_load_lines(server, every), media_type=_LINES)
        return JSONResponse(_whole_load(server) | {"kept_streams": server.kept.names, "time": time.time()})

    @router.get("/loads")
    @router.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        """Return the same, as a list of one."""
        return {"timestamp": time.time(), "version": server.version, "dp_rank_count": 1, "loads": [_load(server)]}

    @router.get("/get_load")
    async def get_load() -> list[dict[str, Any]]:
        """Return the same, as older routers ask for it."""
        return [_load(server)]

    @router.post("/start_profile")
    async def start_profile() -> JSONResponse:
        """Begin a trace of `jax.profiler`, in the folder that the server was started with."""
        folder = _profile_folder(server) / time.strftime("%Y-%m-%d-%H-%M-%S")
        async with profiling:
            try:
                await asyncio.to_thread(jax.profiler.start_trace, folder)
            except RuntimeError as error:
                raise ApiError(409, str(error), headers=_NO_RETRY) from None
        return JSONResponse({"status": "started"})

    @router.post("/stop_profile")
    async def stop_profile() -> JSONResponse:
        """End the trace, and write it."""
        _profile_folder(server)
        async with profiling:
            try:
                await asyncio.to_thread(jax.profiler.stop_trace)
            except RuntimeError as error:
                raise ApiError(409, str(error), headers=_NO_RETRY) from None
        return JSONResponse({"status": "stopped"})

    return router


def own_load(server: Frontend, tenant: str) -> dict[str, Any]:
    """Return the load that one tenant makes."""
    calls = [call for call in server.calls.values() if call.call.requests[0].request.tenant == tenant]
    return {
        "server_load": len(calls),
        "num_reqs": len(calls),
        "request_ids": [call.shown_id for call in calls],
        "draining": server.is_draining,
        "time": time.time(),
    }


async def _load_lines(server: Server, every: float) -> AsyncIterator[bytes]:
    said, since = b"", 0.0
    while True:
        now, line = time.monotonic(), msgspec.json.encode(_whole_load(server)) + b"\n"
        if line != said or now - since >= _ALIVE_SECONDS:
            said, since = line, now
            yield line
        if server.is_draining and not server.has_calls:  # it may be about to end
            return
        await asyncio.sleep(every)


def _rounded(factor: float) -> float:
    """Round a factor to what a prediction is good for; however far that is off, a router takes it."""
    return float(f"{min(max(factor, 1e-6), 1e6):.2g}")


def _whole_load(server: Server) -> dict[str, Any]:
    """Return the load as routers of a cluster need it."""
    found, predictor = _load(server), server.engine.predictor
    factors = [_rounded(factor) for factor in (predictor.prompt_factor, predictor.decode_factor)]
    more = {"request_ids": server.request_ids, "draining": server.is_draining, "problem": _problem(server)}
    return {"server_load": found["num_reqs"], **found, **more, "factors": factors}


def _problem(server: Frontend) -> str | None:
    """Return why a server answers no requests; None: it does, unless it drains."""
    return server.problem or (None if server.is_warm else "the server is not ready yet")


def _status(problem: str | None) -> Response:
    return JSONResponse({"status": problem or "ok"}, 503 if problem else 200)


def _profile_folder(server: Server) -> Path:
    if server.settings.profile_dir is None:
        raise ApiError(403, "the server was started without --profile-dir", code="profiles_are_off")
    return server.settings.profile_dir


def _load(server: Server) -> dict[str, Any]:
    load = server.thread.load
    page_size, config = server.engine.config.page_size, server.engine.config
    return {
        "dp_rank": 0,
        "num_reqs": load.running + load.waiting,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_waiting_tokens": load.waiting_tokens,
        "num_tokens": load.pages_held * page_size,
        "num_used_tokens": load.pages_held * page_size,
        "max_total_num_tokens": load.num_pages * page_size,
        "token_usage": load.cache_usage,
        "max_running_requests": config.max_running,
        "backlog_seconds": load.backlog_seconds,
        "decoding": load.decoding,
        "decode_tokens": load.decode_tokens,
        "num_pages": load.num_pages,
        "free_pages": load.free_pages,
        "pages_by_rank": list(load.pages_by_rank),
    }


def _server_info(server: Server) -> dict[str, Any]:
    engine = server.engine
    pages = engine.page_identity
    page_size, page_hash = engine.config.page_size, engine.core.page_hash
    config = {
        field.name: getattr(engine.config, field.name)
        for field in dataclasses.fields(engine.config)
        if field.name not in ("hash_key", "policy", "slo", "tiers")
    }
    tiers = engine.config.tiers
    config["tiers"] = tiers and {"host_bytes": tiers.host_bytes, "disk_bytes": tiers.disk_bytes}  # no path
    return {
        "version": server.version,
        "served_model_name": server.model_name,
        "model_path": server.model_name,
        "max_model_len": engine.max_length,
        "vocab_size": engine.model.config.vocab_size,
        "page_size": page_size,
        "max_running": engine.config.max_running,
        "token_budget": engine.config.token_budget,
        "kv_bytes_per_token": None if pages is None else pages.layout.page_bytes // page_size,
        "keys": None if page_hash is None else page_hash.fingerprint("cluster").hex(),
        "instance": server.instance,
        "time": time.time(),
        "tp_size": engine.plan.tensor,
        "dp_size": 1,
        "num_pages": engine.num_pages * engine.plan.context,
        "max_total_num_tokens": engine.num_pages * engine.plan.context * page_size,
        "plan": dataclasses.asdict(engine.plan),
        "engine": config | {"policy": str(engine.config.policy), "slo": dataclasses.asdict(engine.config.slo)},
    }
