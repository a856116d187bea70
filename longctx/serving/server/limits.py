"""Limits of requests and tokens of each tenant in any 60 seconds. For the event loop, which makes them exact."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from longctx.serving.server.errors import DROPPED, ApiError

_WINDOW = 60.0  # seconds
_GRAIN = 0.5  # seconds whose uses count as one, of the last of them: a tenant has some 120 of them at most
_HEADERS = "x-ratelimit-{}-{}"
LIMIT_HEADERS = [
    _HEADERS.format(name, kind) for name in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
]
"""Headers of answers to tenants that have limits, as OpenAI has them."""


@dataclass(eq=False)
class _Use:
    first: float
    last: float
    amount: int


class _Window:
    """Uses of one quantity in the last 60 seconds."""

    def __init__(self) -> None:
        self.used = 0
        self._uses: deque[_Use] = deque()

    def seconds_until(self, amount: int, limit: int, now: float) -> float:
        """Return after how many seconds that much more fits: 0 if it does now."""
        while self._uses and self._uses[0].last + _WINDOW <= now:
            self.used -= self._uses.popleft().amount
        too_many, seconds = self.used + amount - limit, 0.0
        for use in self._uses:
            if too_many <= 0:
                break
            too_many -= use.amount
            seconds = use.last + _WINDOW - now
        return seconds

    def add(self, amount: int, now: float) -> _Use:
        if not self._uses or self._uses[-1].first + _GRAIN <= now:
            self._uses.append(_Use(now, now, 0))
        use = self._uses[-1]
        use.last, use.amount = now, use.amount + amount  # so that no 60 seconds have more than the limit
        self.used += amount
        return use

    def give_back(self, use: _Use, amount: int) -> None:
        if use in self._uses:
            use.amount -= amount
            self.used -= amount

    def reset(self, now: float) -> float:
        """Return seconds until nothing counts any more."""
        return max(0.0, self._uses[-1].last + _WINDOW - now) if self._uses else 0.0


class TenantLimit:
    """Limits of one tenant.

    Attributes:
      requests, tokens: in any 60 seconds, at most. None: there is no such limit.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests: int | None = None
        self.tokens: int | None = None
        self._clock, self._windows = clock, {"requests": _Window(), "tokens": _Window()}

    def take_request(self) -> Callable[[], None]:
        """Count a request; raise ApiError if there were too many. What is returned takes it back."""
        use, window = self._take("requests", 1), self._windows["requests"]
        return lambda: None if use is None else window.give_back(use, 1)

    def take_tokens(self, amount: int) -> Callable[[int], None]:
        """Count tokens that a request may use; raise ApiError if there were too many.

        Returns:
          What is called with the tokens that it has used, at its end: the others count no longer.
        """
        use = self._take("tokens", amount)
        window = self._windows["tokens"]
        return lambda used: None if use is None else window.give_back(use, max(0, amount - used))

    @property
    def headers(self) -> dict[str, str]:
        """Headers of an answer, as OpenAI has them: limits, what remains, and in how many seconds all will."""
        found, now = {}, self._clock()
        for kind, window in self._windows.items():
            limit = getattr(self, kind)
            if limit is not None:
                window.seconds_until(0, limit, now)  # forgets what is over
                found[_HEADERS.format("limit", kind)] = str(limit)
                found[_HEADERS.format("remaining", kind)] = str(max(0, limit - window.used))
                found[_HEADERS.format("reset", kind)] = f"{window.reset(now):.3f}s"
        return found

    def _take(self, kind: str, amount: int) -> _Use | None:
        limit = getattr(self, kind)
        if limit is None:
            return None
        now, window = self._clock(), self._windows[kind]
        dropped = {DROPPED: "rate_limit"}
        if amount > limit:
            message = f"the request may use {amount:,} {kind}, and its tenant may use {limit:,} in a minute"
            raise ApiError(429, message, None, "rate_limit_exceeded", None, dropped | {"x-should-retry": "false"})
        seconds = window.seconds_until(amount, limit, now)
        if seconds > 0:
            message = (
                f"the tenant may use {limit:,} {kind} in a minute: {window.used:,} are used, {amount:,} more asked"
            )
            raise ApiError(429, message, None, "rate_limit_exceeded", seconds, dropped)
        return window.add(amount, now)
