"""`AdmissionControl`: refuses requests that would wait too long, before any work is done for them.

It counts a request once, when it comes, until it is admitted: so a burst that arrives within one step is bounded too,
and a storm of retries of what was refused changes nothing.
"""

import threading
import time
from dataclasses import dataclass
from typing import Literal

from longctx.serving.config import AdmissionLimits
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.metrics import StepMetrics
from longctx.serving.engine.outlook import Foresight
from longctx.serving.request.output import Output
from longctx.serving.request.request import PreparedRequest
from longctx.serving.scheduler.look_ahead import Outlook

Reason = Literal["queue", "tokens", "deadline", "draining"]

_COUNT_AGAIN = 0.01  # seconds
_RETRY = 0.5, 120.0  # seconds after which a client may come again: at least, at most


class Refused(RuntimeError):
    """A request was not let in; it may be later.

    Attributes:
      reason: `"queue"` (too many requests wait), `"tokens"` (too many tokens wait), `"deadline"` (its TTFT deadline
        can't be kept, by prediction), `"draining"` (the engine takes no new requests).
      retry_after: seconds after which it might be let in.
      outlook: when its first token would have come, and what it would have waited for; None if that was not predicted.

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import AdmissionControl, AdmissionLimits, Engine, EngineConfig, Refused, Request
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> control = AdmissionControl(engine, AdmissionLimits(max_waiting=1))
      >>> control.admit("a", engine.prepare(Request([1, 2, 3])))
      >>> try:
      ...     control.admit("b", engine.prepare(Request([1, 2, 3])))
      ... except Refused as refused:
      ...     print(refused.reason, refused.retry_after)  # what a server answers as 429 with Retry-After
      queue 11.894137378133333
    """

    def __init__(self, message: str, reason: Reason, retry_after: float, outlook: Outlook | None = None) -> None:
        super().__init__(message)
        self.reason, self.outlook = reason, outlook
        self.retry_after = min(max(retry_after, _RETRY[0]), _RETRY[1])


@dataclass
class _Waiting:
    prepared: PreparedRequest
    sequences: int

    @property
    def tokens(self) -> int:
        return len(self.prepared.tokens)


class AdmissionControl:
    """Admits or refuses requests. Any thread may call any method.

    Args:
      engine: whose requests it admits.
      limits: of what may wait; None: the default ones.

    Source:
      Mooncake, 6: refuse early, before a prompt costs anything; here before one engine, by its own predictions.

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import AdmissionControl, AdmissionLimits, Engine, EngineConfig, Request
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> control = AdmissionControl(engine, AdmissionLimits(max_waiting=1))
      >>> prepared = engine.prepare(Request([1, 2, 3]))
      >>> control.admit("a", prepared)
      >>> control.num_waiting
      1
      >>> control.admit("b", prepared)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
          ...
      longctx.serving.engine.admission_control.Refused: the queue is full, which has room for 1 requests: ...
    """

    def __init__(self, engine: Engine, limits: AdmissionLimits | None = None) -> None:
        self.limits = limits or AdmissionLimits()
        self.foresight = Foresight(engine)
        self._engine, self._counted_again = engine, 0.0
        self._waiting: dict[str, _Waiting] = {}
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Sequences that have been let in and not been admitted to a slot."""
        with self._lock:
            return sum(waiting.sequences for waiting in self._waiting.values())

    def admit(self, request_id: str, prepared: PreparedRequest) -> None:
        """Let a request wait.

        Args:
          request_id: unique among those that wait.
          prepared: what `Engine.prepare` made of it.

        Raises:
          Refused: see there.
        """
        deadline = prepared.request.ttft_deadline
        if deadline is not None and self.limits.heeds_deadlines:
            outlook = self.foresight.of(prepared, self._requests(), deadline)
            if outlook is not None and outlook.is_after(deadline):
                message = f"the first token is due in {deadline:g} s, and would come {outlook}"
                raise Refused(message, "deadline", outlook.looked - deadline, outlook)
        reason, limit = self._try_to_enter(request_id, prepared)
        if reason is not None:
            unit = "requests" if reason == "queue" else "tokens of prompts"
            outlook = self.foresight.of(prepared, self._requests())
            when = "" if outlook is None else f": the first token would come {outlook}"
            message = f"the queue is full, which has room for {limit} {unit}{when}"
            raise Refused(message, reason, 1.0 if outlook is None else outlook.looked / 2, outlook)

    def _try_to_enter(self, request_id: str, prepared: PreparedRequest) -> tuple[Reason | None, int]:
        """Count a request; or the limit that it would exceed."""
        with self._lock:
            exceeded = self._exceeded(prepared)
            if exceeded is not None and self._count_again():
                exceeded = self._exceeded(prepared)
            if exceeded is not None:
                return exceeded
            self._waiting[request_id] = _Waiting(prepared, prepared.request.sampling.n)
        self.foresight.note_entered(prepared)
        return None, 0

    def _exceeded(self, prepared: PreparedRequest) -> tuple[Reason, int] | None:
        limits, waiting = self.limits, self._waiting.values()
        if not waiting:
            return None
        if sum(x.sequences for x in waiting) + prepared.request.sampling.n > limits.max_waiting:
            return "queue", limits.max_waiting
        most = limits.max_waiting_tokens
        if most is not None and sum(x.tokens for x in waiting) + len(prepared.tokens) > most:
            return "tokens", most
        return None

    def _count_again(self) -> bool:
        """Leave out whom the step that runs now has admitted, which `note_step` says when it ends; now and then."""
        now = time.monotonic()
        if now < self._counted_again + _COUNT_AGAIN:
            return False
        self._counted_again = now
        for request_id, waiting in tuple(self._waiting.items()):
            waiting.sequences = int(min(waiting.sequences, self._engine.num_waiting(request_id)))
            if not waiting.sequences:
                del self._waiting[request_id]
        return True

    def _requests(self) -> dict[str, PreparedRequest]:
        """Those that wait to be admitted to a slot."""
        with self._lock:
            return {request_id: waiting.prepared for request_id, waiting in self._waiting.items()}

    def forget(self, request_id: str) -> None:
        """A request waits no more, for whatever reason."""
        with self._lock:
            self._waiting.pop(request_id, None)

    def note_step(self, metrics: StepMetrics) -> None:
        """Some have been admitted to slots."""
        if metrics.admitted:
            with self._lock:
                for request_id in metrics.admitted:
                    waiting = self._waiting.get(request_id)
                    if waiting is not None:
                        waiting.sequences -= 1
                        if not waiting.sequences:
                            del self._waiting[request_id]

    def note_output(self, output: Output, max_tokens: int) -> None:
        """A completion has ended: others may be expected to be as long.

        Args:
          output: of the completion.
          max_tokens: that it might have had.
        """
        if output.finish_reason in ("stop", "length"):
            self.foresight.note_length(len(output.token_ids) / max_tokens)
