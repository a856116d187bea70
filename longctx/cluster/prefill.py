"""`PrefillRequests`: has other servers compute prompts of this one, or lend the pages that they have of them.

Which server that is, the request says: the conductor has chosen it. It draws the first token, as the request wants it,
and its answer brings that. Pages come to host memory while later ones are computed, if the engine has a tier there; the
request enters the engine afterwards, and computes what follows the last full page again. Without a tier a few pages,
the partial last one too, come after the answer. For many the request waits in the engine with a slot and pages while
they come, and the engine draws the first token itself. A failure means that pages don't come, and are computed here.

Source: Mooncake, section 3; algorithm 1 (blocks go from the instance that has most of a prefix to the one that computes
the prompt, which has them too from then on: so hot blocks are replicated).
"""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import httpx
import msgspec

from longctx.cluster.http_stream import HttpStream
from longctx.cluster.pending_pages import PendingSource, StagedPages
from longctx.cluster.server_url import host_port, split_server_url
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.thread import Received
from longctx.serving.kv_cache.connector import LeasedSource, PageStore
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.request.handoff import Handoff, Progress
from longctx.serving.request.request import PreparedRequest
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.server.auth import TENANT_HEADER
from longctx.serving.server.errors import ApiError
from longctx.serving.server.schemas import PagePrefix
from longctx.serving.server.tls import Tls

_LOG = logging.getLogger(__name__)
_MARGIN = 5.0  # a page may take so much longer than all is predicted to
_MOST_SECONDS = 3600.0  # for a whole prompt
_CONNECT_SECONDS = 2.0
_KNOWN_SECONDS = 5.0  # for which it is believed where the pages of a server are
_CLOSE_SECONDS = 5.0
_LATER_BYTES = 256 << 20  # of pages that may come after the answer: in a part of a second, in which no token comes
_ANSWER_SECONDS = 5.0  # for which an answer may come after all pages
_LOOK_SECONDS = 5.0  # between two looks at whether the other server lives, and until it must have said so
_FORWARDED = ("authorization", "x-request-id", "traceparent")  # headers of a request that say who sends it

Answer = Literal["done", "refused", "failed", "cancelled"]
"""How a prefill elsewhere ended: computed; refused for lack of room; failed; or not needed any more."""


# Seconds until a server must have begun with a prompt, and at least for its next page.
_COMPUTES, _LENDS = (10.0, 60.0), (3.0, 10.0)  # pages behind others' work; pages that are there


class _Params(msgspec.Struct):
    """`kv_transfer_params` of an answer, as far as they say what was computed, and where its pages are."""

    handoff: dict[str, Any]
    remote_host: str
    remote_port: int
    remote_followers: list[str] = []


class _Answer(msgspec.Struct):
    kv_transfer_params: _Params


class FirstToken:
    """First token of a request, which another server draws, and pages that have come until then. It is a `Staged`.

    Attributes:
      ready: ends when they are there, or will not come.
      handoff, sources: with the token; None and none: it has not come.
    """

    def __init__(self, stop: Callable[[], object]) -> None:
        self.ready: Future[None] = Future()
        self.handoff: Handoff | None = None
        self.sources: Mapping[str, LeasedSource] = {}
        self._stop = stop

    def release(self) -> None:
        """The request has ended."""
        self._stop()
        for source in self.sources.values():
            source.release()


class _Asked(NamedTuple):
    """Request to another server.

    Attributes:
      source: makes the source of the pages at the addresses of that server, which must begin within some seconds.
      seconds: predicted until it has been computed.
      timeouts: seconds until it must have begun, and at least for the next page.
    """

    url: str
    headers: Mapping[str, str]
    body: Callable[[], bytes]
    source: Callable[[list[str], float], LeasedSource]
    seconds: float
    timeouts: tuple[float, float]

    @property
    def page_seconds(self) -> float:
        """Seconds for which nothing may come."""
        return max(self.timeouts[1], _MARGIN * self.seconds)


class PrefillRequests:
    """Requests to other servers, which compute prompts or lend pages, from a thread of its own.

    Args:
      engine: that the pages are for.
      source: makes the source of a lease's pages at the addresses of a server, see `EngineMessenger.source`. ApiError:
        pages may not come from there.
      check_host: ApiError, unless requests may go to this host.
      tls: of this server.

    Attributes:
      answers: how prefills elsewhere ended, see `Answer`.
    """

    def __init__(
        self,
        engine: Engine,
        source: Callable[..., LeasedSource],
        check_host: Callable[[str], object],
        tls: Tls | None = None,
    ) -> None:
        self._engine, self._source, self._check_host = engine, source, check_host
        self.answers: Counter[Answer] = Counter()
        self._known: dict[str, tuple[list[str], float]] = {}  # where the pages of servers are, and since when
        self._running: set[Future[Any]] = set()
        self._staged: set[StagedPages] = set()
        self._loop = asyncio.new_event_loop()
        self._tls, self._servers = tls, dict[str, HttpStream]()
        self._thread = threading.Thread(target=self._run, name="longctx prefill elsewhere", daemon=True)
        self._thread.start()

    @property
    def num_requests(self) -> int:
        """Number of prompts that are being computed elsewhere."""
        return len(self._running)

    def close(self) -> None:
        """End all prefills elsewhere, and the thread."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)

    def ask(
        self,
        prepared: PreparedRequest,
        headers: Mapping[str, str],
        wanted: PagePrefix,
        prefix: PagePrefix | None = None,
        handoff: Handoff | None = None,
    ) -> Received | None:
        """Have a server compute a prompt's first tokens; returns what the request waits for; None: they are all here.

        It never waits; one thread may call it, the event loop's.

        Args:
          prepared: the request.
          headers: of the request. Those that say who sends it go along, as pages are found by the same tenant only; the
            grant of `wanted` replaces its key.
          wanted: the server, and how many tokens; None of them: all full pages before the prompt's last token.
          prefix: from where that server gets the first pages.
          handoff: what has been computed of the request, without pages.

        Raises:
          ApiError: it may not be asked.
        """
        for each in (wanted, prefix):
            if each is not None:
                self._check_url(each.url)
        engine, size = self._engine, self._engine.config.page_size
        length = (len(prepared.tokens) - 1) // size * size  # of all full pages before the prompt's last token
        if wanted.tokens is not None:
            length = min(length, wanted.tokens // size * size)
        there = count_here(engine, prepared, length)
        if there >= length:
            return None
        lends = wanted.tokens is not None
        seconds = wanted.seconds
        if seconds is None:
            seconds = 0.0 if lends else engine.scheduler.forecast.time.prefill_seconds(there, length)
        lease, count = secrets.token_hex(16), length + 1 if lends else len(prepared.tokens)
        sent = {name: headers[name] for name in _FORWARDED if name in headers}
        sent |= {"content-type": "application/json"}
        if wanted.grant is None:
            sent[TENANT_HEADER] = quote(prepared.request.tenant)
        else:
            sent["authorization"] = f"Bearer {wanted.grant}"
        pending = PendingSource(lambda: computing.cancel())
        source = lambda addresses, begin: self._source(addresses, lease, _MOST_SECONDS, begin)  # noqa: E731
        staged = self._stage(prepared, pending, there // size, length // size)
        comes_later = staged is None and (length - there) // size * self._page_bytes <= _LATER_BYTES
        sampling = None
        if not lends and handoff is not None and _can_draw(prepared, handoff) and (staged is not None or comes_later):
            sampling = dataclasses.replace(prepared.request.sampling, seed=handoff.seed)
        body = lambda: _body(prepared, lease, count, prefix, lends, sampling)  # noqa: E731
        asked = _Asked(wanted.url.rstrip("/"), sent, body, source, seconds, _LENDS if lends else _COMPUTES)
        computing = self._start(self._compute(asked, None if sampling is not None and staged is None else pending))
        if sampling is not None:
            first = FirstToken(computing.cancel if staged is None else staged.release)
            self._start(self._draw(asked, first, prepared, computing, staged))
            return Received(handoff, {}, first)
        if staged is None:
            return Received(_with_pages(prepared, handoff, lease, length), {lease: pending})
        self._start(staged.run())
        return Received(handoff, {}, staged)

    @property
    def _page_bytes(self) -> int:
        assert self._engine.page_identity is not None
        return self._engine.page_identity[0].page_bytes

    def _check_url(self, url: str) -> None:
        parts = split_server_url(url)
        if parts is None:
            raise ApiError(400, f"url must be http://HOST:PORT, got {url!r}", "url")
        self._check_host(str(parts.hostname))

    def _stage(self, prepared: PreparedRequest, source: LeasedSource, first: int, stop: int) -> StagedPages | None:
        """Make the staging of a prompt's pages; None: the engine has no host memory, too little, or several of them."""
        store = self._engine.pages.store
        if not isinstance(store, TieredStore) or self._engine.process_group.num_processes > 1:
            return None
        waiting = sum(each.num_pages for each in tuple(self._staged))
        if waiting + stop - first > store.pinnable_pages:  # those that wait would evict each other
            return None
        keys = prepared.shared_keys
        parents, tenant = [b"", *keys], prepared.request.tenant
        pages = [PageStore(keys[i], -1, i, tenant, parents[i]) for i in range(first, stop)]
        staged = StagedPages(store, source, pages, self._loop)
        self._staged.add(staged)
        staged.ready.add_done_callback(lambda _: self._staged.discard(staged))
        return staged

    def _start(self, work: Coroutine[Any, Any, object]) -> "Future[Any]":
        """Run something in the thread."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return running

    # The rest runs in the thread.

    async def _draw(
        self,
        asked: _Asked,
        first: FirstToken,
        prepared: PreparedRequest,
        computing: "Future[bytes | None]",
        staged: StagedPages | None,
    ) -> None:
        """Take the first token from the answer of who computes a prompt, after its pages if they are staged."""
        try:
            if staged is not None:
                await staged.run()
            answer = await self._answer(asked, computing, asked.page_seconds if staged is None else _ANSWER_SECONDS)
            if answer is not None:
                first.handoff, first.sources = self._taken(answer, asked, prepared, has_pages=staged is None)
        except (httpx.HTTPError, ApiError, TypeError, ValueError) as error:
            _LOG.info("longctx: %s has drawn no first token: %s", asked.url, error)
        finally:
            computing.cancel()
            first.ready.set_result(None)
        if staged is None and first.handoff is None:
            await self._let_go(asked)

    async def _let_go(self, asked: _Asked) -> None:
        """Release the lease of a prompt that may have been computed, whose answer has not been read."""
        with contextlib.suppress(httpx.HTTPError, ApiError, KeyError, TypeError, ValueError):
            asked.source(await self._addresses(asked.url, asked.headers), asked.timeouts[0]).release()

    async def _answer(self, asked: _Asked, computing: "Future[bytes | None]", seconds: float) -> bytes | None:
        """Wait for an answer while its server lives; httpx.HTTPError: it does not come within some seconds."""
        answer, until = asyncio.wrap_future(computing), time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            done, _ = await asyncio.wait([answer], timeout=min(left, _LOOK_SECONDS))
            if done:
                return None if answer.cancelled() else answer.result()
            status, _ = await self._server(asked.url).fetch("GET", "/health", {}, _LOOK_SECONDS)
            if status != 200:
                raise httpx.ReadError(f"it answers /health with status {status}")
        raise httpx.ReadTimeout(f"no answer has come within {seconds:.0f} s")

    def _taken(
        self, answer: bytes, asked: _Asked, prepared: PreparedRequest, has_pages: bool
    ) -> tuple[Handoff, Mapping[str, LeasedSource]]:
        """Return the handoff of an answer and the source of its pages; ValueError: it is none of this request."""
        params = msgspec.json.decode(answer, type=_Answer).kv_transfer_params
        handoff = Handoff.from_dict(params.handoff)
        handoff.check(len(prepared.tokens), prepared.request.sampling, self._engine.model.config.vocab_size)
        [progress] = handoff.completions
        if not has_pages or progress.lease is None:
            progress = dataclasses.replace(progress, lease=None, length=0)
        handoff = dataclasses.replace(handoff, completions=(progress,))
        if progress.lease is None:
            return handoff, {}
        addresses = [host_port(params.remote_host, params.remote_port), *params.remote_followers]
        return handoff, {progress.lease: asked.source(addresses, asked.timeouts[0])}

    async def _compute(self, asked: _Asked, pending: PendingSource | None) -> bytes | None:
        """Have a prompt read, whose pages go to a source that waits for them; returns the answer, if there is one."""
        answer: Answer = "failed"
        try:
            content = await asyncio.to_thread(asked.body)  # a prompt may be long
            if pending is not None:
                addresses = await self._addresses(asked.url, asked.headers)
                if not pending.begin(asked.source(addresses, asked.timeouts[0]), asked.page_seconds):
                    answer = "cancelled"
                    return None
            answer, said = await self._post(asked.url, content, asked.headers)
            return said if answer == "done" else None
        except asyncio.CancelledError:
            answer = "cancelled"
            raise
        except (httpx.HTTPError, ApiError, KeyError, TypeError, ValueError) as error:
            _LOG.info("longctx: %s can't be asked to read a prompt: %s", asked.url, error)
            return None
        finally:
            self.answers[answer] += 1
            if answer != "done" and pending is not None:
                pending.settle(has_failed=True)

    async def _addresses(self, url: str, headers: Mapping[str, str]) -> list[str]:
        """Ask where the pages of a server are, with the key of the request."""
        now = time.monotonic()
        self._known = {each: found for each, found in self._known.items() if now - found[1] <= _KNOWN_SECONDS}
        if url not in self._known:  # another one may listen there by now
            known = {name: value for name, value in headers.items() if name == "authorization"}
            status, said = await self._server(url).fetch("GET", "/server_info", known, _CONNECT_SECONDS)
            if status != 200:
                raise ValueError(f"it answers /server_info with status {status}")
            transfer: dict[str, Any] = msgspec.json.decode(said)["kv_transfer"]
            first = host_port(str(transfer["host"]), int(transfer["port"]))
            self._known[url] = [first, *map(str, transfer.get("followers", ()))], now
        return self._known[url][0]

    async def _post(self, url: str, body: bytes, headers: Mapping[str, str]) -> tuple[Answer, bytes]:
        status, said = await self._server(url).fetch("POST", "/v1/completions", headers, _MOST_SECONDS, body)
        if status == 200:
            return "done", said
        _LOG.info("longctx: %s reads no prompt: it answers %d", url, status)
        return "refused" if status in (429, 503) else "failed", said

    def _server(self, url: str) -> HttpStream:
        if url not in self._servers:
            self._servers[url] = HttpStream(url, _MOST_SECONDS, self._tls)
        return self._servers[url]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            for server in self._servers.values():
                server.close()
            self._loop.run_until_complete(asyncio.sleep(0))  # in which they are closed
            self._loop.close()


def count_here(engine: Engine, prepared: PreparedRequest, length: int) -> int:
    """Count leading tokens of a prompt that an engine has; `length` if none can be shared, as none need to come."""
    size, keys = engine.config.page_size, prepared.shared_keys[: length // engine.config.page_size]
    if not keys:
        return length
    there, store = engine.scheduler.count_cached(keys), engine.pages.store
    return there if store is None else there + store.look_up(keys[there // size :]) * size


def _can_draw(prepared: PreparedRequest, handoff: Handoff) -> bool:
    """Whether a request lacks its first token, and another engine's answer can bring it."""
    sampling = prepared.request.sampling
    has_more = sampling.n > 1 or sampling.prompt_logprobs is not None or sampling.pooling is not None
    return not has_more and not handoff.completions[0].tokens


def _body(
    prepared: PreparedRequest,
    lease: str,
    count: int,
    prefix: PagePrefix | None,
    is_cached: bool,
    sampling: SamplingParams | None,
) -> bytes:
    """Make the body of the request to compute a prompt's first `count` tokens, and to keep their pages.

    Args:
      prefix: from where that server gets the first pages; None: it has or computes them.
      is_cached: that server has all of them, and is to compute none.
      sampling: how the first token is drawn; None: it is not wanted.
    """
    request = prepared.request
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "lease": lease}
    if prefix is not None:
        params["prefix"] = prefix.to_dict()
    if is_cached:
        params["is_cached"] = True
    if sampling is not None:
        params["sampling"] = sampling
    body: dict[str, Any] = {"prompt": prepared.tokens[:count].tolist(), "max_tokens": 1, "temperature": 0}
    body |= {"priority": request.priority, "kv_transfer_params": params}
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    return msgspec.json.encode(body)


def _with_pages(prepared: PreparedRequest, handoff: Handoff | None, lease: str, length: int) -> Handoff:
    """Make the handoff of a request whose prompt's first `length` tokens come under a lease.

    The first completion to be admitted fetches the pages, which the others find in the cache.
    """
    if handoff is not None:
        completions = tuple(dataclasses.replace(each, lease=lease, length=length) for each in handoff.completions)
        return dataclasses.replace(handoff, completions=completions)
    sampling = prepared.request.sampling
    seed = secrets.randbelow(2**31) if sampling.seed is None else sampling.seed
    return Handoff(seed, (Progress(lease, length, ()),) * sampling.n)
