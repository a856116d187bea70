"""Caches of documents that are read once, and whose pages stay in host memory and on disk for a time.

A cache is a prefix of prompts. Requests that name it (`cache_id`) have the rest; those that begin alike share pages.
Requests may ask, too, that pages of their own prompts are kept (`cache_control`); a tenant's quota counts both. They
are pinned where tiers have them, up to half of each tier, and never on the devices: there they go when memory is
needed, and come back by a load. So what is kept takes nothing from requests that run.
"""

import asyncio
import heapq
import itertools
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import Struct

from longctx.serving.engine.active_request import Sink
from longctx.serving.engine.thread import EngineThread
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.request.output import Event
from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.calls import Document, Prefix
from longctx.serving.server.errors import ApiError, refusals_answered

_MOST_CACHES = 1000  # of a tenant
NO_RETRY = {"x-should-retry": "false"}


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


class Caches(ABC):
    """Caches of a server, and what requests ask to be kept of their prompts. For the event loop's thread.

    Args:
      page_size: tokens of a page.
      quota: tokens that a tenant may have kept. None: as many as there is room for.
      max_ttl: seconds for which a cache is kept, at most.
    """

    _advice: str  # where there are no tiers

    def __init__(self, model_name: str, page_size: int, quota: int | None, max_ttl: float) -> None:
        self._model_name, self._page_size, self._quota, self._max_ttl = model_name, page_size, quota, max_ttl
        self._caches: defaultdict[str, dict[str, Cache]] = defaultdict(dict)  # by tenant
        self._kept: defaultdict[str, dict[Key, float]] = defaultdict(dict)  # by tenant: until when, monotonic seconds
        self._ends: list[tuple[float, int, str, list[Key]]] = []  # heap of when that may be over
        self._number = itertools.count()

    def create(self, tenant: str, document: Document) -> CacheAnswer:
        """Begin to read a document, and keep its pages."""
        self._check_room(tenant, document)
        cache_id = f"cache_{secrets.token_hex(16)}"
        cache = Cache(document.prefix(cache_id), document, time.time())
        loop = asyncio.get_running_loop()
        with refusals_answered():
            cache.request_id = self._submit(
                document.prepared, lambda events: loop.call_soon_threadsafe(self._note, cache, events)
            )
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
                self._cancel(cache.request_id)

    def admit(self, prepared: PreparedRequest) -> PreparedRequest:
        """Return a request that keeps as much of its prompt as its tenant's quota and the room let it.

        What it asks for beyond them is left out, as it changes no answer.
        """
        tenant, asked = prepared.request.tenant, prepared.request.retain
        if not asked:
            return prepared
        self._forget_expired()
        kept, admitted = self._kept[tenant], []
        room = self._room()
        for tokens, seconds in sorted(asked) if room else ():
            seconds = min(seconds, self._max_ttl)
            until = time.monotonic() + seconds
            keys = prepared.keys[: tokens // self._page_size]
            left = room - self._num_kept() - self.num_tokens // self._page_size
            if self._quota is not None:
                left = min(left, (self._quota - self._num_owned(tenant)) // self._page_size - len(kept))
            new = [number for number, key in enumerate(keys) if key not in kept]
            if len(new) > max(left, 0):
                keys = keys[: new[max(left, 0)]]
            if keys:
                kept |= {key: max(until, kept.get(key, 0.0)) for key in keys}
                heapq.heappush(self._ends, (until, next(self._number), tenant, keys))
                admitted.append((len(keys) * self._page_size, seconds))
        return prepared._replace(request=replace(prepared.request, retain=tuple(admitted)))

    @property
    def num_caches(self) -> int:
        return len(self._all)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(cache.num_tokens for cache in self._all)

    @abstractmethod
    def _submit(self, prepared: PreparedRequest, sink: Sink) -> str:
        """Have a document read, and its pages kept for as long as its request says."""

    @abstractmethod
    def _cancel(self, request_id: str) -> object:
        """Read no further in a document."""

    @abstractmethod
    def _unpin(self, keys: list[Key]) -> None:
        """Let pages go, but for those that are to be kept for something else."""

    @abstractmethod
    def _room(self) -> int:
        """Return the pages of all tenants that can be kept; 0: there are no tiers."""

    @abstractmethod
    def _count(self, keys: list[Key]) -> CachePages:
        """Return where pages are."""

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of prompts that requests asked to keep."""
        return self._num_kept() * self._page_size

    def _forget_expired(self) -> None:
        now = time.monotonic()
        while self._ends and self._ends[0][0] <= now:
            _, _, tenant, keys = heapq.heappop(self._ends)
            kept = self._kept[tenant]
            for key in keys:
                if kept.get(key, math.inf) <= now:
                    del kept[key]

    def _num_kept(self, tenant: str | None = None) -> int:
        """Return how many pages prompts keep, by what their requests asked for, of a tenant or of all."""
        self._forget_expired()
        return sum(map(len, self._kept.values())) if tenant is None else len(self._kept[tenant])

    def _seconds_left(self, keys: Iterable[Key]) -> dict[Key, float]:
        """Return for how long documents and prompts keep some of these pages."""
        asked, left = set(keys), dict[Key, float]()
        for cache in self._all:
            seconds = cache.created + cache.document.ttl - time.time()
            left |= {key: max(seconds, left.get(key, 0.0)) for key in asked.intersection(cache.keys) if seconds > 0}
        now = time.monotonic()
        for kept in self._kept.values():
            left |= {key: max(kept[key] - now, left.get(key, 0.0)) for key in asked & kept.keys() if kept[key] > now}
        return left

    def _num_read(self, request_id: str) -> int | None:
        """Return the tokens that have been read of a document; None: it has ended."""
        return 0

    @property
    def _all(self) -> list[Cache]:
        return [cache for own in tuple(self._caches.values()) for cache in tuple(own.values())]

    def _own(self, tenant: str) -> dict[str, Cache]:
        return self._caches.get(tenant, {})

    def _num_owned(self, tenant: str) -> int:
        """Return the tokens of a tenant's documents."""
        return sum(cache.num_tokens for cache in self._own(tenant).values())

    def _check_room(self, tenant: str, document: Document) -> None:
        room = self._room() * self._page_size
        if not room:
            message = f"caches need tiers: {self._advice}"
            raise ApiError(409, message, code="caches_are_off", headers=NO_RETRY)
        if document.ttl > self._max_ttl:
            raise ApiError(400, f"ttl must be at most {self._max_ttl:g} seconds, got {document.ttl:g}", "ttl")
        count = len(document.prepared.tokens)
        if not document.prepared.keys:
            message = f"a document must have at least {self._page_size} tokens, which is a page, got {count}"
            raise ApiError(400, message, "prompt" if document.messages is None else "messages")
        total = count + self._num_owned(tenant) + self._num_kept(tenant) * self._page_size
        if self._quota is not None and total > self._quota:
            message = f"a tenant may have {self._quota:,} tokens kept: with this document {total:,}"
            raise ApiError(429, message, code="cache_quota_exceeded", headers=NO_RETRY)
        if len(self._own(tenant)) >= _MOST_CACHES:
            message = f"a tenant may have {_MOST_CACHES:,} caches"
            raise ApiError(429, message, code="cache_quota_exceeded", headers=NO_RETRY)
        if count + self.num_tokens + self._num_kept() * self._page_size > room:
            message = f"all that is kept may have {room:,} tokens, half of the largest tier: there is no room"
            raise ApiError(503, message, code="caches_are_full", headers=NO_RETRY)

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
                self._cancel(cache.request_id)
            self._unpin(cache.keys)

    def _answer(self, cache: Cache) -> CacheAnswer:
        count = len(cache.document.prepared.tokens)
        read = {"ready": count, "failed": 0}.get(cache.status)
        if read is None and (read := self._num_read(cache.request_id)) is None:
            read = count
        return CacheAnswer(
            cache.prefix.cache_id,
            self._model_name,
            cache.status,
            int(cache.created),
            int(cache.created + cache.document.ttl),
            count,
            read,
            self._count(cache.keys),
            error=cache.error,
        )


class EngineCaches(Caches):
    """Caches of an engine's server."""

    _advice = "start the server with --kv-host-bytes"

    def __init__(self, thread: EngineThread, model_name: str, quota: int | None, max_ttl: float) -> None:
        super().__init__(model_name, thread.engine.config.page_size, quota, max_ttl)
        self._thread = thread
        store = thread.engine.pages.store
        self._store = store if isinstance(store, TieredStore) else None

    def release(self, is_wanted: Callable[[Key], bool]) -> int:
        """Keep pages no longer that requests asked for; return how many there were."""
        found = [key for kept in self._kept.values() for key in tuple(kept) if is_wanted(key) and kept.pop(key)]
        self._unpin(found)
        return len(found)

    def _room(self) -> int:
        return 0 if self._store is None else self._store.pinnable_pages

    def _submit(self, prepared: PreparedRequest, sink: Sink) -> str:
        return self._thread.submit(prepared, sink)

    def _cancel(self, request_id: str) -> object:
        return self._thread.cancel(request_id)

    def _unpin(self, keys: list[Key]) -> None:
        pages, again = self._thread.engine.pages, defaultdict[float, list[Key]](list)
        pages.pin(keys, 0.0)
        for key, seconds in self._seconds_left(keys).items():
            again[seconds].append(key)
        for seconds, kept in again.items():
            pages.pin(kept, seconds)

    def _count(self, keys: list[Key]) -> CachePages:
        assert self._store is not None
        tiers, pool = self._store.count_by_tier(keys), self._thread.engine.core.pool
        return CachePages(len(keys), sum(pool.find(key) is not None for key in keys), tiers["host"], tiers["disk"])

    def _num_read(self, request_id: str) -> int | None:
        try:
            return self._thread.engine.requests[request_id].progress[0]
        except KeyError:  # it ends just now
            return None
