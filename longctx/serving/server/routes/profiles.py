"""Traces of the devices."""

import asyncio
import time
from pathlib import Path

import jax
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from longctx.serving.server.errors import ApiError
from longctx.serving.server.gate import visitor_of
from longctx.serving.server.server import Server


def profiles_router(server: Server) -> APIRouter:
    """The routes that need the key of an administrator, where there is one."""
    router = APIRouter(tags=["administration"])
    profiling = asyncio.Lock()

    @router.post("/start_profile")
    async def start_profile(request: Request) -> JSONResponse:
        """Begin a trace of `jax.profiler`, in the folder that the server was started with."""
        folder = _folder(server, request)
        async with profiling:
            try:
                await asyncio.to_thread(jax.profiler.start_trace, folder / time.strftime("%Y-%m-%d-%H-%M-%S"))
            except RuntimeError as error:
                raise ApiError(409, str(error), headers={"x-should-retry": "false"}) from None
        return JSONResponse({"status": "started"})

    @router.post("/stop_profile")
    async def stop_profile(request: Request) -> JSONResponse:
        """End the trace, and write it."""
        _folder(server, request)
        async with profiling:
            try:
                await asyncio.to_thread(jax.profiler.stop_trace)
            except RuntimeError as error:
                raise ApiError(409, str(error), headers={"x-should-retry": "false"}) from None
        return JSONResponse({"status": "stopped"})

    return router


def _folder(server: Server, request: Request) -> Path:
    if not visitor_of(request).is_admin:
        raise ApiError(403, "this needs the key of an administrator", code="admin_key_needed")
    if server.settings.profile_dir is None:
        raise ApiError(403, "the server was started without --profile-dir", code="profiles_are_off")
    return server.settings.profile_dir
