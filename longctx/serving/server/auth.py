"""Authentication of the senders of requests; each request gets an id.

Closed by default: without a key only the paths that are listed here answer, where keys are needed.
"""

import base64
import hashlib
import hmac
import logging
import os
import re
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longctx.serving.server.access import HttpRequests, Usage
from longctx.serving.server.errors import ApiError, error_response
from longctx.serving.server.limits import TenantLimit
from longctx.serving.server.logs import AuditLog
from longctx.serving.server.settings import SCOPES, ApiKey, ServerSettings, is_loopback
from longctx.serving.server.settings import Scope as KeyScope

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping", "/cluster/challenge"})
OPEN_PREFIXES = ("/page/static/",)
"""Paths that need no key: whether the server lives, whether a router knows the secret, and the page's own files."""

_LOADS, _ABORTS = ("/loads", "/v1/loads", "/get_load"), ("/abort_requests", "/abort_request")
_SCOPES: dict[str, KeyScope] = {
    **dict.fromkeys(("/metrics", "/predictor", *_LOADS), "metrics"),
    **dict.fromkeys(("/cluster/register", "/cluster/remove"), "join"),
    **dict.fromkeys(("/resume", "/kv_swap"), "migrate"),
    **dict.fromkeys(("/start_profile", "/stop_profile", "/drain"), "admin"),
}
_ADMIN_PREFIX = "/cluster/"
_OF_ANY_KEY = frozenset(
    {"/load", *_ABORTS, "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/version"}
)
"""Paths that need no scope: those of loads and aborts are about the client's own requests, without one."""

TENANT_HEADER = "x-longctx-tenant"
"""Header in which keys with the scope `migrate`, such as a router's, name the tenant of a request, percent-encoded."""

_FORWARDED = ("forwarded", "origin", "via", "x-forwarded-", "x-real-ip")
"""Beginnings of headers of proxies and web pages, which act for others."""
_REQUEST_ID = re.compile(r"[!-~]{1,256}")
_LOOK = 1.0  # seconds between two looks at whether files of keys have changed
_GRANT, _GRANT_SECONDS = "grant.", 600.0
_GRANTED = ("/v1/completions", "/server_info")  # what an instance asks another one that reads a prompt


@dataclass
class Client:
    """Sender of a request: its tenant, its rights, and the request's id.

    Attributes:
      scopes: of its key.
      request_id: unique; it begins with the id that the client sent, if that is of visible characters and not too long.
      shown_id: what the client sent, or else the same, which the answer's header has.
      name: of its key. Empty: it has none.
      limit: of its tenant; None: of requests that another server has counted, or that no key sends.
      subject: what an administrative action is done to, for the audit log.
      is_granted: whether a router lets it have a prompt of this tenant read here, and do nothing else.
      usage: of its call, if it makes one.
      uncount: is called if the server could not serve the request, which then does not count for `limit`.
    """

    tenant: str
    scopes: frozenset[KeyScope]
    request_id: str
    shown_id: str
    name: str = ""
    limit: TenantLimit | None = None
    subject: str = ""
    is_granted: bool = False
    usage: Usage | None = None
    uncount: Callable[[], object] = lambda: None

    def may(self, *scopes: KeyScope) -> bool:
        """Return whether its key has one of these scopes, or is an administrator's."""
        return "admin" in self.scopes or not self.scopes.isdisjoint(scopes)

    @property
    def is_admin(self) -> bool:
        """Whether its key is an administrator's."""
        return "admin" in self.scopes

    @property
    def sees_all(self) -> bool:
        """Whether it sees figures and ids of all tenants' requests."""
        return self.may("metrics", "migrate")


def client_of(request: Request) -> Client:
    """Return the sender of a request."""
    client: Client = request.scope["state"]["client"]
    return client


def make_grant(key: str, tenant: str) -> str:
    """Return a token with which an instance reads a tenant's prompts at the one that has this key, for ten minutes.

    A router makes it, so that an instance speaks for tenants whose requests it has, and for no other.
    """
    payload = msgspec.json.encode(_Grant(tenant, time.time() + _GRANT_SECONDS))
    return ".".join((_GRANT[:-1], _encode(payload), _encode(_sign(key, payload))))


class _Grant(NamedTuple):
    tenant: str
    expires: float


def _sign(key: str, payload: bytes) -> bytes:
    return hmac.digest(hashlib.sha256(b"longctx grant " + key.encode()).digest(), payload, "sha256")


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)


class KeyRing:
    """Keys that open a server, which may change while it runs. For the event loop.

    Args:
      more: keys that stay when the others are read again.
      needs_key: whether clients need one; else administrators alone do.

    Attributes:
      has_keys: whether there has been any key. A server that needs keys goes on to need them.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey],
        more: Sequence[ApiKey] = (),
        needs_key: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._salt, self._more = secrets.token_bytes(32), tuple(more)
        self.has_keys, self.needs_key = False, needs_key
        self._limits: dict[str, TenantLimit] = {}
        self._paths: tuple[Path, ...] = ()
        self._read: Callable[[], Sequence[ApiKey]] | None = None
        self._seen: list[tuple[int, int, int] | None] = []  # none yet: files may have changed since they were read
        self._look_at = clock()
        self._set(keys)

    def watch(self, paths: Sequence[Path], read: Callable[[], Sequence[ApiKey]]) -> None:
        """Read keys again when one of these files has changed; `read` raises ValueError if it can't."""
        self._paths, self._read = tuple(paths), read

    def reload(self) -> None:
        """Read keys again; those of now stay where that fails."""
        if self._read is None:
            return
        self._seen = _stamps(self._paths)
        try:
            self._set(self._read())
        except ValueError as error:
            logger.error("longctx: the keys stay as they were: %s", error)
        else:
            logger.info("longctx: the keys are read again")

    def find(self, sent: bytes) -> ApiKey | None:
        """Return the key that a client sends; None: there is none like it."""
        now = self._clock()
        if self._paths and now >= self._look_at:
            self._look_at = now + _LOOK
            if _stamps(self._paths) != self._seen:
                self.reload()
        digest = hashlib.sha256(sent).digest()
        # The table is of digests that nobody can foresee, so how long a look-up takes tells nothing of a key.
        found = self._keys.get(self._salted(digest))
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None

    def granted(self, sent: str) -> str | None:
        """Return the tenant of what `make_grant` made with one of the keys; None: it is none, or has expired."""
        try:
            _, payload, signature = (_decode(part) if i else b"" for i, part in enumerate(sent.split(".")))
            signers = [key for key in self._keys.values() if _may_grant(key)]
            if not any(hmac.compare_digest(_sign(key.key, payload), signature) for key in signers):
                return None
            grant = msgspec.json.decode(payload, type=_Grant)
        except ValueError:  # msgspec's and base64's errors are such
            return None
        return grant.tenant if time.time() < grant.expires else None

    def limit(self, key: ApiKey, settings: ServerSettings) -> TenantLimit:
        """Return the limits of a key's tenant."""
        found = self._limits.setdefault(key.tenant, TenantLimit())
        found.requests = key.requests or settings.requests_per_minute
        found.tokens = key.tokens or settings.tokens_per_minute
        return found

    def _set(self, keys: Sequence[ApiKey]) -> None:
        self._keys = {self._salted(key.digest): key for key in (*self._more, *keys)}
        self.has_keys = self.has_keys or bool(self._keys)

    def _salted(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._salt, digest_size=16).digest()


def _may_grant(key: ApiKey) -> bool:
    return not (key.has_expired or key.is_hashed) and bool(key.scopes and key.scopes & {"migrate", "admin"})


def _stamps(paths: Sequence[Path]) -> list[tuple[int, int, int] | None]:
    """Return what changes with the contents of files: inode, time and size; None: it is not there."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            status = os.stat(path)
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        except OSError:
            found.append(None)
    return found


class AuthMiddleware:
    """ASGI middleware that authenticates requests, refuses those that may not be, and writes the audit log.

    Args:
      count_refusal: is called with refusals by limits of tenants.
      http: notes all requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        keys: KeyRing,
        audit: AuditLog,
        count_refusal: Callable[[ApiError], object] = lambda error: None,
        http: HttpRequests | None = None,
    ) -> None:
        self._app, self._settings, self._keys, self._audit = app, settings, keys, audit
        self._http = http or HttpRequests(False)
        self._count_refusal = count_refusal

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
        client = Client("", frozenset(), request_id, shown)
        path = scope["path"].rstrip("\n")  # routes match a path with a line feed, too
        status, reason, begun = 500, None, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, answer = message["status"], MutableHeaders(scope=message)
                answer["x-request-id"] = shown
                if status == 503:
                    client.uncount()
                if client.limit is not None:
                    answer.update(client.limit.headers)
            await send(message)

        app = self._app
        try:
            self._admit(scope, headers, path, client)
        except ApiError as refused:
            app, reason = error_response(path, refused), refused.message
        scope.setdefault("state", {})["client"] = client
        try:
            await app(scope, receive, send_with_id)
        finally:
            self._note(scope, path, client, status, reason)
            if path not in OPEN_PATHS or status != 200:
                route, seconds = getattr(scope.get("route"), "path", None), time.monotonic() - begun
                self._http.note(scope["method"], path, route, status, seconds, client.tenant, client.usage)

    def _admit(self, scope: Scope, headers: Headers, path: str, client: Client) -> None:
        """Set who a client is and what it may do; raise ApiError if it has no access."""
        if self._settings.allow_hosts and _host(headers) not in self._settings.allow_hosts:
            message = "the server is not known by this name: see its flag --allow-host"
            raise ApiError(421, message, code="unknown_host", headers={"connection": "close"})
        is_open = path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)
        self._identify(scope, headers, client, is_open)
        if is_open:
            return
        needed = scope_of(path)
        if not client.name and not client.is_admin and path in (*_LOADS, *_ABORTS, "/load"):
            needed = "admin"  # of who has no key, nothing is known as its own
        if needed is not None and not client.may(needed):
            if client.name or client.is_granted or not self._keys.has_keys:
                message = f"this needs the key of an administrator, or one with the scope {needed}"
                if not self._keys.has_keys:
                    message = (
                        "a server without keys lets clients on its own host alone do this: see its flag "
                        "--admin-key-file"
                    )
                raise ApiError(403, message, code="admin_key_needed")
            raise _unknown(headers)
        if client.is_granted and path not in _GRANTED:
            raise ApiError(403, "a grant opens /v1/completions and /server_info alone", code="admin_key_needed")
        if TENANT_HEADER in headers:
            if not client.may("migrate"):
                message = f"the header {TENANT_HEADER} needs the key of an administrator, or one with the scope migrate"
                raise ApiError(403, message, code="admin_key_needed")
            client.tenant, client.limit = unquote(headers[TENANT_HEADER]), None
        if client.limit is not None:
            if needed != "generate":
                client.limit = None
            elif scope["method"] == "POST":
                try:
                    client.uncount = client.limit.take_request()
                except ApiError as refused:
                    self._count_refusal(refused)
                    raise

    def _identify(self, scope: Scope, headers: Headers, client: Client, is_open: bool) -> None:
        """Set who a client is; raise ApiError if it must have a key, and has none."""
        keys = self._keys
        if not keys.has_keys:
            client.scopes = _ALL if _is_local(scope, headers) else _ANONYMOUS
            return
        kind, _, sent = headers.get("authorization", "").partition(" ")
        # Anthropic's clients send the key in a header of its own.
        sent = sent.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "").strip()
        found, tenant = keys.find(sent.encode("latin-1")), None
        if found is None and sent.startswith(_GRANT):
            tenant = keys.granted(sent)
        if tenant is not None:
            client.tenant, client.scopes, client.is_granted = tenant, _ANONYMOUS - {"metrics"}, True
        elif found is not None and not found.has_expired:
            assert found.scopes is not None
            client.tenant, client.scopes, client.name = found.tenant, found.scopes, found.name
            client.limit = keys.limit(found, self._settings)
        elif is_open:
            return
        elif found is not None:
            client.name = found.name
            raise _unknown(headers, "the key has expired")
        elif keys.needs_key:
            raise _unknown(headers)
        else:
            client.scopes = _ANONYMOUS

    def _note(self, scope: Scope, path: str, client: Client, status: int, reason: str | None) -> None:
        """Write what the audit log is for."""
        if status == 401:
            event = "authentication_failed"
        elif status in (403, 421, 429):
            event = "refused"
        elif _is_action(path, client) and path not in OPEN_PATHS and scope["method"] not in ("GET", "HEAD"):
            event = "action"
        else:
            return
        address = scope.get("client")
        self._audit.write(
            event,
            key=client.name or None,
            tenant=client.tenant or None,
            address=address[0] if address else None,
            method=scope["method"],
            path=path,
            subject=client.subject or None,
            status=status,
            reason=reason,
            request_id=client.shown_id,
        )


_ALL: frozenset[KeyScope] = frozenset(SCOPES)
_ANONYMOUS: frozenset[KeyScope] = frozenset({"generate", "metrics"})


def scope_of(path: str) -> KeyScope | None:
    """Return the scope that a path needs; None: any key will do."""
    if path in _SCOPES:
        return _SCOPES[path]
    if path.startswith(_ADMIN_PREFIX):
        return "admin"
    return None if path in _OF_ANY_KEY else "generate"


def _is_action(path: str, client: Client) -> bool:
    """Return whether requests other than GET change something for others, as most registrations do not."""
    needed = scope_of(path)
    return needed == "admin" or (needed in ("join", None) and bool(client.subject))


def _unknown(headers: Headers, problem: str = "the key is not known") -> ApiError:
    is_there = headers.get("authorization", "").lower().startswith("bearer ")
    message = problem if is_there else "a key must come in the header `Authorization: Bearer KEY`"
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Whether a client on this host asks, by its address and the name that it calls the server, for itself."""
    address, _ = scope.get("client") or ("", 0)
    is_forwarded = any(name.startswith(_FORWARDED) for name in headers.keys())  # noqa: SIM118
    return is_loopback(address) and is_loopback(_host(headers)) and not is_forwarded


def _host(headers: Headers) -> str:
    """Return the name in the header Host, without a port; of an IPv6 address without its brackets."""
    name, _, port = headers.get("host", "").rpartition(":")
    if not port.isdecimal():
        name = headers.get("host", "")
    return name.strip("[]").lower()
