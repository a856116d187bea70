"""Reading of requests: bodies of bounded size, and their parsing outside of the event loop's thread."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from longctx.serving.server.auth import client_of
from longctx.serving.server.calls import Kind, Origin
from longctx.serving.server.errors import DROPPED, ApiError
from longctx.serving.server.request_parser import RequestParser, parse_body, parse_fields
from longctx.serving.server.settings import ServerSettings

_Model = TypeVar("_Model", bound=BaseModel)
_Slot = TypeVar("_Slot")

_BODY_BYTES, _TOKEN_BYTES = 2**20, 16  # a token is 4 bytes of text or so, 8 as an id, and 12 as escaped characters
_CONTROL_BYTES = 2**26  # a request that moves has log probabilities
_LARGEST = 4  # bodies of the largest size that are held at once, or as many smaller ones
_RETRY = 1.0  # seconds
_GONE = 499  # status of an answer that has no reader
_Result = TypeVar("_Result")


def too_large(most: int) -> ApiError:
    """Return the answer to a body of more bytes than allowed."""
    headers = {"connection": "close"}
    return ApiError(413, f"the body must be at most {most} bytes", code="body_too_large", headers=headers)


class Bodies:
    """Bodies that are being received or parsed, of a bounded total size: admission counts only what is parsed.

    When that is reached, a tenant that has less than its share still gets it: the total by the number of tenants.

    Args:
      settings: of the server.
      max_length: tokens of the longest sequence.

    Attributes:
      most: bytes of a client's body, at most.
    """

    def __init__(self, settings: ServerSettings, max_length: int) -> None:
        self.most = settings.max_body_bytes or _BODY_BYTES + _TOKEN_BYTES * max_length
        self._most_control = settings.max_body_bytes or max(self.most, _CONTROL_BYTES)
        self._room, self._timeout = max(_LARGEST * self.most, self._most_control), settings.body_timeout
        self._held: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        """Bytes that are held of all bodies."""
        return self._held.total()

    @contextlib.asynccontextmanager
    async def read(self, request: Request, most: int | None = None) -> AsyncIterator[bytes]:
        """Yield the body of a request, which is held meanwhile.

        It must be JSON by its header, which no form of a web page is, and of `most` bytes; None: those of a client.
        """
        most = self.most if most is None else most
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise ApiError(415, f"the header Content-Type must be application/json, got {kind[:80]!r}")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > most:
            raise too_large(most)
        parts: list[bytes] = []
        tenant = client_of(request).tenant
        try:
            async for part in self._parts(request, tenant, most):
                parts.append(part)
            body = b"".join(parts)
            yield body
        finally:
            self._held[tenant] -= sum(map(len, parts))
            if not self._held[tenant]:
                del self._held[tenant]

    async def _parts(self, request: Request, tenant: str, most: int) -> AsyncIterator[bytes]:
        """Yield the body's parts, which count as held from now on."""
        size = 0
        try:
            async with asyncio.timeout(self._timeout):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise too_large(most)
                    self._hold(tenant, len(part))
                    yield part
        except TimeoutError:
            message = f"the body must be there within {self._timeout:g} seconds"
            raise ApiError(408, message, headers={"connection": "close", "x-should-retry": "false"}) from None
        except ClientDisconnect:
            raise ApiError(_GONE, "the client left while it sent the body") from None

    async def fields(self, request: Request, model: type[_Model]) -> _Model:
        """Return the fields of a body of control; raise ApiError as `read` does, or if it is not of the model."""
        async with self.read(request, self._most_control) as body:
            return parse_fields(model, body)

    def _hold(self, tenant: str, more: int) -> None:
        """Count more bytes of a tenant's bodies as held."""
        share = self._room // len(self._held.keys() | {tenant})
        if self.num_held + more > self._room and self._held[tenant] + more > share:
            headers = {"connection": "close", DROPPED: "queue"}
            raise ApiError(429, "too many long prompts are being read", None, "slow_down", _RETRY, headers)
        self._held[tenant] += more


async def unless_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of what is done for a request whose body has been read.

    Raises:
      ApiError: the client has left; the work is cancelled.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(_GONE, "the client has left")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


_THREADS = 4
SHORT_BYTES, LONG_BYTES = 2**11, 2**15
"""Bodies up to the first are read at once, which is quicker than to hand them over; those from the second in a process,
since tokenising and hashing hold the interpreter's lock."""
_ABANDONED_SECONDS = 2.0  # for which a body is still parsed whose client has left: about as long as a process starts


class FairSlots(Generic[_Slot]):
    """Slots that tenants get in turn, however many wait of one. Its methods are for one event loop.

    The next one is of the tenant that has the fewest; of equals, whose last turn is longest ago.

    Examples:
      >>> import asyncio
      >>> from longctx.serving.server.preparer import FairSlots
      >>> async def use(slots, tenant, order):
      ...     slot = await slots.take(tenant)
      ...     order.append(tenant)
      ...     slots.give(tenant, slot)
      >>> async def main():
      ...     slots, order = FairSlots(["the slot"]), []
      ...     slot = await slots.take("a")
      ...     waiting = [asyncio.create_task(use(slots, tenant, order)) for tenant in ("a", "a", "a", "b")]
      ...     await asyncio.sleep(0)
      ...     slots.give("a", slot)
      ...     await asyncio.gather(*waiting)
      ...     return order
      >>> asyncio.run(main())
      ['b', 'a', 'a', 'a']
    """

    def __init__(self, slots: Iterable[_Slot]) -> None:
        self._free = deque(slots)
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[_Slot]]] = {}  # the tenant whose last turn is longest ago first

    @property
    def num_waiting(self) -> int:
        """Calls of `take` that wait."""
        return sum(not each.done() for queue in self._waiting.values() for each in queue)

    async def take(self, tenant: str) -> _Slot:
        """Wait for a slot, which has to be given back."""
        if self._free:
            self._taken[tenant] += 1
            return self._free.popleft()
        waiting: asyncio.Future[_Slot] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():  # it was given in the same step of the loop
                self.give(tenant, waiting.result())
            raise

    def give(self, tenant: str, slot: _Slot) -> None:
        """Give back a tenant's slot, to the tenant whose turn it is."""
        while self._waiting:
            following = min(self._waiting, key=self._taken.__getitem__)
            queue = self._waiting.pop(following)
            while queue and queue[0].cancelled():
                queue.popleft()
            if queue:
                queue.popleft().set_result(slot)
                self._taken[following] += 1
                if queue:
                    self._waiting[following] = queue
                break
        else:
            self._free.append(slot)
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]


class Preparer:
    """Parser that runs where it is called for short bodies, in threads for others, and in processes for long ones.

    Tenants wait in turn for threads and processes. What a client has asked for that leaves is not begun, or ended.
    """

    def __init__(self, parser: RequestParser, num_processes: int) -> None:
        self.parser = parser
        self._pool = ThreadPoolExecutor(_THREADS, "longctx-prepare")
        self._workers = [_Worker(parser) for _ in range(num_processes)]
        self.threads: FairSlots[ThreadPoolExecutor] = FairSlots([self._pool] * _THREADS)
        self.processes = FairSlots(self._workers)

    def start(self) -> None:
        """Start the processes now, rather than with the first long prompt."""
        for worker in self._workers:
            worker.start()

    async def read(self, kind: Kind, body: bytes, origin: Origin) -> Any:
        """Parse a body, see `parse_body`: return a `ParsedCall`, or what else the kind gives."""
        size = len(body) + origin.num_bytes
        if size <= SHORT_BYTES and kind not in ("chat", "responses", "cache"):
            return parse_body(self.parser, kind, body, origin)
        # A chat template is rendered by a process of its own, for which only a thread may wait.
        if size < LONG_BYTES or not self._workers:
            pool = await self.threads.take(origin.tenant)
            job = _held(
                self.threads, origin.tenant, pool, lambda: pool.submit(parse_body, self.parser, kind, body, origin)
            )
            return await asyncio.wrap_future(job)
        worker = await self.processes.take(origin.tenant)
        job = _held(self.processes, origin.tenant, worker, lambda: worker.submit(kind, body, origin))
        try:
            return await asyncio.wrap_future(job)
        except BrokenProcessPool:
            message = "the process that read the prompt has ended: memory may be short"
            raise ApiError(503, message, code="server_is_overloaded", retry_after=1.0) from None
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(_ABANDONED_SECONDS, worker.end_job, job)
            raise

    def close(self) -> None:
        """End threads and processes; what they are parsing is discarded."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()


def _held(slots: FairSlots[_Slot], tenant: str, slot: _Slot, begin: Callable[[], "Future[Any]"]) -> "Future[Any]":
    """Begin a job that holds a tenant's slot until it ends, also after its client has left."""
    loop = asyncio.get_running_loop()

    def give(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(slots.give, tenant, slot)

    try:
        job = begin()
    except BaseException:
        slots.give(tenant, slot)
        raise
    job.add_done_callback(give)
    return job


class _Worker:
    """Process that parses one body at a time. It is started again after it has ended.

    A thread waits for it, since to start it takes long.
    """

    def __init__(self, parser: RequestParser) -> None:
        self._parser = parser
        self._thread = ThreadPoolExecutor(1, "longctx-prepare")
        self._lock = threading.Lock()
        self._executor: ProcessPoolExecutor | None = None
        self._pid: Future[int] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process, if it is not there."""
        self._thread.submit(self._process)

    def submit(self, kind: Kind, body: bytes, origin: Origin) -> "Future[Any]":
        return self._thread.submit(self._run, kind, body, origin)

    def end_job(self, job: "Future[Any]") -> None:
        """End the process, if it is still parsing the body of a job."""
        with self._lock:
            pid = self._pid
            if job.done() or self._executor is None:
                return
            if pid is not None and pid.done() and pid.exception() is None:
                self._executor = None
                os.kill(pid.result(), signal.SIGKILL)

    def close(self) -> None:
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown(wait=False, cancel_futures=True)

    # In the thread.

    def _run(self, kind: Kind, body: bytes, origin: Origin) -> Any:
        try:
            job = self._process().submit(_read_there, kind, body, origin)
        except BrokenProcessPool:  # it has ended since its last job
            job = self._process(again=True).submit(_read_there, kind, body, origin)
        try:
            return job.result()
        except BrokenProcessPool:
            if not self._is_closed:
                self._process(again=True)
            raise

    def _process(self, again: bool = False) -> ProcessPoolExecutor:
        with self._lock:
            if self._executor is None or again:
                context = multiprocessing.get_context("spawn")
                self._executor = ProcessPoolExecutor(1, context, _begin, (self._parser,))
                self._pid = self._executor.submit(os.getpid)
            return self._executor


_parser: RequestParser


def _begin(parser: RequestParser) -> None:
    """Keep a parser, in a new process that ends with its parent, however that ends."""
    global _parser
    _parser = parser
    for number in (signal.SIGINT, signal.SIGTERM):  # which the parent acts on
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _read_there(kind: Kind, body: bytes, origin: Origin) -> Any:
    return parse_body(_parser, kind, body, origin)
