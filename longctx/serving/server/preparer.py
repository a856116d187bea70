"""Reading of requests: bodies of bounded size, and their parsing outside of the event loop's thread."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from longctx.serving.server.auth import client_of
from longctx.serving.server.body_process import BodyProcess, ProcessEnded
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
_BODIES_SENT = 2  # to a process: one that it parses, and the one that it has next


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
            slot = max(self._free, key=self._free.count)  # of what serves several, the one that is least busy
            self._free.remove(slot)
            return slot
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
        self._processes = [BodyProcess(parser) for _ in range(num_processes)]
        self.threads = FairSlots([self._pool] * _THREADS)
        self.processes = FairSlots(self._processes * _BODIES_SENT)

    def start(self) -> None:
        """Start the processes now, rather than with the first long prompt."""
        for process in self._processes:
            process.start()

    async def read(self, kind: Kind, body: bytes, origin: Origin) -> Any:
        """Parse a body, see `parse_body`: return a `ParsedCall`, or what else the kind gives."""
        size = len(body) + origin.num_bytes
        if size <= SHORT_BYTES and kind not in ("chat", "responses", "cache"):
            return parse_body(self.parser, kind, body, origin)
        # A chat template is rendered by a process of its own, for which only a thread may wait.
        if size < LONG_BYTES or not self._processes:
            pool = await self.threads.take(origin.tenant)
            parsing = asyncio.get_running_loop().run_in_executor(pool, parse_body, self.parser, kind, body, origin)
            return await _until_done(parsing, lambda: self.threads.give(origin.tenant, pool))
        process = await self.processes.take(origin.tenant)
        job = process.submit(kind, body, origin)
        try:
            return await _until_done(job, lambda: self.processes.give(origin.tenant, process))
        except ProcessEnded:
            message = "the process that read the prompt has ended: memory may be short"
            raise ApiError(503, message, code="server_is_overloaded", retry_after=1.0) from None
        except asyncio.CancelledError:
            process.abandon(job)
            raise

    def close(self) -> None:
        """End threads and processes; what they are parsing is discarded."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()


async def _until_done(job: "asyncio.Future[_Result]", give: Callable[[], object]) -> _Result:
    """Wait for a job, which goes on if this is cancelled; `give` is called when it ends."""

    def end(job: "asyncio.Future[_Result]") -> None:
        give()
        if not job.cancelled():
            job.exception()  # which nothing else may ask for

    job.add_done_callback(end)
    await asyncio.wait([job])
    return job.result()
