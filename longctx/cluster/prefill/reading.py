"""`Reading`: a prompt that another server reads, while its pages come; and the thread that asks such servers."""

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

import httpx

from longctx.cluster.prefill.instance import PrefillInstance
from longctx.cluster.prefill.source import RemotePrefill
from longctx.cluster.prefill.staging import StagedPages
from longctx.serving.engine.engine import Engine
from longctx.serving.kv_cache.connector import LeasedSource, PageStore
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.request.request import PreparedRequest

_LOG = logging.getLogger(__name__)
_MARGIN = 5.0  # a page may take so much longer than all is predicted to
_MOST_SECONDS = 3600.0  # and a whole prompt so long
_CLOSE_SECONDS = 5.0


class Patience(NamedTuple):
    """Seconds that a server has.

    Attributes:
      begin: until it must have begun with a prompt that was sent to it.
      page: for the next page at least.
    """

    begin: float
    page: float


COMPUTES, LENDS = Patience(10.0, 60.0), Patience(3.0, 10.0)
"""Of who computes pages behind others' work, and of who has them."""


class PrefillThread:
    """Asks servers that read prompts, from a thread of its own, which the first of them starts.

    Args:
      source: makes the source of a lease's pages at some addresses, see `PageReceiver.source`.

    Attributes:
      answers: how reading elsewhere ended, see `Answer`; `"cancelled"`: nobody wanted it any more.
    """

    def __init__(self, source: Callable[..., LeasedSource]) -> None:
        self._source = source
        self.answers: Counter[str] = Counter()
        self._starting = threading.Lock()
        self._num_staged = 0  # pages that are coming to host memory
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lasting: set[asyncio.Task[None]] = set()  # until the thread ends
        self._client: httpx.AsyncClient | None = None
        self._thread = threading.Thread(target=self._run, name="longctx prefill elsewhere", daemon=True)

    def close(self) -> None:
        """End all reading elsewhere, and the thread."""
        with self._starting:
            if not self._thread.ident:
                self._loop.close()
            elif self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(_CLOSE_SECONDS)

    def begin(self, work: Coroutine[Any, Any, None], is_lasting: bool = False) -> None:
        """Run something in the thread; `is_lasting`: until that ends."""

        def begin() -> None:
            tasks, task = self._lasting if is_lasting else self._tasks, self._loop.create_task(work)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        try:
            with self._starting:
                if not self._thread.ident and not self._loop.is_closed():
                    self._thread.start()
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:  # it is closed
            work.close()

    def stage(
        self, engine: Engine, prepared: PreparedRequest, source: LeasedSource, first: int, stop: int
    ) -> StagedPages | None:
        """Bring full pages of a prompt to the engine's host memory; None: it has none, too little, or several of them.

        Args:
          first, stop: tokens of the prompt, in whole pages.
        """
        store, size = engine.pages.store, engine.config.page_size
        first, stop = first // size, stop // size
        if not isinstance(store, TieredStore) or engine.process_group.num_processes > 1:
            return None
        if self._num_staged + stop - first > store.pinnable_pages:  # those that wait would evict each other
            return None
        keys = prepared.shared_keys
        parents, tenant = [b"", *keys], prepared.request.tenant
        pages = [PageStore(keys[i], -1, i, tenant, parents[i]) for i in range(first, stop)]
        staged = StagedPages(store, source, pages, self.call)
        with self._starting:
            self._num_staged += staged.num_pages
        staged.ready.add_done_callback(lambda _: self._end_staging(staged))
        self.begin(staged.run())
        return staged

    def _end_staging(self, staged: StagedPages) -> None:
        with self._starting:
            self._num_staged -= staged.num_pages

    def call(self, act: Callable[[], object]) -> None:
        """Call something in the thread's loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)

    # In the thread.

    @property
    def client(self) -> httpx.AsyncClient:
        """By which servers are asked."""
        assert self._client is not None
        return self._client

    def make_source(self, instance: PrefillInstance, lease: str, patience: float) -> LeasedSource:
        """Where the pages of a lease come from. ApiError, if they may not."""
        return self._source(instance.addresses, lease, deadline=_MOST_SECONDS, patience=patience)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._client = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_keepalive_connections=20))
        try:
            self._loop.run_forever()
        finally:
            left = [*self._tasks, *self._lasting]
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._client.aclose())
            self._loop.close()


class Reading:
    """A prompt that is read elsewhere.

    Args:
      lease: under which its pages are kept there.
      body: makes what is sent, in another thread, as a prompt may be long.
      headers: that are sent along.
      seconds: that reading it is predicted to take.
      choose: who is asked next, after those that were asked in vain; None: nobody.
    """

    def __init__(
        self,
        thread: PrefillThread,
        lease: str,
        body: Callable[[], bytes],
        headers: Mapping[str, str],
        seconds: float,
        choose: Callable[[list[PrefillInstance]], PrefillInstance | None],
        patience: Patience = COMPUTES,
    ) -> None:
        self._thread, self._lease, self._body, self._headers = thread, lease, body, headers
        self._predicted, self._choose, self._patience = seconds, choose, patience
        self._task: asyncio.Task[str] | None = None
        self.prefill = RemotePrefill(lambda: thread.call(self._cancel))

    async def run(self) -> None:
        """Ask one server after the other, until one has read it."""
        answers, tried = self._thread.answers, list[PrefillInstance]()
        try:
            body = await asyncio.to_thread(self._body)
            while (instance := self._choose(tried)) is not None:
                tried.append(instance)
                answer = await self._try(instance, body)
                answers[answer or "cancelled"] += 1
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
        """How a server has answered; None: it was not asked, as nobody wants the pages any more."""
        if not await instance.find(self._thread.client, self._headers):
            return "failed"
        seconds = max(self._patience.page, _MARGIN * (instance.wait + self._predicted))
        source = self._thread.make_source(instance, self._lease, self._patience.begin)
        if not self.prefill.begin(source, seconds):
            return None
        instance.begin(self._lease, self._predicted)
        reading = instance.read(self._thread.client, body, self._headers, _MOST_SECONDS)
        self._task = asyncio.ensure_future(reading)
        try:
            await asyncio.wait([self._task])
            return "cancelled" if self._task.cancelled() else self._task.result()
        finally:
            self._task.cancel()
            instance.end(self._lease)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
