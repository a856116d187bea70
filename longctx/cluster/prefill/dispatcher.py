"""`PrefillDispatcher`: decides whether another server reads a prompt for this one, and which, and has it read.

A prompt is read here if little of it is not in the cache, or if the step that reads all of it is predicted to keep the
TPOT of those that decode. Else it is sent to the server that is predicted to have read it first, and the request waits
in the engine for its full pages, which come while later ones are computed. The engine computes what follows the last
full page itself and draws the first token: so no answer has to be waited for, and whatever goes wrong only means that
pages don't come.

Source: Mooncake, section 4 (inline prefill), section 5.2 (the rule by which an instance is chosen).
"""

import asyncio
import contextlib
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal

import httpx
import msgspec

from longctx.cluster.prefill.instance import PrefillInstance
from longctx.cluster.prefill.source import RemotePrefill
from longctx.cluster.tpot_check import keeps_tpot
from longctx.cluster.transfer.lease import make_lease_id
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.thread import Received
from longctx.serving.kv_cache.connector import LeasedSource
from longctx.serving.request.handoff import Handoff, Progress
from longctx.serving.request.request import PreparedRequest
from longctx.serving.validation import check_integer

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0  # between two looks at how busy a server is
_PATIENCE = 10.0  # seconds until a server must have begun with a prompt that was sent to it
# A server is not asked whose queue is longer than both: those that decode here would wait for a prompt at every step.
_MOST_WAIT, _MOST_QUEUED = 20.0, 10.0  # predicted seconds, and times what the prompt itself takes
_LEAST_SECONDS, _MARGIN = 60.0, 5.0  # a prompt may take so long, or so much longer than predicted
_CLOSE_SECONDS = 5.0
_FORWARDED = ("authorization", "x-request-id", "traceparent")

Decision = Literal["short", "quick", "nobody", "remote"]
"""Where a prompt is read: here, as it is short, or keeps the TPOT, or nobody else can; or elsewhere."""


class PrefillDispatcher:
    """Asks other servers from a thread of its own. Its methods may be called from any thread, and don't wait.

    Args:
      instances: who may be asked.
      source: makes the source of a lease's pages at an address, see `PageReceiver.source`.
      inline_tokens: tokens of a prompt, not cached, up to which it is read here.

    Attributes:
      decisions: how many prompts were read where, see `Decision`.
      answers: how reading elsewhere ended, see `Answer`; `"cancelled"`: nobody wanted it any more.
    """

    def __init__(
        self,
        engine: Engine,
        instances: list[PrefillInstance],
        source: Callable[..., LeasedSource],
        inline_tokens: int = 512,
    ) -> None:
        self._inline_tokens = check_integer("inline_tokens", inline_tokens, 0)
        self._engine, self._instances, self._source = engine, instances, source
        self.decisions: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self._next = 0  # who comes first among those that are as busy
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._client: httpx.AsyncClient | None = None
        self._thread = threading.Thread(target=self._run, name="longctx prefill elsewhere", daemon=True)
        self._thread.start()

    def dispatch(self, prepared: PreparedRequest, headers: Mapping[str, str]) -> Received | None:
        """Have a prompt read elsewhere, and what its request waits for; None: it is read here.

        Args:
          headers: of the request. Those that say who sends it go along, as pages are found by the same tenant only.
        """
        decision, seconds = self._decide(prepared)
        self.decisions[decision] += 1
        if decision != "remote":
            return None
        request, lease = prepared.request, make_lease_id()
        seed, size = request.sampling.seed, self._engine.config.page_size
        length = (len(prepared.tokens) - 1) // size * size
        seed = secrets.randbelow(2**31) if seed is None else seed
        # The first one to be admitted fetches the pages, which the others find in the cache.
        handoff = Handoff(seed, (Progress(lease, length, ()),) * request.sampling.n)
        sent = {name: headers[name] for name in _FORWARDED if name in headers}
        reading = _Reading(self, prepared, lease, seconds, sent)
        self._begin(reading.run())
        return Received(handoff, {lease: reading.prefill})

    def close(self) -> None:
        """End all reading elsewhere, and the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_SECONDS)

    def info(self) -> dict[str, Any]:
        """Of its decisions, for `/server_info`."""
        return {
            "instances": [{"url": each.url, "is_open": each.is_open} for each in self._instances],
            "decisions": dict(self.decisions),
            "answers": dict(self.answers),
        }

    def _decide(self, prepared: PreparedRequest) -> tuple[Decision, float]:
        """Where a prompt is read, and how many seconds that is predicted to take."""
        engine, total = self._engine, len(prepared.tokens)
        keys, size = prepared.shared_keys, engine.config.page_size
        if not keys:  # nothing of it can be shared
            return "short", 0.0
        there = engine.scheduler.count_cached(keys)
        if engine.pages.store is not None:
            there += engine.pages.store.look_up(keys[there // size :]) * size
        if total - there <= self._inline_tokens or (total - 1) // size * size <= there:
            return "short", 0.0
        if keeps_tpot(engine, there, total - there, prepared.request.tpot_target):
            return "quick", 0.0
        seconds = engine.scheduler.forecast.prefill_seconds(there, total)
        return "nobody" if self.choose([], seconds) is None else "remote", seconds

    def choose(self, tried: list[PrefillInstance], seconds: float) -> PrefillInstance | None:
        """Who is predicted to be free first for a prompt that takes so long; of those that are as busy, in turns."""
        count = len(self._instances)
        turns = [self._instances[(self._next + i) % count] for i in range(count)]
        found = min((each for each in turns if each.is_open and each not in tried), key=_wait, default=None)
        return None if found is None or found.wait > max(_MOST_WAIT, _MOST_QUEUED * seconds) else found

    # In the thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._client = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_keepalive_connections=20))
        watching = [self._loop.create_task(self._watch(each)) for each in self._instances]
        try:
            self._loop.run_forever()
        finally:
            left = [*watching, *self._tasks]
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._client.aclose())
            self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        def begin() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:  # it is closed
            work.close()

    async def _watch(self, instance: PrefillInstance) -> None:
        assert self._client is not None
        while True:
            was_there = instance.address is not None
            await instance.look(self._client)
            if was_there != (instance.address is not None):
                state = "not there any more" if was_there else f"found: its pages are at {instance.address}"
                _LOG.info("longctx: the server %s that reads prompts is %s", instance.url, state)
            await asyncio.sleep(_LOOK_SECONDS)

    async def ask(self, instance: PrefillInstance, body: bytes, headers: Mapping[str, str], seconds: float) -> str:
        assert self._client is not None
        return await instance.read(self._client, body, headers, seconds)

    def make_source(self, instance: PrefillInstance, lease: str, seconds: float) -> LeasedSource:
        self._next += 1
        return self._source(instance.address, lease, deadline=seconds, patience=_PATIENCE)

    def call(self, act: Callable[[], object]) -> None:
        """Call something in the thread's loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)


class _Reading:
    """A prompt that is read elsewhere."""

    def __init__(
        self,
        dispatcher: PrefillDispatcher,
        prepared: PreparedRequest,
        lease: str,
        seconds: float,
        headers: Mapping[str, str],
    ) -> None:
        self._dispatcher, self._prepared, self._lease, self._headers = dispatcher, prepared, lease, headers
        self._predicted = seconds
        self._task: asyncio.Task[str] | None = None
        self.prefill = RemotePrefill(lambda: dispatcher.call(self._cancel))

    async def run(self) -> None:
        """Ask one server after the other, until one has read it."""
        dispatcher, tried = self._dispatcher, list[PrefillInstance]()
        try:
            body = await asyncio.to_thread(self._body)
            while (instance := dispatcher.choose(tried, self._predicted)) is not None:
                tried.append(instance)
                limit = max(_LEAST_SECONDS, _MARGIN * (instance.wait + self._predicted))
                if not self.prefill.begin(dispatcher.make_source(instance, self._lease, limit), limit):
                    dispatcher.answers["cancelled"] += 1
                    return
                answer = await self._ask(instance, body, limit)
                dispatcher.answers[answer] += 1
                if answer == "done":
                    return
                _LOG.info("longctx: a prompt was sent to %s: %s", instance.url, answer)
                if not self.prefill.end():
                    return
        except Exception:
            _LOG.exception("longctx: a prompt could not be read elsewhere")
        finally:
            self.prefill.settle()

    async def _ask(self, instance: PrefillInstance, body: bytes, limit: float) -> str:
        instance.begin(self._lease, self._predicted)
        self._task = asyncio.ensure_future(self._dispatcher.ask(instance, body, self._headers, limit))
        try:
            await asyncio.wait([self._task])
            return "cancelled" if self._task.cancelled() else self._task.result()
        finally:
            self._task.cancel()
            instance.end(self._lease)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _body(self) -> bytes:
        request = self._prepared.request
        params = {"do_remote_decode": True, "do_remote_prefill": False, "lease": self._lease}
        body: dict[str, Any] = {"prompt": self._prepared.tokens.tolist(), "max_tokens": 1, "temperature": 0}
        body |= {"priority": request.priority, "kv_transfer_params": params}
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        return msgspec.json.encode(body)


def _wait(instance: PrefillInstance) -> float:
    return instance.wait
