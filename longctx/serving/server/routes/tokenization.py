"""Prompts and tokens: `/tokenize`, `/detokenize`, and `render`, which says what would be generated from, and how."""

import dataclasses
from typing import Any

from fastapi import APIRouter, Request, Response

from longctx.serving.server.frontend import Frontend
from longctx.serving.server.read_call import Call, Kind
from longctx.serving.server.routes.generation import origin_of
from longctx.serving.server.schemas.base import body_of
from longctx.serving.server.schemas.chat import ChatBody
from longctx.serving.server.schemas.completions import CompletionBody
from longctx.serving.server.schemas.other import DetokenizeBody, TokenizeBody
from longctx.serving.server.schemas.responses import encode


def tokenization_router(server: Frontend) -> APIRouter:
    """The routes that need the tokenizer alone; long bodies are read in a process, as those of `generation`."""
    router = APIRouter(tags=["tokenization"])

    async def read(request: Request, kind: Kind) -> Any:
        async with server.bodies.read(request) as body:
            return await server.preparer.read(kind, body, origin_of(request))

    async def read_call(request: Request, kind: Kind) -> Call:
        async with server.bodies.read(request) as body:
            return await server.read(kind, body, origin_of(request))

    @router.post("/tokenize", openapi_extra=body_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The tokens of a text, or of a chat."""
        tokens, names = await read(request, "tokenize")
        answer = {"count": len(tokens), "max_model_len": server.max_length, "tokens": tokens}
        return _json(answer | {"token_strs": names})

    @router.post("/detokenize", openapi_extra=body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        return _json({"prompt": await read(request, "detokenize")})

    @router.post("/v1/completions/render", openapi_extra=body_of(CompletionBody))
    async def render_completions(request: Request) -> Response:
        """The tokens of each prompt, and how others would be drawn."""
        return _json(_rendered(server, await read_call(request, "completions")))

    @router.post("/v1/chat/completions/render", openapi_extra=body_of(ChatBody))
    async def render_chat(request: Request) -> Response:
        """The tokens of a chat by its template, and how others would be drawn."""
        return _json(_rendered(server, await read_call(request, "chat"))[0])

    return router


def _json(answer: Any) -> Response:
    return Response(encode(answer), media_type="application/json")


def _rendered(server: Frontend, call: Call) -> list[dict[str, Any]]:
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
