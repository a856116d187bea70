"""Feed of the page: messages of steps, load and ended requests, which are made once for all viewers.

The observers of steps and of completions that end leave their reports in short bounded lists (`observe_step`,
`observe_end`). While there are viewers, a task of the event loop turns what is new into one JSON message, at most
every `interval` seconds. Viewers read from one buffer of messages; one that is slower than the buffer is long misses
some, and costs nothing more. Messages hold no prompt and no answer: of a request its shortened id and counts.
"""

import asyncio
import json
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Protocol, runtime_checkable

from longctx.serving.engine.load import Load, StepReport
from longctx.serving.request.output import Output
from longctx.serving.request.request import Request

INTERVAL = 0.1  # seconds between two messages
STEPS_KEPT = 240  # for a new viewer
STEPS_SENT = 40  # in one message, the latest
OUTPUTS_KEPT = 60
BUFFERED = 50  # messages
MAX_VIEWERS = 64
MAX_READING = 64  # requests whose progress is told
ID_LENGTH = 12


@runtime_checkable
class Watched(Protocol):
    """Part of an `EngineThread` that the feed uses."""

    @property
    def load(self) -> Load: ...

    def progress(self, request_id: str) -> tuple[int, int]: ...


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
        self._outputs: deque[tuple[int, Output]] = deque(maxlen=OUTPUTS_KEPT)
        self._num_outputs = 0
        self._sent_step, self._sent_output = -1, 0
        self._messages: deque[tuple[int, str]] = deque(maxlen=BUFFERED)
        self._num_messages = 0
        self._updated = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.num_viewers = 0

    def observe_end(self, output: Output, request: Request) -> None:
        """Observe a completion that has ended."""
        with self._lock:
            self._num_outputs += 1
            self._outputs.append((self._num_outputs, output))

    async def messages(self) -> AsyncGenerator[str]:
        """Yield one message with the last steps and outputs, then each new one.

        The second may repeat some of the first: steps and outputs have numbers.

        Raises:
          TooManyViewers: there are `MAX_VIEWERS` already.
        """
        if self.num_viewers >= MAX_VIEWERS:
            raise TooManyViewers(f"{MAX_VIEWERS} pages watch this server already")
        self.num_viewers += 1
        try:
            if self._task is None:
                self._skip_to_now()
                self._updated = asyncio.Event()
                self._task = asyncio.create_task(self._publish())
            seen = self._num_messages
            yield self._message(-1, 0, STEPS_KEPT)
            while True:
                updated = self._updated
                for number, message in [message for message in self._messages if message[0] > seen]:
                    # Those that were dropped while the viewer took the last one are not for it any more.
                    if number >= self._messages[0][0]:
                        seen = number
                        yield message
                if seen >= self._num_messages:
                    await updated.wait()
        finally:
            self.num_viewers -= 1
            if self.num_viewers == 0 and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _publish(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            if self._has_updates():
                self._num_messages += 1
                message = self._message(self._sent_step, self._sent_output, STEPS_SENT)
                self._messages.append((self._num_messages, message))
                self._skip_to_now()
                self._updated.set()  # wakes the viewers
                self._updated = asyncio.Event()

    @abstractmethod
    def _has_updates(self) -> bool:
        """Whether something has come since the last message."""

    @abstractmethod
    def _skip_to_now(self) -> None:
        """Note that all reports so far have been sent."""

    @abstractmethod
    def _message(self, after_step: int, after_output: int, num_steps: int) -> str:
        """Return a message with all reports after a step and an output, in their order."""


class EngineFeed(PageFeed):
    """Feed of one engine; `observe_step` may be called in any thread, too."""

    def __init__(self, thread: Watched, interval: float = INTERVAL) -> None:
        super().__init__(interval)
        self._thread = thread
        self._steps: deque[StepReport] = deque(maxlen=STEPS_KEPT)
        self._reading: dict[str, None] = {}  # ids of requests whose prompts are being read, oldest first
        self._sent_load: Load | None = None

    def observe_step(self, report: StepReport) -> None:
        """Observe a step."""
        with self._lock:
            self._steps.append(report)

    def _has_updates(self) -> bool:
        with self._lock:
            is_newer = bool(self._steps) and self._steps[-1].metrics.number > self._sent_step
            return is_newer or self._num_outputs > self._sent_output or self._thread.load is not self._sent_load

    def _skip_to_now(self) -> None:
        with self._lock:
            if self._steps:
                self._sent_step = self._steps[-1].metrics.number
            self._sent_output, self._sent_load = self._num_outputs, self._thread.load

    def _message(self, after_step: int, after_output: int, num_steps: int) -> str:
        with self._lock:
            steps = [report for report in self._steps if report.metrics.number > after_step]
            outputs = [one for one in self._outputs if one[0] > after_output]
        return json.dumps(
            {
                "load": _load(self._thread.load),
                "steps": [_step(report) for report in steps[-num_steps:]],
                "skipped": max(0, len(steps) - num_steps),
                "reading": self._progress(steps),
                "ended": [describe_output(number, output) for number, output in outputs],
            },
            separators=(",", ":"),
        )

    def _progress(self, steps: Iterable[StepReport]) -> list[tuple[str, int, int]]:
        """Return (id, tokens done, tokens) of prompts that are being read."""
        for report in steps:
            for request_id, _, decodes in report.metrics.rows:
                if not decodes and len(self._reading) < MAX_READING:
                    self._reading.setdefault(request_id)
        told = []
        for request_id in list(self._reading):
            try:
                done, total = self._thread.progress(request_id)
            except KeyError:  # it has ended
                done = total = 0
            if done < total:
                told.append((short_id(request_id), done, total))
            else:
                del self._reading[request_id]
        return told


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


def _step(report: StepReport) -> dict[str, Any]:
    metrics = report.metrics
    prompts = [(short_id(request_id), rows) for request_id, rows, decodes in metrics.rows if not decodes]
    return {
        "number": metrics.number,
        "time": round(metrics.finished, 3),
        "seconds": round(metrics.seconds, 6),
        "decodes": metrics.decodes,
        "prompts": prompts,
        "running": report.load.running,
        "waiting": report.load.waiting,
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
