"""`BodyProcess`: process that parses long bodies, since tokenising and hashing hold the interpreter's lock."""

import asyncio
import atexit
import contextlib
import multiprocessing
import pickle
import signal
import socket
import traceback
from collections import deque
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from longctx.serving.server.calls import Kind, Origin
from longctx.serving.server.request_parser import RequestParser, parse_body

_ABANDONED_SECONDS = 2.0  # for which a body is still parsed whose client has left: about as long as a process starts
_MOST_ENDS = 2  # of processes that parse a body
_SIZE_BYTES = 8  # of what says how long a message is
_BUFFER_BYTES = 2**20  # of an answer: of most prompts all of it


class ProcessEnded(Exception):
    """The process has ended before it has parsed a body. `is_first`: it was parsing this one."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first


class _Job(NamedTuple):
    task: "asyncio.Task[Any]"
    answer: "asyncio.Future[Any]"


class BodyProcess:
    """Process that parses one body at a time, while the next one is on its way. It is started again after it has ended.

    The event loop itself writes to it and reads from it: between threads each message would wait for the interpreter's
    lock. What they send is pickled, as they are one program. All methods but `close` are for one event loop.
    """

    def __init__(self, parser: RequestParser) -> None:
        self._parser = parser
        self._process: SpawnProcess | None = None
        self._opening: asyncio.Task[asyncio.StreamWriter] | None = None  # None: there is no process
        self._jobs: deque[_Job] = deque()  # that it has been sent, the one that it parses first
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def start(self) -> "asyncio.Task[asyncio.StreamWriter]":
        """Start the process, if it is not there."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # nothing may wait
        return self._opening

    def submit(self, kind: Kind, body: bytes, origin: Origin) -> "asyncio.Task[Any]":
        """Parse a body, see `parse_body`; raise ProcessEnded if process after process ends while it does so."""
        return asyncio.create_task(self._parse(kind, body, origin))

    def abandon(self, job: "asyncio.Task[Any]") -> None:
        """End a job whose result nothing waits for, with the process if it is still parsing that after some seconds."""
        if all(each.task is not job for each in self._jobs):
            job.cancel()
        elif job not in self._abandoned:
            self._abandoned.add(job)
            job.add_done_callback(self._abandoned.discard)
            self._end_later(job)

    def close(self) -> None:
        """End the process, from any thread."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def _end_later(self, job: "asyncio.Task[Any]") -> None:
        asyncio.get_running_loop().call_later(_ABANDONED_SECONDS, self._end, job)

    def _end(self, job: "asyncio.Task[Any]") -> None:
        if job.done():
            return
        if self._process is not None and self._jobs and self._jobs[0].task is job:
            self._process.kill()
        else:
            self._end_later(job)

    async def _parse(self, kind: Kind, body: bytes, origin: Origin) -> Any:
        content = kind, body, origin
        message = await asyncio.to_thread(_framed, content) if origin.num_bytes else _framed(content)
        num_ends = 0
        while num_ends < _MOST_ENDS and not self._is_closed:
            opening = self.start()
            try:
                writer = await asyncio.shield(opening)
            except OSError:  # it can't be started
                break
            if opening is not self._opening:  # it has ended already
                num_ends += 1
                continue
            answer = asyncio.get_running_loop().create_future()
            task = asyncio.current_task()
            assert task is not None
            self._jobs.append(_Job(task, answer))
            writer.write(message)
            try:
                return await answer
            except ProcessEnded as ended:
                num_ends += ended.is_first
        raise ProcessEnded(True)

    async def _open(self) -> asyncio.StreamWriter:
        try:
            ours, theirs = socket.socketpair()
            with contextlib.ExitStack() as stack:
                stack.callback(ours.close)
                process = multiprocessing.get_context("spawn").Process(
                    target=_parse_bodies, args=(self._parser, theirs), daemon=True
                )
                with theirs:
                    await asyncio.to_thread(process.start)
                reader, writer = await asyncio.open_connection(sock=ours, limit=_BUFFER_BYTES)
                stack.pop_all()
        except BaseException:
            self._opening = None
            raise
        atexit.register(process.kill)  # before multiprocessing waits for it, whose signal it ignores
        self._process = process
        if self._is_closed:
            process.kill()
        self._receiving = asyncio.create_task(self._receive(process, reader, writer))
        return writer

    async def _receive(self, process: SpawnProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on answers until the process ends."""
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(_SIZE_BYTES), "big")
                content = await reader.readexactly(size)
                long = size > _BUFFER_BYTES
                is_parsed, result = await asyncio.to_thread(pickle.loads, content) if long else pickle.loads(content)
                answer = self._jobs[0].answer
                if answer.done():  # it was cancelled
                    pass
                elif is_parsed:
                    answer.set_result(result)
                else:
                    answer.set_exception(result)
                self._jobs.popleft()
                del answer, content, result
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            process.kill()
            atexit.unregister(process.kill)
            writer.transport.abort()
            self._opening, jobs, self._jobs = None, self._jobs, deque()
            for number, job in enumerate(jobs):
                if job.task in self._abandoned:
                    job.task.cancel()
                elif not job.answer.done():
                    job.answer.set_exception(ProcessEnded(number == 0))


def _framed(message: object) -> bytes:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(content).to_bytes(_SIZE_BYTES, "big") + content


# In the process.


def _parse_bodies(parser: RequestParser, connection: socket.socket) -> None:
    """Parse bodies until the parent ends, however that ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which the parent acts on
        signal.signal(number, signal.SIG_IGN)
    with connection, contextlib.suppress(OSError), connection.makefile("rb", _BUFFER_BYTES) as reader:
        while len(head := reader.read(_SIZE_BYTES)) == _SIZE_BYTES:
            content = reader.read(size := int.from_bytes(head, "big"))
            if len(content) < size:
                break
            try:
                answer = _framed((True, parse_body(parser, *pickle.loads(content))))
            except Exception as error:
                answer = _framed_error(error)
            connection.sendall(answer)


def _framed_error(error: Exception) -> bytes:
    error.add_note(traceback.format_exc())
    try:
        return _framed((False, error))
    except Exception:
        return _framed((False, RuntimeError(f"{type(error).__name__}: {error}")))
