"""Authentication of the senders of requests; each request gets an id.

Closed by default: without a key only the paths that are listed here answer, where keys are needed.
"""

import hashlib
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longctx.serving.server.errors import ApiError
from longctx.serving.server.settings import ApiKey, ServerSettings, is_loopback

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping"})
OPEN_PREFIXES = ("/page/static/",)
"""Paths that need no key: whether the server lives, and the page's own files."""

_CONTROL_PATHS = frozenset({"/start_profile", "/stop_profile", "/resume", "/drain", "/kv_swap"})
_CONTROL_PREFIXES = ("/cluster/",)
ADMIN_PATHS = _CONTROL_PATHS | {"/load", "/loads", "/v1/loads", "/get_load", "/abort_requests", "/abort_request"}
"""Paths that need the key of an administrator, where there is one; those of control, where there is any key.

Without any keys, clients on the server's own host alone are administrators.
"""

TENANT_HEADER = "x-longctx-tenant"
"""Header in which administrators, such as a router, name the tenant of a request, percent-encoded."""

_FORWARDED = ("forwarded", "origin", "via", "x-forwarded-for")  # headers of proxies and web pages, which act for others
_REQUEST_ID = re.compile(r"[!-~]{1,256}")


def _digests(keys: Sequence[ApiKey]) -> dict[bytes, str]:
    """Return names by the digests of keys: how long a look-up takes tells nothing of a key."""
    return {hashlib.sha256(key.key.encode()).digest(): key.name for key in keys}


@dataclass
class Client:
    """Sender of a request: its tenant, whether it is an administrator, and the request's id.

    Attributes:
      request_id: unique; it begins with the id that the client sent, if that is of visible characters and not too long.
      shown_id: what the client sent, or else the same, which the answer's header has.
    """

    tenant: str
    is_admin: bool
    request_id: str
    shown_id: str


def client_of(request: Request) -> Client:
    """Return the sender of a request."""
    return request.scope["state"]["client"]


class AuthMiddleware:
    """ASGI middleware that authenticates requests and refuses those that are too large."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._users, self._admins = _digests(settings.api_keys), _digests(settings.admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sent = headers.get("x-request-id", "")
        request_id = uuid.uuid4().hex
        shown = request_id
        if _REQUEST_ID.fullmatch(sent):
            request_id, shown = f"{sent}-{request_id[:8]}", sent

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = shown
            await send(message)

        try:
            tenant, is_admin = self._admit(scope, headers)
            if TENANT_HEADER in headers:
                if not is_admin:
                    message = f"the header {TENANT_HEADER} needs the key of an administrator"
                    raise ApiError(403, message, code="admin_key_needed")
                tenant = unquote(headers[TENANT_HEADER])
        except ApiError as refused:
            await refused.response(scope, receive, send_with_id)
            return
        scope.setdefault("state", {})["client"] = Client(tenant, is_admin, request_id, shown)
        await self._app(scope, receive, send_with_id)

    def _admit(self, scope: Scope, headers: Headers) -> tuple[str, bool]:
        """Return the tenant, and whether it is an administrator; raise ApiError if it has no access."""
        if self._settings.allow_hosts and _host(headers) not in self._settings.allow_hosts:
            message = "the server is not known by this name: see its flag --allow-host"
            raise ApiError(421, message, code="unknown_host", headers={"connection": "close"})
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._settings.max_body_bytes:
            raise too_large(self._settings.max_body_bytes)
        path = scope["path"].rstrip("\n")  # routes match a path with a line feed, too
        kind, _, key = headers.get("authorization", "").partition(" ")
        sent = key.strip().encode("latin-1") if kind.lower() == "bearer" else b""
        digest = hashlib.sha256(sent).digest()
        user, admin = self._users.get(digest), self._admins.get(digest)
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
            return user or "", False
        if admin is not None:
            return admin, True
        is_control = path in _CONTROL_PATHS or path.startswith(_CONTROL_PREFIXES)
        has_keys = bool(self._users or self._admins)
        if not has_keys and _is_local(scope, headers):
            return "", True
        needs_admin = is_control or (path in ADMIN_PATHS and (bool(self._admins) or not has_keys))
        if user is None and (self._users or (needs_admin and has_keys)):
            message = "a key must come in the header `Authorization: Bearer KEY`"
            if sent:
                message = "the key is not known"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        if needs_admin:
            message = "this needs the key of an administrator"
            if not has_keys:
                message = (
                    "a server without keys lets clients on its own host alone do this: see its flag --admin-key-file"
                )
            raise ApiError(403, message, code="admin_key_needed")
        return user or "", False


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Whether a client on this host asks, by its address and the name that it calls the server, for itself."""
    address, _ = scope.get("client") or ("", 0)
    is_forwarded = any(name in headers for name in _FORWARDED)
    return is_loopback(address) and is_loopback(_host(headers)) and not is_forwarded


def _host(headers: Headers) -> str:
    """Return the name in the header Host, without a port; of an IPv6 address without its brackets."""
    name, _, port = headers.get("host", "").rpartition(":")
    if not port.isdecimal():
        name = headers.get("host", "")
    return name.strip("[]").lower()


def too_large(most: int) -> ApiError:
    """Return the answer to a body of more bytes than allowed."""
    headers = {"connection": "close"}
    return ApiError(413, f"the body must be at most {most} bytes", code="body_too_large", headers=headers)
