"""Responses API of OpenAI: responses, which the server keeps, so that later ones continue them."""

from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from longctx.serving.server.auth import client_of
from longctx.serving.server.calls import ParsedCall
from longctx.serving.server.errors import ApiError
from longctx.serving.server.frontend import Frontend
from longctx.serving.server.preparer import unless_gone
from longctx.serving.server.response_writer import ResponseWriter
from longctx.serving.server.responses_body import ResponsesBody
from longctx.serving.server.responses_writer import ResponsesWriter
from longctx.serving.server.routes.openai import origin_of, respond
from longctx.serving.server.schemas import body_of


def responses_router(server: Frontend) -> APIRouter:
    """Return the routes of responses. Each tenant has its own, and has no access to those of others."""
    router = APIRouter(tags=["responses"])
    store = server.responses

    @router.post("/v1/responses", openapi_extra=body_of(ResponsesBody))
    async def create_response(request: Request) -> Response:
        """Answer a conversation, and keep the answer unless `store` is false."""
        tenant = client_of(request).tenant

        def keep(call: ParsedCall, writer: ResponseWriter) -> None:
            assert isinstance(writer, ResponsesWriter)
            assert isinstance(call.source, ResponsesBody)
            if call.source.is_stored and writer.answer is not None:
                session = call.requests[0].request.session_id or writer.id
                store.add(tenant, call.source, writer.answer, session)

        return await respond(server, request, "responses", keep)

    @router.post("/v1/responses/input_tokens", openapi_extra=body_of(ResponsesBody))
    async def count_input_tokens(request: Request) -> dict[str, Any]:
        """Count the tokens of a conversation, as it would be answered."""
        async with server.bodies.read(request) as body:
            call = await unless_gone(request, server.read("responses", body, origin_of(request)))
        return {"object": "response.input_tokens", "input_tokens": len(call.requests[0].tokens)}

    @router.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str, stream: bool = False) -> Response:
        """Return a response that is kept."""
        if stream:
            raise ApiError(400, "stream must be false: events of a response are sent once, as it is made", "stream")
        return _json(store.get(client_of(request).tenant, response_id))

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
        """Forget a response. Those that continue it remain."""
        store.delete(client_of(request).tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        request: Request,
        response_id: str,
        limit: int = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List the items that a response was made from, those of earlier turns among them."""
        found = store.input_items(client_of(request).tenant, response_id, limit, order, after)
        return _json(msgspec.json.encode(found))

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Refuse: a response is cancelled when its client leaves."""
        store.get(client_of(request).tenant, response_id)
        message = "response_id must be of a background response, and none is: to cancel one, close its connection"
        raise ApiError(400, message, "response_id")

    return router


def _json(answer: bytes) -> Response:
    return Response(answer, media_type="application/json")
