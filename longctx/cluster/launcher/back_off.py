"""`BackOff`: how long to wait before what has failed is tried again."""

_LEAST, _MOST = 1.0, 30.0
_ALIVE = 60.0  # seconds after which a failure is a first one again


class BackOff:
    """1 s after a first failure, twice as long after each that follows soon, up to 30 s."""

    def __init__(self) -> None:
        self._next = _LEAST

    def after(self, lived: float) -> float:
        """Seconds to wait, after what has failed lived for so many."""
        if lived >= _ALIVE:
            self._next = _LEAST
        seconds, self._next = self._next, min(2 * self._next, _MOST)
        return seconds
