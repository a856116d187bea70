"""Caches of documents that are read once, and whose pages stay in host memory and on disk for a time.

A cache is a prefix of prompts. Requests that name it (`cache_id`) have the rest; those that begin alike share pages.
They are pinned where tiers have them, up to half of each tier, and never on the devices: there they go when memory is
needed, and come back by a load. So caches take nothing from requests that run.
"""

import asyncio
import secrets
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from longctx.serving.engine.thread import EngineThread
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.request.output import Event
from longctx.serving.server.errors import ApiError
from longctx.serving.server.frontend import refusals_answered
from longctx.serving.server.request_parser import Document, Prefix

_MOST_CACHES = 1000  # of a tenant
_NO_RETRY = {"x-should-retry": "false"}


class CachePages(Struct):
    """Full pages of a document, and how many of them are on the devices, in host memory and on disk."""

    total: int
    device: int
    host: int
    disk: int


class CacheAnswer(Struct):
    """Cache as clients see it, with `status` `"reading"`, `"ready"` or `"failed"`."""

    id: str
    model: str
    status: str
    created: int
    expires_at: int
    tokens: int
    read_tokens: int
    pages: CachePages
    object: str = "cache"
    error: str | None = None


class CacheList(Struct):
    """Caches of a tenant, the newest first."""

    data: list[Any]
    object: str = "list"


class CacheDeleted(Struct):
    id: str
    object: str = "cache.deleted"
    deleted: bool = True


@dataclass(eq=False)
class Cache:
    """Document that is kept."""

    prefix: Prefix
    document: Document
    created: float  # seconds since 1970
    request_id: str = ""
    status: str = "reading"
    error: str | None = None
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def keys(self) -> list[Key]:
        return self.document.prepared.keys

    @property
    def num_tokens(self) -> int:
        return len(self.document.prepared.tokens)


class Caches:
    """Caches of a server, for the event loop's thread."""

    def __init__(self, thread: EngineThread, model_name: str, quota: int | None, max_ttl: float) -> None:
        self._thread, self._model_name, self._quota, self._max_ttl = thread, model_name, quota, max_ttl
        store = thread.engine.pages.store
        self._store = store if isinstance(store, TieredStore) else None
        self._caches: defaultdict[str, dict[str, Cache]] = defaultdict(dict)  # by tenant

    def create(self, tenant: str, document: Document) -> CacheAnswer:
        """Begin to read a document, and keep its pages."""
        self._check_room(tenant, document)
        cache_id = f"cache_{secrets.token_hex(16)}"
        cache = Cache(document.prefix(cache_id), document, time.time())
        loop = asyncio.get_running_loop()
        self._thread.engine.pages.pin(cache.keys, document.ttl)
        try:
            with refusals_answered():
                cache.request_id = self._thread.submit(
                    document.prepared, lambda events: loop.call_soon_threadsafe(self._note, cache, events)
                )
        except BaseException:
            self._unpin(cache)
            raise
        self._caches[tenant][cache_id] = cache
        cache.timer = loop.call_later(document.ttl, self._remove, tenant, cache)
        return self._answer(cache)

    def get(self, tenant: str, cache_id: str) -> CacheAnswer:
        """Return a tenant's cache; raise ApiError if it has none of this id."""
        return self._answer(self._find(tenant, cache_id))

    def of(self, tenant: str) -> list[CacheAnswer]:
        """Return a tenant's caches, the newest first."""
        return [self._answer(cache) for cache in reversed(self._own(tenant).values())]

    def delete(self, tenant: str, cache_id: str) -> None:
        """Let a cache's pages be evicted when their turn comes; raise ApiError if the tenant has none of this id."""
        self._remove(tenant, self._find(tenant, cache_id))

    def prefix(self, tenant: str, cache_id: str) -> Prefix:
        """Return what a cache puts before prompts; raise ApiError if the tenant has none of this id."""
        return self._find(tenant, cache_id).prefix

    def close(self) -> None:
        """Read no further."""
        for cache in self._all:
            if cache.status == "reading":
                self._thread.cancel(cache.request_id)

    @property
    def num_caches(self) -> int:
        return len(self._all)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(cache.num_tokens for cache in self._all)

    @property
    def _all(self) -> list[Cache]:
        return [cache for own in tuple(self._caches.values()) for cache in tuple(own.values())]

    def _own(self, tenant: str) -> dict[str, Cache]:
        return self._caches.get(tenant, {})

    def _check_room(self, tenant: str, document: Document) -> None:
        if self._store is None:
            message = "caches need tiers: start the server with --kv-host-bytes"
            raise ApiError(409, message, code="caches_are_off", headers=_NO_RETRY)
        if document.ttl > self._max_ttl:
            raise ApiError(400, f"ttl must be at most {self._max_ttl:g} seconds, got {document.ttl:g}", "ttl")
        count, page_size = len(document.prepared.tokens), self._store.layout.page_size
        if not document.prepared.keys:
            message = f"a document must have at least {page_size} tokens, which is a page, got {count}"
            raise ApiError(400, message, "prompt" if document.messages is None else "messages")
        own = self._own(tenant)
        total = count + sum(cache.num_tokens for cache in own.values())
        if self._quota is not None and total > self._quota:
            message = f"the documents of one tenant may have {self._quota:,} tokens together: with this one {total:,}"
            raise ApiError(429, message, code="cache_quota_exceeded", headers=_NO_RETRY)
        if len(own) >= _MOST_CACHES:
            message = f"a tenant may have {_MOST_CACHES:,} caches"
            raise ApiError(429, message, code="cache_quota_exceeded", headers=_NO_RETRY)
        room = self._store.pinnable_pages * page_size
        if count + self.num_tokens > room:
            message = f"all documents together may have {room:,} tokens, half of the largest tier: there is no room"
            raise ApiError(503, message, code="caches_are_full", headers=_NO_RETRY)

    def _find(self, tenant: str, cache_id: str) -> Cache:
        cache = self._own(tenant).get(cache_id)
        if cache is None:
            raise ApiError(404, f"there is no cache {cache_id[:80]!r}", "cache_id", "cache_not_found")
        return cache

    def _note(self, cache: Cache, events: list[Event]) -> None:
        output = events[-1].output
        if output is not None:
            is_read = output.finish_reason in ("stop", "length")
            cache.status = "ready" if is_read else "failed"
            cache.error = None if is_read else output.error or "it was cancelled before it was read"

    def _remove(self, tenant: str, cache: Cache) -> None:
        if self._own(tenant).pop(cache.prefix.cache_id, None) is not None:
            if cache.timer is not None:
                cache.timer.cancel()
            if cache.status == "reading":
                self._thread.cancel(cache.request_id)
            self._unpin(cache)

    def _unpin(self, cache: Cache) -> None:
        """Let pages go, but for those of other caches."""
        pages, now = self._thread.engine.pages, time.time()
        pages.pin(cache.keys, 0.0)
        kept = set(cache.keys)
        for other in self._all:
            left = other.created + other.document.ttl - now
            if left > 0 and not kept.isdisjoint(other.keys):
                pages.pin(other.keys, left)

    def _answer(self, cache: Cache) -> CacheAnswer:
        assert self._store is not None
        prepared, pool = cache.document.prepared, self._thread.engine.core.pool
        tiers = self._store.count_by_tier(cache.keys)
        device = sum(pool.find(key) is not None for key in cache.keys)
        read = len(prepared.tokens) if cache.status == "ready" else 0
        if cache.status == "reading":
            try:
                read, _ = self._thread.engine.requests[cache.request_id].progress
            except KeyError:  # it ends just now
                read = len(prepared.tokens)
        return CacheAnswer(
            cache.prefix.cache_id,
            self._model_name,
            cache.status,
            int(cache.created),
            int(cache.created + cache.document.ttl),
            len(prepared.tokens),
            read,
            CachePages(len(cache.keys), device, tiers["host"], tiers["disk"]),
            error=cache.error,
        )
