"""`PrefillDispatcher`: has other servers compute prompts, or lend the pages that they have of them.

Either this server decides, among those that it was given (`dispatch`): a prompt is computed here if little of it is not
in the cache, or if the step that computes all of it is predicted to keep the TPOT of those that decode. Else it is sent
to the server that is predicted to be free first. Or the request names a server, as routers do that know which blocks
are where (`ask`).

Pages come while later ones are computed: to host memory, if the engine has a tier there, and the request enters the
engine afterwards; else the request waits in the engine with a slot and pages. The engine computes what follows the last
full page itself and draws the first token. So no answer has to be waited for, and a failure only means that pages don't
come, and are computed here.

Source: Mooncake, section 3; section 4 (inline prefill); section 5.2 (the rule by which an instance is chosen);
algorithm 1 (blocks go from the instance that has most of a prefix to the one that computes the prompt, which has them
too from then on: so hot blocks are replicated).
"""

import asyncio
import contextlib
import functools
import logging
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from longctx.cluster.prefill.instance import PrefillInstance
from longctx.cluster.prefill.source import RemotePrefill, StagedPages
from longctx.cluster.transfer.lease import make_lease_id
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.thread import Received
from longctx.serving.kv_cache.connector import LeasedSource, PageStore
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.predictor.work import Work
from longctx.serving.request.handoff import Handoff, Progress
from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.auth import TENANT_HEADER
from longctx.serving.server.errors import ApiError
from longctx.serving.server.schemas import PagePrefix
from longctx.serving.validation import check_integer

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0  # between two looks at how busy a server is
# A server is not asked whose queue is longer than both: those that decode here would wait for a prompt at every step.
_MOST_WAIT, _MOST_QUEUED = 20.0, 10.0  # predicted seconds, and times what the prompt itself takes
_MARGIN = 5.0  # a page may take so much longer than all is predicted to
_MOST_SECONDS = 3600.0  # for a whole prompt
_MOST_NAMED = 64  # servers that requests have named and that are remembered
_CLOSE_SECONDS = 5.0
_FORWARDED = ("authorization", "x-request-id", "traceparent")  # headers of a request that say who sends it

Decision = Literal["short", "quick", "nobody", "remote"]
"""Where a prompt is computed: here, as it is short, or keeps the TPOT, or no other server can; or elsewhere."""


class _Timeouts(NamedTuple):
    """Seconds until a server must have begun with a prompt; and at least for its next page."""

    begin: float
    page: float


_COMPUTES, _LENDS = _Timeouts(10.0, 60.0), _Timeouts(3.0, 10.0)  # pages behind others' work; pages that are there


class PrefillDispatcher:
    """Dispatcher of prompts to other servers, from a thread of its own that the first of them starts.

    `dispatch` may be called from any thread, `ask` from one, the event loop's; neither waits.

    Args:
      instances: that `dispatch` chooses among.
      source: makes the source of a lease's pages at the addresses of an instance, see `PageReceiver.source`.
      named_source: the same for servers that requests name. ApiError: pages may not come from there.
      check_host: ApiError, unless requests may go to this host.
      inline_tokens: tokens of a prompt, not cached, up to which `dispatch` has it computed here.

    Attributes:
      decisions: how many prompts were computed where, see `Decision`.
      answers, named_answers: how prefills elsewhere ended, by `dispatch` and by `ask`, see `Answer`; `"cancelled"`:
        the pages were not needed any more.
    """

    def __init__(
        self,
        engine: Engine,
        instances: list[PrefillInstance],
        source: Callable[..., LeasedSource],
        named_source: Callable[..., LeasedSource],
        check_host: Callable[[str], object],
        inline_tokens: int = 512,
    ) -> None:
        self._inline_tokens = check_integer("inline_tokens", inline_tokens, 0)
        self._engine, self.instances = engine, instances
        self._source, self._named_source, self._check_host = source, named_source, check_host
        self.decisions: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.named_answers: Counter[str] = Counter()
        self._named: OrderedDict[str, PrefillInstance] = OrderedDict()
        self._next = 0  # the first of those that are as busy
        self._lock = threading.Lock()  # of starting, and of what follows
        self._num_staged = 0  # pages that are coming to host memory
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchers: set[asyncio.Task[None]] = set()  # until the thread ends
        self._client: httpx.AsyncClient | None = None
        self._thread = threading.Thread(target=self._run, name="longctx prefill elsewhere", daemon=True)
        for each in instances:
            self._begin(self._watch(each), self._watchers)

    @property
    def num_requests(self) -> int:
        """Number of prompts that are being computed elsewhere."""
        return len(self._tasks)

    def close(self) -> None:
        """End all prefills elsewhere, and the thread."""
        with self._lock:
            if not self._thread.ident:
                self._loop.close()
            elif self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(_CLOSE_SECONDS)

    def dispatch(self, prepared: PreparedRequest, headers: Mapping[str, str]) -> Received | None:
        """Have a prompt computed elsewhere, and return what its request waits for; None: it is computed here.

        Args:
          headers: of the request. Those that say who sends it go along, as pages are found by the same tenant only.
        """
        if not self.instances:
            return None
        decision, seconds = self._decide(prepared)
        self.decisions[decision] += 1
        if decision != "remote":
            return None
        lease = make_lease_id()
        body = functools.partial(_body, prepared, lease, len(prepared.tokens))
        choose = functools.partial(self._choose, seconds=seconds)
        request = _PrefillRequest(self, lease, body, _sent(headers), seconds, choose, _COMPUTES, self.answers)
        length = _full_length(prepared, self._engine)
        return self._send(request, prepared, count_here(self._engine, prepared, length), length, None)

    def ask(
        self,
        prepared: PreparedRequest,
        headers: Mapping[str, str],
        wanted: PagePrefix,
        prefix: PagePrefix | None = None,
        handoff: Handoff | None = None,
    ) -> Received | None:
        """Have a server compute a prompt's first tokens; returns what the request waits for; None: they are all here.

        Args:
          headers: of the request. Those that say who sends it go along.
          wanted: the server, and how many tokens; None of them: all full pages before the prompt's last token.
          prefix: from where that server gets the first pages.
          handoff: what has been computed of the request, without pages.

        Raises:
          ApiError: it may not be asked.
        """
        instance = self._named_instance(wanted.url)
        if prefix is not None:
            self._check_url(prefix.url)
        engine, size, length = self._engine, self._engine.config.page_size, _full_length(prepared, self._engine)
        if wanted.tokens is not None:
            length = min(length, wanted.tokens // size * size)
        there = count_here(engine, prepared, length)
        if there >= length:
            return None
        lease, sent = make_lease_id(), _sent(headers) | {TENANT_HEADER: quote(prepared.request.tenant)}
        if wanted.tokens is None:
            more = None if prefix is None else prefix.to_dict()
            body, timeouts = functools.partial(_body, prepared, lease, len(prepared.tokens), more), _COMPUTES
            seconds = engine.scheduler.forecast.prefill_seconds(there, length)
        else:
            body, timeouts = functools.partial(_body, prepared, lease, length + 1, is_cached=True), _LENDS
            seconds = 0.0
        seconds = seconds if wanted.seconds is None else wanted.seconds
        choose = lambda tried: None if tried else instance  # noqa: E731
        request = _PrefillRequest(self, lease, body, sent, seconds, choose, timeouts, self.named_answers)
        return self._send(request, prepared, there, length, handoff)

    def info(self) -> dict[str, Any]:
        """Describe what `dispatch` did, for `/server_info`."""
        return {
            "instances": [{"url": each.url, "is_open": each.is_open} for each in self.instances],
            "decisions": dict(self.decisions),
            "answers": dict(self.answers),
        }

    def _decide(self, prepared: PreparedRequest) -> tuple[Decision, float]:
        """Decide where a prompt is computed; returns the predicted seconds of that, too."""
        engine, total = self._engine, len(prepared.tokens)
        keys, size = prepared.shared_keys, engine.config.page_size
        if not keys:  # nothing of it can be shared
            return "short", 0.0
        there = count_here(engine, prepared, len(keys) * size)
        if total - there <= self._inline_tokens or (total - 1) // size * size <= there:
            return "short", 0.0
        if keeps_tpot(engine, there, total - there, prepared.request.tpot_target):
            return "quick", 0.0
        seconds = engine.scheduler.forecast.prefill_seconds(there, total)
        return "nobody" if self._choose([], seconds) is None else "remote", seconds

    def _choose(self, tried: list[PrefillInstance], seconds: float) -> PrefillInstance | None:
        """Choose the instance that is predicted to be free first; of those that are as busy, in turns."""
        count = len(self.instances)
        turns = [self.instances[(self._next + i) % count] for i in range(count)]
        found = min(
            (each for each in turns if each.is_open and each not in tried), key=lambda each: each.wait, default=None
        )
        return None if found is None or found.wait > max(_MOST_WAIT, _MOST_QUEUED * seconds) else found

    def _named_instance(self, url: str) -> PrefillInstance:
        instance = self._check_url(url)
        instance = self._named.setdefault(url, instance)
        self._named.move_to_end(url)
        if len(self._named) > _MOST_NAMED:
            self._named.popitem(last=False)
        return instance

    def _check_url(self, url: str) -> PrefillInstance:
        try:
            instance = PrefillInstance(url, is_watched=False)
            host: Any = urlsplit(instance.url).hostname
        except ValueError as error:
            raise ApiError(400, str(error), "url") from None
        self._check_host(host)
        return instance

    def _send(
        self, request: "_PrefillRequest", prepared: PreparedRequest, first: int, length: int, handoff: Handoff | None
    ) -> Received:
        """Send a prompt whose first `length` tokens come under a lease, but for `first` that are here."""
        staged = self._stage(prepared, request.prefill, first, length)
        self._begin(request.run(), self._tasks)
        if staged is not None:
            return Received(handoff, {}, staged)
        return Received(_with_pages(prepared, handoff, request.lease, length), {request.lease: request.prefill})

    def _stage(self, prepared: PreparedRequest, source: LeasedSource, first: int, stop: int) -> StagedPages | None:
        """Bring pages of a prompt to the engine's host memory; None: it has none, too little, or several of them."""
        store, size = self._engine.pages.store, self._engine.config.page_size
        first, stop = first // size, stop // size
        if not isinstance(store, TieredStore) or self._engine.process_group.num_processes > 1:
            return None
        if self._num_staged + stop - first > store.pinnable_pages:  # those that wait would evict each other
            return None
        keys = prepared.shared_keys
        parents, tenant = [b"", *keys], prepared.request.tenant
        pages = [PageStore(keys[i], -1, i, tenant, parents[i]) for i in range(first, stop)]
        staged = StagedPages(store, source, pages, self.call)
        self._add_staged(staged.num_pages)
        staged.ready.add_done_callback(lambda _: self._add_staged(-staged.num_pages))
        self._begin(staged.run(), self._tasks)
        return staged

    def _add_staged(self, num_pages: int) -> None:
        with self._lock:
            self._num_staged += num_pages

    def _begin(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        """Run something in the thread, as one of `tasks`."""

        def begin() -> None:
            task = self._loop.create_task(work)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        try:
            with self._lock:
                if not self._thread.ident and not self._loop.is_closed():
                    self._thread.start()
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:  # it is closed
            work.close()

    def call(self, act: Callable[[], object]) -> None:
        """Call something in the thread's loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)

    # The rest runs in the thread.

    @property
    def client(self) -> httpx.AsyncClient:
        """The client by which servers are asked."""
        assert self._client is not None
        return self._client

    def make_source(self, instance: PrefillInstance, lease: str, lease_timeout: float) -> LeasedSource:
        """Make the source of the pages of a lease. ApiError, if they may not come from there."""
        self._next += instance.is_watched
        source = self._source if instance.is_watched else self._named_source
        return source(instance.addresses, lease, deadline=_MOST_SECONDS, lease_timeout=lease_timeout)

    async def _watch(self, instance: PrefillInstance) -> None:
        while True:
            was_there = instance.addresses is not None
            await instance.look(self.client)
            if was_there != (instance.addresses is not None):
                where = " and ".join(instance.addresses or ())
                state = "not there any more" if was_there else f"found: its pages are at {where}"
                _LOG.info("longctx: the server %s that reads prompts is %s", instance.url, state)
            await asyncio.sleep(_LOOK_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._client = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_keepalive_connections=20))
        try:
            self._loop.run_forever()
        finally:
            left = [*self._tasks, *self._watchers]
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._client.aclose())
            self._loop.close()


class _PrefillRequest:
    """A prompt that is computed elsewhere.

    Args:
      lease: under which its pages are kept there.
      body: makes what is sent, in another thread, as a prompt may be long.
      seconds: that its prefill is predicted to take.
      choose: returns the next instance to ask after those that were tried; None: no more.
      answers: counts how each ended.
    """

    def __init__(
        self,
        dispatcher: PrefillDispatcher,
        lease: str,
        body: Callable[[], bytes],
        headers: Mapping[str, str],
        seconds: float,
        choose: Callable[[list[PrefillInstance]], PrefillInstance | None],
        timeouts: _Timeouts,
        answers: Counter[str],
    ) -> None:
        self._dispatcher, self.lease, self._body, self._headers = dispatcher, lease, body, headers
        self._predicted, self._choose, self._timeouts, self._answers = seconds, choose, timeouts, answers
        self._task: asyncio.Task[str] | None = None
        self.prefill = RemotePrefill(lambda: dispatcher.call(self._cancel))

    async def run(self) -> None:
        """Ask one server after the other, until one has computed it."""
        tried = list[PrefillInstance]()
        try:
            body = await asyncio.to_thread(self._body)
            while (instance := self._choose(tried)) is not None:
                tried.append(instance)
                answer = await self._try(instance, body)
                self._answers[answer or "cancelled"] += 1
                if answer is None or answer == "done":
                    return
                _LOG.info("longctx: a prompt was sent to %s: %s", instance.url, answer)
                if not self.prefill.end():
                    return
        except Exception:
            _LOG.exception("longctx: a prompt could not be read elsewhere")
        finally:
            self.prefill.settle()

    async def _try(self, instance: PrefillInstance, body: bytes) -> str | None:
        """Return how a server has answered; None: it was not asked, as the pages are not needed any more."""
        if not await instance.find(self._dispatcher.client, self._headers):
            return "failed"
        seconds = max(self._timeouts.page, _MARGIN * (instance.wait + self._predicted))
        source = self._dispatcher.make_source(instance, self.lease, self._timeouts.begin)
        if not self.prefill.begin(source, seconds):
            return None
        instance.begin(self.lease, self._predicted)
        reading = instance.read(self._dispatcher.client, body, self._headers, _MOST_SECONDS)
        self._task = asyncio.ensure_future(reading)
        try:
            await asyncio.wait([self._task])
            return "cancelled" if self._task.cancelled() else self._task.result()
        finally:
            self._task.cancel()
            instance.end(self.lease)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def count_here(engine: Engine, prepared: PreparedRequest, length: int) -> int:
    """Count leading tokens of a prompt that an engine has; `length` if none can be shared, as none need to come."""
    size, keys = engine.config.page_size, prepared.shared_keys[: length // engine.config.page_size]
    if not keys:
        return length
    there, store = engine.scheduler.count_cached(keys), engine.pages.store
    return there if store is None else there + store.look_up(keys[there // size :]) * size


def keeps_tpot(engine: Engine, start: int, count: int, target: float | None) -> bool:
    """Return whether one step of all decodes and of `count` tokens after `start` others is within all TPOT targets.

    False too where there are no targets, or a step has no room for these tokens.

    Args:
      target: of the request that the tokens are of; None: the engine's own.
    """
    seconds, least = _step(engine, start, count, target)
    return least is not None and seconds is not None and seconds <= least


def breaks_tpot(engine: Engine, length: int, target: float | None) -> bool:
    """Return whether a step of all decodes and one more, after `length` tokens, takes longer than one of their targets.

    One that decodes alone breaks nothing.
    """
    if not engine.scheduler.running.decoding:
        return False
    seconds, least = _step(engine, length, 1, target)
    return least is not None and seconds is not None and seconds > least


def _step(engine: Engine, start: int, count: int, target: float | None) -> tuple[float | None, float | None]:
    """Predict the seconds of such a step, None if it has too many rows; and find the least TPOT target of all in it."""
    decoding = tuple(engine.scheduler.running.decoding)
    default = engine.config.slo.per_token(engine.plan.stage).tpot
    asked = (default if target is None else target, *(each.tpot_target for each in decoding))
    least = min((each for each in asked if each is not None), default=None)
    work, ranks = Work.of((each.computed, 1, True) for each in decoding), engine.plan.context
    if ranks > 1:
        work = work._replace(rows=-(-work.rows // ranks), decode_keys=-(-work.decode_keys // ranks))
        work = work.with_sharded(start, count, ranks, samples=True)
    else:
        work = work.with_chunk(start, count, True)
    return None if work.rows > engine.config.token_budget else engine.predictor.seconds(work), least


def _full_length(prepared: PreparedRequest, engine: Engine) -> int:
    """Tokens of all full pages before the prompt's last token."""
    size = engine.config.page_size
    return (len(prepared.tokens) - 1) // size * size


def _sent(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _FORWARDED if name in headers}


def _body(
    prepared: PreparedRequest,
    lease: str,
    count: int,
    prefix: Mapping[str, Any] | None = None,
    is_cached: bool = False,
) -> bytes:
    """Make the body of the request to compute a prompt's first `count` tokens, and to keep their pages.

    Args:
      prefix: from where that server gets the first pages; None: it has or computes them.
      is_cached: that server has all of them, and is to compute none.
    """
    request = prepared.request
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "lease": lease}
    if prefix is not None:
        params["prefix"] = dict(prefix)
    if is_cached:
        params["is_cached"] = True
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
        completions = tuple(each._replace(lease=lease, length=length) for each in handoff.completions)
        return handoff._replace(completions=completions)
    sampling = prepared.request.sampling
    seed = secrets.randbelow(2**31) if sampling.seed is None else sampling.seed
    return Handoff(seed, (Progress(lease, length, ()),) * sampling.n)
