"""When a request's first token would come, and what it would wait for: the scheduler run ahead on the predictor."""

import threading
import time
from collections import deque

from longctx.serving.engine.engine import Engine
from longctx.serving.request.request import PreparedRequest
from longctx.serving.scheduler.look_ahead import Outlook, copy_scheduler, look_ahead
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.sequence import Sequence

_HORIZON = 240.0  # seconds that are looked ahead for a request without a deadline
_REST = 10  # looking ahead takes at most one part in so many of the time
_FRESH = 0.25  # seconds after which a copy of the scheduler is made anew
_WANTED = 2.0  # seconds for which copies are made after somebody wanted one
_LENGTHS = 256  # completions by whose lengths those of others are estimated


class Foresight:
    """Predicts when first tokens would come. Any thread may call any method.

    It runs a copy of the scheduler, which can only be made between steps: so the engine's thread makes them, and only
    while somebody wants them. Looking ahead takes milliseconds; under a storm of questions most are answered by the
    last answer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._copy: tuple[Scheduler, float] | None = None  # and when it was made
        self._wanted_until = 0.0
        self._rests_until = 0.0
        self._last: tuple[Outlook, float] = Outlook(0.0, 0.0, "queue"), 0.0  # and the seconds before its own prompt
        self._lengths: deque[float] = deque(maxlen=_LENGTHS)  # shares of max_tokens
        self._lock = threading.Lock()

    def of(self, prepared: PreparedRequest, deadline: float | None = None) -> Outlook | None:
        """The outlook of a request that comes now, as far as `deadline` or a few minutes; None: nothing is known."""
        alone = self._seconds_alone(prepared)
        if deadline is not None and alone > deadline:
            return Outlook(alone, alone, "prefill")
        self._wanted_until = time.monotonic() + _WANTED
        self.refresh()
        with self._lock:
            if self._copy is None:
                return None
            if time.monotonic() < self._rests_until:
                last, wait = self._last
                looked = wait + alone
                is_known = last.first_token is not None
                return Outlook(looked if is_known else None, looked, "prefill" if alone > wait else last.bound)
            begun = time.monotonic()
            outlook = self._look(self._copy[0], prepared, _HORIZON if deadline is None else deadline)
            self._last = outlook, max(0.0, outlook.looked - alone)
            now = time.monotonic()
            self._rests_until = now + (_REST - 1) * (now - begun)
            return outlook

    def refresh(self) -> None:
        """Copy the scheduler if that is wanted and can be done now: if no step is running, or by who runs them."""
        now = time.monotonic()
        if now > self._wanted_until:
            self._copy = None
        elif self._copy is None or now > self._copy[1] + _FRESH:
            made = self._engine.copy_scheduler()
            if made is not None:
                self._copy = made, now

    def note_length(self, share: float) -> None:
        """A completion has ended that had such a share of its max_tokens."""
        self._lengths.append(share)

    def _look(self, scheduler: Scheduler, prepared: PreparedRequest, horizon: float) -> Outlook:
        request, lengths = prepared.request, tuple(self._lengths)
        share = sum(lengths) / len(lengths) if lengths else 1.0
        now = self._engine.now()
        sequence = Sequence(
            "the one that is asked about",
            order=2**62,
            prompt_length=len(prepared.tokens),
            max_tokens=request.sampling.max_tokens,
            arrival=now,
            priority=request.priority,
            tenant=request.tenant,
            ttft_deadline=request.ttft_deadline,
            tpot_target=request.tpot_target,
            keys=list(prepared.keys),
            may_share=request.sampling.prompt_logprobs is None,
        )
        return look_ahead(
            copy_scheduler(scheduler),
            sequence,
            now,
            horizon,
            lambda other: other.prompt_length + max(1, round(share * other.max_tokens)),
        )

    def _seconds_alone(self, prepared: PreparedRequest) -> float:
        """Seconds of a prompt if nobody else were there."""
        scheduler, length = self._engine.scheduler, len(prepared.tokens)
        cached = scheduler.count_cached(prepared.keys) if prepared.request.sampling.prompt_logprobs is None else 0
        return scheduler.forecast.prefill_seconds(min(cached, length - 1), length)
