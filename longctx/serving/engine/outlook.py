"""When a request's first token would come, and what it would wait for: the scheduler run ahead on the predictor."""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from longctx.serving.engine.engine import Engine
from longctx.serving.request.request import PreparedRequest
from longctx.serving.scheduler.look_ahead import Outlook, copy_scheduler, look_ahead
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.sequence import Sequence

_HORIZON = 240.0  # seconds that are looked ahead for a request without a deadline
_REST = 10  # looking ahead takes at most one part in so many of the time
_BRIEFLY = 0.02  # seconds of looking for a request without one, which a server's event loop may wait for
_FRESH = 0.25  # seconds after which a copy of the scheduler is made anew
_COPY_REST = 50  # or, where a thousand wait, as many times as long as a copy takes
_USABLE = 30.0  # seconds after which a copy is of no use, as where a step or a compilation takes long
_WANTED = 2.0  # seconds for which copies are made after somebody wanted one
_LENGTHS = 256  # completions by whose lengths those of others are estimated


class _Copy(NamedTuple):
    """A copy of the scheduler: as of when by the engine's clock, and until when it is good enough, and usable."""

    scheduler: Scheduler
    at: float
    fresh_until: float
    until: float


class Foresight:
    """Predicts when first tokens would come. Any thread may call any method.

    It runs a copy of the scheduler, which can only be made between steps: so the engine's thread makes them, and only
    while somebody wants them. Looking ahead takes milliseconds; under a storm of questions most are answered by the
    last answer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._copy: _Copy | None = None
        self._wanted_until = self._rests_until = 0.0
        # The last answer, the seconds before its own prompt, and those of the prompts of requests let in since then.
        self._last, self._last_wait, self._since_last = Outlook(0.0, 0.0, "queue"), 0.0, 0.0
        self._lengths: deque[float] = deque(maxlen=_LENGTHS)  # shares of max_tokens
        self._counting, self._looking = threading.Lock(), threading.Lock()

    def of(
        self, prepared: PreparedRequest, waiting: Mapping[str, PreparedRequest], deadline: float | None = None
    ) -> Outlook | None:
        """The outlook of a request that comes now; None: nothing is known.

        Args:
          waiting: by id, those that have been let in and not admitted to a slot; the copy may not have them yet.
          deadline: seconds to look ahead; None: a few minutes.
        """
        alone = self._seconds_alone(prepared)
        if deadline is not None and alone > deadline:
            return Outlook(alone, alone, "prefill")
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
            outlook = self._look(made, prepared, waiting, _HORIZON if deadline is None else deadline, stop)
            with self._counting:
                self._last, self._last_wait, self._since_last = outlook, max(0.0, outlook.looked - alone), 0.0
            now = time.monotonic()
            self._rests_until = now + (_REST - 1) * (now - begun)
            return outlook
        finally:
            self._looking.release()

    def _by_last_answer(self, alone: float) -> Outlook:
        """What the last answer says of a prompt that takes so many seconds alone."""
        with self._counting:
            last, wait = self._last, self._last_wait + self._since_last
        looked = wait + alone
        return Outlook(None if last.first_token is None else looked, looked, "prefill" if alone > wait else last.bound)

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
        """A request has been let in, and is before those that come later."""
        alone = self._seconds_alone(prepared)
        with self._counting:
            self._since_last += alone

    def note_length(self, share: float) -> None:
        """A completion has ended that had such a share of its max_tokens."""
        self._lengths.append(share)

    def _look(
        self,
        made: _Copy,
        prepared: PreparedRequest,
        waiting: Mapping[str, PreparedRequest],
        horizon: float,
        stop: float,
    ) -> Outlook:
        lengths = tuple(self._lengths)
        share = sum(lengths) / len(lengths) if lengths else 1.0
        now, scheduler = self._engine.now(), copy_scheduler(made.scheduler)
        there = {
            sequence.name.rpartition("/")[0] for queue in (scheduler.waiting, scheduler.running) for sequence in queue
        }
        others = [other for request_id, other in waiting.items() if request_id not in there]
        newcomers = [
            _as_sequence(other, now, 2**62 + number)
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
        """Seconds of a prompt if nobody else were there."""
        scheduler, length = self._engine.scheduler, len(prepared.tokens)
        cached = scheduler.count_cached(prepared.shared_keys)
        return scheduler.forecast.prefill_seconds(min(cached, length - 1), length, prepared.request.tpot_target)


def _as_sequence(prepared: PreparedRequest, now: float, order: int) -> Sequence:
    request = prepared.request
    return Sequence(
        request.request_id or "new",
        order,
        prompt_length=len(prepared.tokens),
        max_tokens=request.sampling.max_tokens,
        arrival=now,
        priority=request.priority,
        tenant=request.tenant,
        ttft_deadline=request.ttft_deadline,
        tpot_target=request.tpot_target,
        keys=list(prepared.keys),
        may_share=prepared.may_share,
    )
