"""Sends a workload to an OpenAI server over HTTP, each request when it is due, and keeps what came of it."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from longctx import extras
from longctx.serving.request.output import Metrics
from longctx.simulation.record import Record, Served
from longctx.simulation.workloads import WorkloadRequest
from longctx.simulation.workloads.request import check_arrivals

if TYPE_CHECKING:
    import httpx

PROMPT_TOKENS = 256
"""Token ids below which prompts are made up: every vocabulary has as many."""

_LEAD = 1.0  # seconds before it is due in which a body is made: one of 100,000 tokens takes milliseconds
_CONNECT, _SILENCE = 30.0, 600.0  # seconds


@dataclass
class HttpRecord(Record):
    """`Record` of requests over HTTP, with times that a client sees.

    Attributes:
      errors: how many requests failed, by kind.
      without_usage: answers without `usage`, whose tokens are counted by chunks.
      without_cached: answers that do not say how many tokens were found in the cache; none are counted there.
      not_sent: requests that follow one that failed.
      first_error: what the server said to the first request that it refused; empty: nothing.
    """

    errors: Counter[str] = field(default_factory=Counter)
    without_usage: int = 0
    without_cached: int = 0
    not_sent: int = 0
    first_error: str = ""


class _Failed(Exception):
    """A request without a whole answer; the text is the kind of its error."""


async def read_events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events, whatever the pieces that they come in.

    Comments, other fields and empty events are left out. An event that has several lines of data is joined.
    """
    buffer, data = bytearray(), list[bytes]()
    async for part in parts:
        buffer += part
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(bytes(line[5:].removeprefix(b" ")))
            elif not line and data:
                yield b"\n".join(data)
                data.clear()
    if buffer.startswith(b"data:"):
        data.append(bytes(buffer[5:].removeprefix(b" ").rstrip(b"\r")))
    if data:
        yield b"\n".join(data)


@dataclass
class _Answer:
    """An answer as far as it has come."""

    metrics: Metrics
    clock: Callable[[], float]
    usage: dict[str, Any] | None = None
    is_whole: bool = False

    def take(self, data: bytes) -> None:
        """Take an event; raise _Failed if it is an error."""
        if data == b"[DONE]":
            self.is_whole = True
            return
        try:
            event = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise _Failed("an event that is no JSON") from None
        if not isinstance(event, dict):
            raise _Failed("an event that is no JSON object")
        if event.get("error"):
            error = event["error"]
            kind = (error.get("code") or error.get("type")) if isinstance(error, dict) else None
            raise _Failed(f"an error in the stream: {str(kind or 'unnamed')[:60]}")
        if isinstance(event.get("usage"), dict):
            self.usage = event["usage"]
        choices = event.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise _Failed("an event whose choices are no objects")
        for choice in choices:
            ids = choice.get("token_ids")
            tokens = (len(ids) if isinstance(ids, list) else 0) or bool(choice.get("text"))
            for _ in range(tokens):
                self.metrics.note_token(self.clock())
            self.is_whole |= choice.get("finish_reason") is not None

    def end(self, record: HttpRecord) -> Metrics:
        """Return the metrics of the whole answer; raise _Failed if it is none."""
        metrics, usage = self.metrics, self.usage or {}
        if not self.is_whole:
            raise _Failed("a stream that ends before the answer")
        if metrics.first_token is None:
            raise _Failed("an answer without tokens")
        metrics.finished = metrics.last_token
        record.without_usage += not usage
        metrics.output_tokens = _count(usage, "completion_tokens") or metrics.output_tokens
        metrics.prompt_tokens = _count(usage, "prompt_tokens") or metrics.prompt_tokens
        cached = _count(usage.get("prompt_tokens_details"), "cached_tokens")
        record.without_cached += cached is None
        metrics.cached_tokens = cached or 0
        return metrics


def _count(values: Any, name: str) -> int | None:
    """Return a number that a server reports; None: it does not."""
    found = values.get(name) if isinstance(values, dict) else None
    return found if isinstance(found, int) and found >= 0 else None


class _Replay:
    """One run of `replay_http`."""

    def __init__(
        self, client: "httpx.AsyncClient", model: str, requests: List[WorkloadRequest], seed: int, record: HttpRecord
    ) -> None:
        self._client, self._model, self._seed, self._record = client, model, seed, record
        self._followers: dict[int, list[WorkloadRequest]] = {}
        for request in requests:
            if request.after is not None:
                self._followers.setdefault(request.after, []).append(request)
        self._roots = [request for request in requests if request.after is None]
        self._start = self._running = 0.0
        self._total = len(requests)

    async def run(self, progress: Callable[[HttpRecord], object]) -> None:
        """Send all requests, and wait for their ends."""
        self._start, self._progress = time.monotonic(), progress
        record = self._record
        try:
            async with asyncio.TaskGroup() as group:
                for request in self._roots:
                    group.create_task(self._serve(group, request, request.arrival))
        finally:
            record.seconds = time.monotonic() - self._start
        record.not_sent = self._total - len(record.served) - record.failed

    async def _serve(self, group: asyncio.TaskGroup, request: WorkloadRequest, due: float) -> None:
        """Send a request when it is due, and let others follow it."""
        await self._sleep_until(due - _LEAD)
        body = await asyncio.to_thread(self._body, request)
        await self._sleep_until(due)
        record = self._record
        metrics = Metrics(self._start + due, request.prompt_tokens)
        self._running += 1
        try:
            metrics = await self._send(body, metrics)
            record.served.append(Served.of(metrics, due, self._start, request.number))
        except _Failed as error:
            record.failed += 1
            record.errors[str(error)] += 1
            return
        finally:
            self._running -= 1
            now = time.monotonic() - self._start
            record.timeline.append((now, int(self._running), 0))
            self._progress(record)
        for follower in self._followers.get(request.number, ()):
            group.create_task(self._serve(group, follower, max(follower.arrival, now + follower.delay)))

    async def _sleep_until(self, due: float) -> None:
        await asyncio.sleep(max(0.0, self._start + due - time.monotonic()))

    def _body(self, request: WorkloadRequest) -> bytes:
        text = isinstance(request.prompt, str)
        prompt: Any = request.prompt if text else request.tokens(PROMPT_TOKENS, self._seed).tolist()
        body = {"model": self._model, "prompt": prompt, "max_tokens": request.output_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        # So that tokens whose text is not certain yet have chunks too, where a server knows the field.
        return msgspec.json.encode(body | {"return_token_ids": True})

    async def _send(self, body: bytes, metrics: Metrics) -> Metrics:
        import httpx

        answer = _Answer(metrics, time.monotonic)
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        try:
            async with self._client.stream("POST", "v1/completions", content=body, headers=headers) as response:
                if response.status_code != 200:
                    said = (await response.aread()).decode("utf-8", "replace")
                    self._record.first_error = self._record.first_error or " ".join(said.split())[:200]
                    raise _Failed(f"status {response.status_code}")
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    raise _Failed("an answer that is no stream of events")
                async for data in read_events(response.aiter_bytes()):
                    answer.take(data)
        except httpx.TimeoutException as error:
            raise _Failed(f"a timeout: {type(error).__name__}") from None
        except httpx.ConnectError:
            raise _Failed("no connection") from None
        except httpx.HTTPError as error:
            if not answer.is_whole:
                raise _Failed(f"a broken connection: {type(error).__name__}") from None
        return answer.end(self._record)


def make_http_client(url: str, api_key: str | None = None) -> "httpx.AsyncClient":
    """Return a client of a server, for `replay_http` and `find_model`.

    Args:
      url: of the server, with or without `/v1`.
      api_key: is sent with each request; None: none.

    Raises:
      MissingExtra: httpx is not installed.
    """
    with extras.needed("serve", "--url"):
        import httpx
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    timeout = httpx.Timeout(_SILENCE, connect=_CONNECT, pool=None)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base = url.rstrip("/").removesuffix("/v1") + "/"
    return httpx.AsyncClient(base_url=base, headers=headers, timeout=timeout, limits=limits, trust_env=False)


async def find_model(client: "httpx.AsyncClient") -> tuple[str, int | None]:
    """Ask a server for its model.

    Returns:
      (name of the first model, tokens of its longest sequence or None where the server does not say).

    Raises:
      ValueError: the server does not answer, or lists no model.
    """
    import httpx

    try:
        answer = await client.get("v1/models")
        answer.raise_for_status()
        first = answer.json()["data"][0]
        longest = first.get("max_model_len")
        return str(first["id"]), longest if isinstance(longest, int) else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, AttributeError) as error:
        shown = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{client.base_url}v1/models does not list a model: {shown}") from None


async def replay_http(
    client: "httpx.AsyncClient",
    model: str,
    requests: List[WorkloadRequest],
    seed: int = 0,
    progress: Callable[[HttpRecord], object] = lambda record: None,
    record: HttpRecord | None = None,
) -> HttpRecord:
    """Send requests to `/v1/completions` of a server as streams; greedy, and every output as long as asked for.

    An open loop sends each request at its `arrival`. Those that follow another one (`WorkloadRequest.after`) come after
    its end, and not at all if it fails: so closed loops and conversations are data like any other. TTFT counts from
    when a request is due.

    Args:
      client: of the server, see `make_http_client`.
      model: name of the model there.
      requests: in order of arrival; those that follow another one stand anywhere after it.
      seed: of the tokens that are made up, below `PROMPT_TOKENS`.
      progress: is called when a request has ended.
      record: is filled, so that an interrupt leaves what came until then. None: a new one.

    Returns:
      What came of it.

    Raises:
      ValueError: requests are in another order, or one follows a request that does not stand before it.
    """
    check_arrivals(requests)
    record = HttpRecord() if record is None else record
    await _Replay(client, model, requests, seed, record).run(progress)
    return record
