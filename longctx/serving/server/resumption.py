"""Streams that clients resume over another connection, and events of requests that are kept for that.

An event's id says how many events each choice has had, and their checksum. A client that lost its connection sends the
same body with the last id: the stream is written again from its first event, and what the client has had is compared
and left out. Its tokens are computed again with the same seed, unless an instance has kept their events for a router.
"""

import asyncio
import contextlib
import dataclasses
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from msgspec.structs import replace

from longctx.serving.request.output import Event
from longctx.serving.request.request import PreparedRequest, Request
from longctx.serving.server.calls import ParsedCall
from longctx.serving.server.errors import ApiError
from longctx.serving.server.frontend import ActiveCall
from longctx.serving.server.relay import encode_ends, encode_events
from longctx.serving.server.response_writer import Answer, ResponseWriter, encode

LAST_EVENT_ID = "Last-Event-ID"
"""Header with the id of the last event that a client has read of a stream."""

_ID = re.compile(r"([!-~]{1,300})\.([0-9]{1,12})\.([0-9a-f]{1,8})((?:\.[0-9]{1,9}-[0-9a-f]{1,8})+)")
_CALL_ID = re.compile(rb'"id":"[^"]*"')  # of a tool's call, which is drawn; in a text the quotes are escaped
_ALIVE_SECONDS = 2.0  # after which an empty line says that the request lives
_MOST_KEPT = 64 * 2**20  # bytes of lines of all streams together


class ResumableStream:
    """Stream whose events have ids, up to one of which its client may have had it.

    Attributes:
      name: of the stream: the id of its first request. created: seconds since 1970.
    """

    def __init__(self, call: ParsedCall, request_id: str, last_id: str | None) -> None:
        """Begin a stream, or the rest of one; ApiError: the id is none, or of a stream that another body began."""
        self.name, self.created, own = request_id, int(time.time()), _checksum(call)
        # Events and checksum of each choice; the last ones are of no choice.
        self._seen = [(0, 0)] * (len(call.requests) * call.num_choices + 1)
        self._sent = self._seen.copy()
        if last_id is not None:
            found = _ID.fullmatch(last_id)
            if found is None:
                message = f"the header {LAST_EVENT_ID} must be the id of an event of a resumable stream"
                raise ApiError(400, message, LAST_EVENT_ID)
            seen = [part.split("-") for part in found[4][1:].split(".")]
            if int(found[3], 16) != own or len(seen) != len(self._seen):
                message = f"the header {LAST_EVENT_ID} needs the body, and the key, that its stream began with"
                raise ApiError(400, message, LAST_EVENT_ID)
            self.name, self.created = found[1], int(found[2])
            self._seen = [(int(number), int(checksum, 16)) for number, checksum in seen]
        self._head = f"id: {self.name}.{self.created}.{own:x}"
        self._parts = [f"{number}-{checksum:x}" for number, checksum in self._seen]

    def requests_of(self, call: ParsedCall) -> list[PreparedRequest]:
        """Return the requests of the call, which draw the same tokens whenever the stream is made."""
        found = []
        for number, prepared in enumerate(call.requests):
            name, sampling = f"{self.name}-{number}", prepared.request.sampling
            if sampling.seed is None:
                sampling = dataclasses.replace(sampling, seed=crc32(name.encode()) % 2**31)
            request = dataclasses.replace(prepared.request, stream_id=name, sampling=sampling)
            found.append(prepared._replace(request=request))
        return found

    def event(self, writer: ResponseWriter, piece: Any) -> bytes:
        """Return the event of a piece, with its id; nothing if the client has had it. ApiError: it had another one."""
        if not isinstance(piece, Answer):
            return writer.event(piece)
        choice = piece.choices[0].index if piece.choices else -1
        number, checksum = self._sent[choice]
        told = [replace(each, logprobs=None) for each in piece.choices]  # their last bits differ from batch to batch
        number, checksum = number + 1, crc32(_CALL_ID.sub(b"", encode(told)), checksum)
        self._sent[choice] = number, checksum
        seen, expected = self._seen[choice]
        if number == seen and checksum != expected:
            raise _lost()
        if number <= seen:
            return b""
        self._parts[choice] = f"{number}-{checksum:x}"
        return ".".join([self._head, *self._parts]).encode() + b"\n" + writer.event(piece)

    def events(self, writer: ResponseWriter, number: int, events: Sequence[Event]) -> bytes:
        """Return the events of what a request's events make."""
        return b"".join(self.event(writer, piece) for piece in writer.pieces(number, events))

    def check_end(self) -> None:
        """Raise ApiError if the client has had more than there is."""
        if any(number < seen for (number, _), (seen, _) in zip(self._sent, self._seen, strict=True)):
            raise _lost()


def resumable_stream(call: ParsedCall, request_id: str, last_id: str | None) -> ResumableStream | None:
    """Return the stream of a call; None: it asks for no resumable one. ApiError: a wrong `Last-Event-ID`."""
    options = call.body.stream_options
    if options is not None and options.resumable:
        return ResumableStream(call, request_id, last_id)
    if last_id is not None:
        message = f"the header {LAST_EVENT_ID} needs stream_options with resumable: true, as its stream began"
        raise ApiError(400, message, LAST_EVENT_ID)
    return None


def _checksum(call: ParsedCall) -> int:
    """Return a checksum of what a client asks for."""
    checksum = crc32(call.body.model_dump_json().encode())
    for prepared in call.requests:
        checksum = crc32(prepared.request.tenant.encode(), crc32(prepared.tokens.tobytes(), checksum))
    return checksum


def _lost() -> ApiError:
    message = "the stream can't be continued: its tokens, computed again, are others. Send the request as a new one"
    return ApiError(410, message, LAST_EVENT_ID, "stream_lost")


class KeptStream:
    """Lines of the events of a request, from the first one on, for the newest of the connections that ask for them.

    Attributes:
      request: as it was asked for, without its prompt. tokens: of that, int32 `[T]`.
      size: bytes of the tokens and lines.
    """

    def __init__(self, owner: "KeptStreams", request: Request, active: ActiveCall) -> None:
        self.request, self.tokens = _without_prompt(request), active.call.requests[0].tokens
        self.size, self._owner = self.tokens.nbytes, owner
        self._active: ActiveCall | None = active  # until it ends
        self._lines: list[bytes] = []
        self._news, self._turn = asyncio.Event(), 0
        self._expiry: asyncio.TimerHandle | None = None  # while no connection is there
        self._is_kept = True
        self.filling = asyncio.create_task(self._fill(active))
        self.filling.add_done_callback(lambda task: self._end())

    def attach(self, shown_id: str) -> int:
        """Return the number of a new connection, which ends that of the last one."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self._active is not None:
            self._active.shown_id = shown_id
        self._turn += 1
        self._wake()
        return self._turn

    def detach(self, turn: int) -> None:
        """Note that a connection has ended: without another one the request goes on for a time."""
        if turn == self._turn:
            seconds = self._owner.seconds if self._is_kept else 0.0
            self._expiry = asyncio.get_running_loop().call_later(seconds, self._owner.drop, self)

    def forget(self) -> None:
        """Keep nothing for later connections; without one the request ends."""
        self._is_kept = False
        if self._expiry is not None:
            self._expiry.cancel()
            self.filling.cancel()

    async def follow(self, turn: int) -> AsyncIterator[bytes]:
        """Yield all lines to a connection, to the last one or until there is a newer connection."""
        yield b"\n"
        at = 0
        while turn == self._turn:
            lines = self._lines[at:]
            at += len(lines)
            if not self._is_kept:
                self._lines.clear()
                at = 0
            if not lines:
                if self.filling.done():
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ALIVE_SECONDS):
                        await self._news.wait()
                        continue
            yield b"".join(lines) or b"\n"
        yield encode_ends(self.request.sampling.n, "moved")

    async def _fill(self, active: ActiveCall) -> None:
        while active.is_open:
            line = b"".join([encode_events(events) for _, events in await active.take()])
            self._lines.append(line)
            if self._is_kept:
                self.size += len(line)
                self._owner.note(len(line))
            self._wake()

    def _end(self) -> None:
        self._active = None
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news.clear()


class KeptStreams:
    """Streams of requests for other servers that are kept, each under its tenant and name. For the event loop.

    Attributes:
      seconds: for which one is kept that no connection reads.
      num_bytes: of all. max_bytes: beyond it the oldest ones are dropped.
    """

    def __init__(self, seconds: float, end_call: Callable[[str], object]) -> None:
        self.seconds, self._end_call, self.num_bytes = seconds, end_call, 0
        self.max_bytes = _MOST_KEPT
        self._streams: dict[tuple[str, str | None], KeptStream] = {}  # the oldest one first

    @property
    def names(self) -> list[str | None]:
        """Names of the streams that are kept."""
        return [name for _, name in self._streams]

    def find(self, request: Request) -> KeptStream | None:
        """Return the stream of a request that is asked for again; None: none is kept, or it is of another request."""
        found = self._streams.get((request.tenant, request.stream_id))
        is_same = found is not None and found.request == _without_prompt(request)
        return found if found is not None and is_same and np.array_equal(found.tokens, request.prompt) else None

    def keep(self, request: Request, call_id: str, active: ActiveCall) -> KeptStream:
        """Keep the stream of a request that begins now, in place of another one of its name."""
        key = request.tenant, request.stream_id
        if key in self._streams:
            self.drop(self._streams[key])
        stream = self._streams[key] = KeptStream(self, request, active)
        stream.filling.add_done_callback(lambda filling: self._note_end(stream, call_id))
        self.note(stream.size)
        return stream

    def drop(self, stream: KeptStream) -> None:
        """Keep a stream no longer; if no connection reads it, its request ends."""
        key = stream.request.tenant, stream.request.stream_id
        if self._streams.get(key) is stream:
            del self._streams[key]
            self.num_bytes -= stream.size
        stream.forget()

    def note(self, num_bytes: int) -> None:
        """Count bytes of a stream; where all have too many, the oldest ones are dropped."""
        self.num_bytes += num_bytes
        while self._streams and self.num_bytes > self.max_bytes:
            self.drop(next(iter(self._streams.values())))

    def _note_end(self, stream: KeptStream, call_id: str) -> None:
        self._end_call(call_id)
        if stream.filling.cancelled() or stream.filling.exception() is not None:  # the other server goes on by itself
            self.drop(stream)


def _without_prompt(request: Request) -> Request:
    return dataclasses.replace(request, prompt="", ttft_deadline=None)
