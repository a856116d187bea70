"""Feed of the page: messages of steps, load and ended requests, which are made once for all viewers.

The observers of steps and of completions that end leave their reports in short bounded lists (`observe_step`,
`observe_end`). While there are viewers, a task of the event loop turns what is new into one JSON message, at most
every `interval` seconds. A viewer that is slower than its queue is long misses the oldest messages. Messages hold no
prompt and no answer: of a request its shortened id and counts.
"""

import asyncio
import contextlib
import json
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from longctx.serving.engine.metrics import Load, StepMetrics
from longctx.serving.engine.thread import EngineThread
from longctx.serving.request.output import Output
from longctx.serving.request.request import Request

INTERVAL = 0.1  # seconds between two messages
PING_INTERVAL = 15.0  # seconds
STEPS_KEPT = 240  # for a new viewer
STEPS_SENT = 40  # in one message, the latest
OUTPUTS_KEPT = 60
BUFFERED = 50  # messages of a viewer
MAX_VIEWERS = 64
MAX_READING = 64  # requests whose progress is sent
ID_LENGTH = 12


class TooManyViewers(RuntimeError):
    """The feed has `MAX_VIEWERS` already."""


def short_id(request_id: str) -> str:
    """Return the beginning of an id: enough to tell requests apart, and too short to reveal it."""
    return request_id[:ID_LENGTH]


class PageFeed(ABC):
    """Messages for all viewers of one page; `observe_end` may be called in any thread, the rest in one event loop."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._lock = threading.Lock()  # held for a few list operations only
        self._outputs: deque[tuple[int, Output, str]] = deque(maxlen=OUTPUTS_KEPT)  # with their tenants
        self._num_outputs = self._sent_output = 0
        self._queues: dict[asyncio.Queue[str], str | None] = {}  # of viewers, who see one tenant, or all
        self._task: asyncio.Task[None] | None = None
        self.num_viewers = 0

    def observe_end(self, output: Output, request: Request) -> None:
        """Observe a completion that has ended."""
        with self._lock:
            self._num_outputs += 1
            self._outputs.append((self._num_outputs, output, request.tenant))

    async def messages(self, tenant: str | None = None) -> AsyncGenerator[str]:
        """Yield one message with the last steps and outputs, then each new one.

        The second may repeat some of the first: steps and outputs have numbers. Where nothing is new for long, an empty
        text comes.

        Args:
          tenant: whose requests the viewer sees, without any figures of others; None: all.
        """
        if self.num_viewers >= MAX_VIEWERS:
            raise TooManyViewers(f"{MAX_VIEWERS} pages watch this server already")
        self.num_viewers += 1
        queue = asyncio.Queue[str](BUFFERED)
        self._queues[queue] = tenant
        try:
            if self._task is None:
                self._message(is_first=False)  # the first message has all that is there
                self._task = asyncio.create_task(self._publish())
            first = self._message(is_first=True)
            assert first is not None
            yield _text(first, tenant)
            while True:
                message = ""
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PING_INTERVAL):
                        message = await queue.get()
                yield message
        finally:
            del self._queues[queue]
            self.num_viewers -= 1
            if self.num_viewers == 0 and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _publish(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            message = self._message(is_first=False)
            if message is not None:
                texts = {tenant: _text(message, tenant) for tenant in set(self._queues.values())}
                for queue, tenant in self._queues.items():
                    if queue.full():
                        queue.get_nowait()
                    queue.put_nowait(texts[tenant])

    @abstractmethod
    def _message(self, is_first: bool) -> dict[str, Any] | None:
        """Return all that is kept, for a new viewer; or what is new since the last such call, None if nothing is.

        Prompts that are read and completions that have ended stand in pairs with their tenants.
        """

    def _ended(self, is_first: bool) -> list[tuple[str, dict[str, Any]]]:
        """Return the completions of a message, with their tenants."""
        with self._lock:
            after = 0 if is_first else self._sent_output
            if not is_first:
                self._sent_output = self._num_outputs
            return [(own, describe_output(number, output)) for number, output, own in self._outputs if number > after]


class EngineFeed(PageFeed):
    """Feed of one engine; `observe_step` may be called in any thread, too."""

    def __init__(self, thread: EngineThread, interval: float = INTERVAL) -> None:
        super().__init__(interval)
        self._thread = thread
        self._steps: deque[tuple[StepMetrics, Load]] = deque(maxlen=STEPS_KEPT)
        self._reading: dict[str, None] = {}  # ids of requests whose prompts are being read, oldest first
        self._sent_step = -1
        self._sent_load: Load | None = None

    def observe_step(self, step: StepMetrics, load: Load) -> None:
        """Observe a step."""
        with self._lock:
            self._steps.append((step, load))

    def _message(self, is_first: bool) -> dict[str, Any] | None:
        load, ended = self._thread.load, self._ended(is_first)
        with self._lock:
            steps = [each for each in self._steps if is_first or each[0].number > self._sent_step]
        if not is_first:
            if not steps and not ended and load is self._sent_load:
                return None
            self._sent_load = load
            if steps:
                self._sent_step = steps[-1][0].number
        num_steps = STEPS_KEPT if is_first else STEPS_SENT
        return {
            "load": _load(load),
            "steps": [_step(*each) for each in steps[-num_steps:]],
            "skipped": max(0, len(steps) - num_steps),
            "reading": self._progress(steps),
            "ended": ended,
        }

    def _progress(self, steps: Iterable[tuple[StepMetrics, Load]]) -> list[tuple[str, tuple[str, int, int]]]:
        """Return tenant and (id, tokens done, tokens) of prompts that are being read."""
        for step, _ in steps:
            for request_id, _, decodes in step.rows:
                if not decodes and len(self._reading) < MAX_READING:
                    self._reading.setdefault(request_id)
        told = []
        for request_id in list(self._reading):
            try:
                active = self._thread.engine.requests[request_id]
                tenant, (done, total) = active.prepared.request.tenant, active.progress
            except KeyError:  # it has ended
                tenant, done, total = "", 0, 0
            if done < total:
                told.append((tenant, (short_id(request_id), done, total)))
            else:
                del self._reading[request_id]
        return told


def _text(message: dict[str, Any], tenant: str | None) -> str:
    """Return a message as JSON, for a viewer who sees one tenant's requests; None: all of them."""
    own: dict[str, Any] = {
        name: [each for owner, each in message[name] if tenant in (None, owner)] for name in ("reading", "ended")
    }
    if tenant is not None:
        hidden = dict.fromkeys(message["load"], 0) | {"time": message["load"]["time"], "held": [0]}
        own |= {name: [] if isinstance(value, list) else {} for name, value in message.items() if name not in own}
        own |= {"load": hidden, "skipped": 0}
    return json.dumps(message | own, separators=(",", ":"))


def _load(load: Load) -> dict[str, Any]:
    return {
        "time": round(load.time, 3),
        "running": load.running,
        "waiting": load.waiting,
        "backlog": round(load.backlog_seconds, 3),
        "pages": load.num_pages,
        "cached": load.stats.pages_cached,
        "held": load.pages_by_rank,
    }


def _step(metrics: StepMetrics, load: Load) -> dict[str, Any]:
    prompts = [(short_id(request_id), rows) for request_id, rows, decodes in metrics.rows if not decodes]
    return {
        "number": metrics.number,
        "time": round(metrics.finished, 3),
        "seconds": round(metrics.seconds, 6),
        "decodes": metrics.decodes,
        "prompts": prompts,
        "running": load.running,
        "waiting": load.waiting,
    }


def describe_output(number: int, output: Output) -> dict[str, Any]:
    """Return a completion that has ended, as JSON."""
    metrics = output.metrics
    return {
        "number": number,
        "id": short_id(output.request_id),
        "ttft": metrics.ttft,
        "tpot": metrics.tpot,
        "prompt_tokens": metrics.prompt_tokens,
        "cached_tokens": metrics.cached_tokens,
        "output_tokens": metrics.output_tokens,
        "finish_reason": output.finish_reason,
    }
