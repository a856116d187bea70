"""`AdmissionControl`: refusal of requests that would wait too long, and `TtftEstimator`, which predicts the wait.

A request counts from when it is admitted until it gets a slot: so a burst that arrives within one step is bounded too,
and a storm of retries of refused requests changes nothing.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from typing import Literal, NamedTuple

from longctx.serving.config import AdmissionLimits
from longctx.serving.engine.active_request import ActiveRequest
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.input_processor import as_sequence
from longctx.serving.request.output import Output
from longctx.serving.request.request import PreparedRequest
from longctx.serving.scheduler.look_ahead import TtftEstimate, copy_scheduler, look_ahead
from longctx.serving.scheduler.scheduler import Scheduler

Reason = Literal["queue", "tokens", "deadline", "draining"]

_RETRY = 0.5, 120.0  # seconds after which a client may come again: at least, at most
_HORIZON = 240.0  # seconds that are looked ahead for a request without a deadline
_REST = 10  # looking ahead takes at most a tenth of the time
_BRIEFLY = 0.02  # seconds of looking for a request without one, which a server's event loop may wait for
_FRESH = 0.25  # seconds after which a copy of the scheduler is made anew
_COPY_REST = 50  # or, where a thousand wait, as many times as long as a copy takes
_USABLE = 30.0  # seconds after which a copy is of no use, as where a step or a compilation takes long
_WANTED = 2.0  # seconds for which copies are made after one was wanted
_LENGTHS = 256  # completions by whose lengths those of others are estimated


class Refused(RuntimeError):
    """Error of a request that was not admitted; it may be later.

    Attributes:
      reason: `"queue"` (too many requests wait), `"tokens"` (too many tokens wait), `"deadline"` (its TTFT deadline
        can't be kept, by prediction), `"draining"` (the engine takes no new requests).
      retry_after: seconds after which it might be let in.
      estimate: when its first token would have come, and what it would have waited for; None if that was not predicted.

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import AdmissionControl, AdmissionLimits, Engine, EngineConfig, EngineThread
      >>> from longctx.serving import Refused, Request
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> thread = EngineThread(engine, AdmissionControl(engine, AdmissionLimits(max_waiting=1)))  # not started
      >>> _ = thread.submit(engine.prepare(Request([1, 2, 3])), print)
      >>> try:
      ...     _ = thread.submit(engine.prepare(Request([1, 2, 3])), print)
      ... except Refused as refused:
      ...     print(refused.reason, refused.retry_after)  # what a server answers as 429 with Retry-After
      queue 11.894137378133333
    """

    def __init__(self, message: str, reason: Reason, retry_after: float, estimate: TtftEstimate | None = None) -> None:
        super().__init__(message)
        self.reason, self.estimate = reason, estimate
        self.retry_after = min(max(retry_after, _RETRY[0]), _RETRY[1])


class AdmissionControl:
    """Admission of requests to an engine's queue. Any thread may call any method.

    Args:
      engine: whose requests it admits.
      limits: of what may wait; None: the default ones.

    Source:
      Mooncake, 6: refuse early, before a prompt costs anything; here before one engine, by its own predictions.

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import AdmissionControl, AdmissionLimits, Engine, EngineConfig, EngineThread, Request
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> control = AdmissionControl(engine, AdmissionLimits(max_waiting=1))
      >>> thread, prepared = EngineThread(engine, control), engine.prepare(Request([1, 2, 3]))  # not started
      >>> _ = thread.submit(prepared, print)
      >>> control.num_waiting
      1
      >>> thread.submit(prepared, print)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
          ...
      longctx.serving.engine.admission_control.Refused: the queue is full, which has room for 1 requests: ...
    """

    def __init__(self, engine: Engine, limits: AdmissionLimits | None = None) -> None:
        self.limits = limits or AdmissionLimits()
        self.estimator = TtftEstimator(engine)
        self._engine, self._lock = engine, threading.RLock()
        self._with_logprobs: list[ActiveRequest] = []  # which may have ended
        self._admitted: list[ActiveRequest] = []  # of which a sequence had no slot when they were looked at last

    @property
    def num_waiting(self) -> int:
        """Sequences of admitted requests that have not got a slot yet."""
        return sum(request.num_waiting for request in self._waiting())

    def admit(self, request: ActiveRequest) -> None:
        """Let a request wait for a slot, which the engine's registry has already.

        Raises:
          ValueError: it asks for more log probabilities than there may ever be.
          Refused: it would wait too long.
        """
        check_logprobs([request.prepared], self.limits.max_logprob_bytes)
        prepared, deadline = request.prepared, request.prepared.request.ttft_deadline
        if deadline is not None and self.limits.heeds_deadlines:
            estimate = self.estimator.of(prepared, self._prompts(), deadline)
            if estimate is not None and estimate.is_after(deadline):
                message = f"the first token is due in {deadline:g} s, and would come {estimate}"
                raise Refused(message, "deadline", estimate.looked - deadline, estimate)
        with self._lock:
            exceeded = self._exceeded(request)
            if exceeded is None:
                self._admitted.append(request)
        if exceeded is None:
            self.estimator.note_entered(prepared)
            return
        reason, problem = exceeded
        estimate = self.estimator.of(prepared, self._prompts())
        when = "" if estimate is None else f": the first token would come {estimate}"
        raise Refused(f"{problem}{when}", reason, 1.0 if estimate is None else estimate.looked / 2, estimate)

    def _exceeded(self, request: ActiveRequest) -> tuple[Reason, str] | None:
        """Return why one more request is too much, and which limit it exceeds."""
        limits, waiting = self.limits, self._waiting()
        if _is_full(waiting, request, limits.max_waiting, lambda each: each.num_waiting):
            return "queue", f"the queue is full, which has room for {limits.max_waiting} requests"
        most = limits.max_waiting_tokens
        if most is not None and _is_full(waiting, request, most, lambda each: len(each.prepared.tokens)):
            return "tokens", f"the queue is full, which has room for {most} tokens of prompts"
        most, needed = limits.max_logprob_bytes, request.prepared.logprob_bytes
        if needed:
            self._with_logprobs = [each for each in self._with_logprobs if self._is_active(each)]
            if _is_full(self._with_logprobs, request, most, lambda each: each.prepared.logprob_bytes):
                return "tokens", f"the log probabilities of requests may take {most} bytes, and need more"
            self._with_logprobs.append(request)
        return None

    def _waiting(self) -> list[ActiveRequest]:
        """Admitted requests of which a sequence has no slot yet."""
        with self._lock:
            self._admitted = [each for each in self._admitted if self._is_active(each) and each.num_waiting]
            return self._admitted

    def _is_active(self, request: ActiveRequest) -> bool:
        return self._engine.requests.get(request.request_id) is request

    def _prompts(self) -> dict[str, PreparedRequest]:
        return {request.request_id: request.prepared for request in self._waiting()}

    def note_output(self, output: Output, max_tokens: int) -> None:
        """Note the length of a completion that has ended, which others are expected to have.

        Args:
          output: of the completion.
          max_tokens: that it might have had.
        """
        if output.finish_reason in ("stop", "length"):
            self.estimator.lengths.append(len(output.token_ids) / max_tokens)


class _Copy(NamedTuple):
    """A copy of the scheduler: as of when by the engine's clock, and until when it is good enough, and usable."""

    scheduler: Scheduler
    at: float
    fresh_until: float
    until: float


def _is_full(
    others: List[ActiveRequest], request: ActiveRequest, limit: int, size: Callable[[ActiveRequest], int]
) -> bool:
    """Return whether a request is one too many.

    When the limit is reached, a tenant that has less than its share, the limit by the number of tenants, still gets it.
    One that has nothing may have one request, however large.
    """
    more = size(request)
    if not others or sum(map(size, others)) + more <= limit:
        return False
    own = [each for each in others if each.tenant == request.tenant]
    return bool(own) and sum(map(size, own)) + more > limit // len({each.tenant for each in others})


def check_logprobs(requests: List[PreparedRequest], limit: int, copies: int = 1) -> None:
    """Raise ValueError if the answers to a call's requests have more log probabilities than `limit` bytes hold."""
    needed = copies * sum(prepared.logprob_bytes for prepared in requests)
    if needed > limit:
        num_tokens = sum(len(prepared.tokens) for prepared in requests)
        raise ValueError(
            f"logprobs must be of fewer tokens, or fewer of each: with prompts of {num_tokens:,} tokens they take some "
            f"{needed:,} bytes, more than the {limit:,} of max_logprob_bytes"
        )


class TtftEstimator:
    """Predictor of when first tokens would come. Any thread may call any method.

    It runs a copy of the scheduler, which can only be made between steps: so the engine's thread makes them, and only
    while they are wanted. Looking ahead takes milliseconds; under a storm of questions most are answered by the
    last answer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._copy: _Copy | None = None
        self._wanted_until = self._rests_until = 0.0
        # The last answer, the seconds before its own prompt, and those of the prompts of requests let in since then.
        self._last, self._last_wait, self._since_last = TtftEstimate(0.0, 0.0, "queue"), 0.0, 0.0
        self.lengths: deque[float] = deque(maxlen=_LENGTHS)  # of completions that have ended, as shares of max_tokens
        self._counting, self._looking = threading.Lock(), threading.Lock()

    def of(
        self, prepared: PreparedRequest, waiting: Mapping[str, PreparedRequest], deadline: float | None = None
    ) -> TtftEstimate | None:
        """Estimate when the first token of a request that comes now would come; None: nothing is known.

        Args:
          waiting: by id, those that have been let in and not admitted to a slot; the copy may not have them yet.
          deadline: seconds to look ahead; None: a few minutes.
        """
        alone = self._seconds_alone(prepared)
        if deadline is not None and alone > deadline:
            return TtftEstimate(alone, alone, "prefill")
        self._wanted_until = time.monotonic() + _WANTED
        self.refresh()
        begun = time.monotonic()
        if begun < self._rests_until or not self._looking.acquire(blocking=False):
            return self._by_last_answer(alone)
        try:
            made = self._copy
            if made is None or begun > made.until:
                return None
            stop = begun + (_BRIEFLY if deadline is None else math.inf)
            estimate = self._look(made, prepared, waiting, _HORIZON if deadline is None else deadline, stop)
            with self._counting:
                self._last, self._last_wait, self._since_last = estimate, max(0.0, estimate.looked - alone), 0.0
            now = time.monotonic()
            self._rests_until = now + (_REST - 1) * (now - begun)
            return estimate
        finally:
            self._looking.release()

    def _by_last_answer(self, alone: float) -> TtftEstimate:
        """Estimate from the last answer for a prompt that takes `alone` seconds by itself."""
        with self._counting:
            last, wait = self._last, self._last_wait + self._since_last
        looked = wait + alone
        return TtftEstimate(
            None if last.first_token is None else looked, looked, "prefill" if alone > wait else last.bound
        )

    def refresh(self) -> None:
        """Copy the scheduler if that is wanted and can be done now: if no step is running, or by who runs them."""
        now, made = time.monotonic(), self._copy
        if now > self._wanted_until:
            self._copy = None
        elif made is None or now > made.fresh_until:
            at = self._engine.now()
            scheduler = self._engine.copy_scheduler()
            if scheduler is not None:
                fresh = max(_FRESH, _COPY_REST * (time.monotonic() - now))
                self._copy = _Copy(scheduler, at, now + fresh, now + _USABLE)

    def note_entered(self, prepared: PreparedRequest) -> None:
        """Count a request that has been admitted before those that come later."""
        alone = self._seconds_alone(prepared)
        with self._counting:
            self._since_last += alone

    def _look(
        self,
        made: _Copy,
        prepared: PreparedRequest,
        waiting: Mapping[str, PreparedRequest],
        horizon: float,
        stop: float,
    ) -> TtftEstimate:
        lengths = tuple(self.lengths)
        share = sum(lengths) / len(lengths) if lengths else 1.0
        now, scheduler = self._engine.now(), copy_scheduler(made.scheduler)
        there = {
            sequence.name.rpartition("/")[0] for queue in (scheduler.waiting, scheduler.running) for sequence in queue
        }
        others = [other for request_id, other in waiting.items() if request_id not in there]
        newcomers = [
            as_sequence(other, other.request.request_id or "new", 2**62 + number, now)
            for number, other in enumerate([*others, prepared])
            for _ in range(1 if other is prepared else other.request.sampling.n)
        ]
        return look_ahead(
            scheduler,
            newcomers,
            made.at,
            now,
            horizon,
            lambda other: other.prompt_length + max(1, round(share * other.max_tokens)),
            lambda: time.monotonic() > stop,
        )

    def _seconds_alone(self, prepared: PreparedRequest) -> float:
        """Seconds of a prompt if it were the only one."""
        scheduler, length = self._engine.scheduler, len(prepared.tokens)
        cached = scheduler.count_cached(prepared.shared_keys)
        return scheduler.forecast.time.prefill_seconds(min(cached, length - 1), length, prepared.request.tpot_target)
