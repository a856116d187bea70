"""What the engine is and how busy it is, by the names under which clients, routers and balancers ask for it."""

import dataclasses
import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from longctx.serving.predictor.file import predictor_to_dict
from longctx.serving.server.errors import ApiError
from longctx.serving.server.server import Server


def introspection_router(server: Server) -> APIRouter:
    """The routes that change nothing."""
    router = APIRouter(tags=["introspection"])

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> JSONResponse:
        """The engine's sizes and rules. No path, no key."""
        info = _server_info(server)
        if server.transfers is not None:
            info |= {"kv_transfer": server.transfers.info(), "kv_events": server.observers.kv_events}
        return JSONResponse(info)

    @router.get("/predictor")
    async def predictor() -> JSONResponse:
        """By what the engine predicts the seconds of its steps, as it corrects that now: see `predictor_from_dict`."""
        own = server.engine.predictor
        try:
            found = predictor_to_dict(own.predictor)
        except ValueError as error:
            raise ApiError(409, str(error), code="custom_predictor") from None
        factors = {"prompt_factor": own.prompt_factor, "decode_factor": own.decode_factor}
        return JSONResponse({"predictor": found, **factors})

    @router.get("/load")
    async def load() -> dict[str, Any]:
        """How busy the server is: requests that have not ended, and more."""
        found = _load(server)
        more = {"request_ids": server.request_ids, "draining": server.is_draining, "time": time.time()}
        return {"server_load": found["num_reqs"], **found, **more}

    @router.get("/loads")
    @router.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        """The same, as a list of one."""
        return {"timestamp": time.time(), "version": server.version, "dp_rank_count": 1, "loads": [_load(server)]}

    @router.get("/get_load")
    async def get_load() -> list[dict[str, Any]]:
        """The same, as older routers ask for it."""
        return [_load(server)]

    return router


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
