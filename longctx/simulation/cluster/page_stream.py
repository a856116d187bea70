"""Pages of a prompt that leave for where it decodes, while it is computed.

Source: Mooncake, section 3 (step 3) and 4.2: each layer's keys and values leave while the next layer is computed, so
that after a prompt's last chunk only its last layer's are left.
"""

from collections.abc import Callable
from typing import Literal, get_args

from longctx.simulation.event_loop import EventLoop, Link

Overlap = Literal["layer", "chunk", "end"]
"""Moment at which pages leave: layer by layer while a chunk is computed, when it has been, or when the prompt has."""
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)


class PageStream:
    """The pages of one prompt, over the link of the instance that computes it.

    Args:
      link: of the sender, which all that it sends share.
      token_bytes: of keys and values. layers: of the model.
      first, stop: tokens of the prompt that are sent: what lies before or after is not wanted.
      on_end: is called when all pages have come.

    Attributes:
      begun: when the prompt's first chunk was begun; None: it was not.
      num_bytes: that have left.
    """

    def __init__(
        self,
        loop: EventLoop,
        link: Link,
        token_bytes: float,
        layers: int,
        overlap: Overlap,
        first: int,
        stop: int,
        on_end: Callable[[], object],
    ) -> None:
        self._loop, self._link, self._overlap, self._on_end = loop, link, overlap, on_end
        self._token_bytes, self._last_layer = token_bytes, 1 / layers
        self._first, self._stop = first, stop
        self.begun: float | None = None
        self.num_bytes = 0.0
        self._kept = 0.0  # bytes that leave at the end
        self._pending, self._is_computed, self._is_over = 0, False, False

    def begin_chunk(self, start: int, tokens: int) -> None:
        """A chunk is computed from now on; `start` tokens before it are there."""
        if self.begun is None:
            self.begun = self._loop.now
            self._leave(self._bytes(0, start))
        if self._overlap == "layer":
            self._leave(self._bytes(start, tokens) * (1 - self._last_layer))

    def end_chunk(self, start: int, tokens: int) -> None:
        """A chunk has been computed."""
        share = self._last_layer if self._overlap == "layer" else 1.0
        self._leave(self._bytes(start, tokens) * share)

    def finish(self) -> None:
        """The whole prompt has been computed."""
        if self._is_over:
            return
        self._is_computed = True
        if self._kept:
            self._send(self._kept)
            self._kept = 0.0
        if not self._pending:
            self._on_end()

    def cancel(self) -> None:
        """Stop: the pages are not needed any more."""
        self._is_over = True

    def _bytes(self, start: int, tokens: int) -> float:
        """Return the bytes of those tokens that are sent."""
        return max(0, min(start + tokens, self._stop) - max(start, self._first)) * self._token_bytes

    def _leave(self, num_bytes: float) -> None:
        if self._overlap == "end":
            self._kept += num_bytes
        elif num_bytes:
            self._send(num_bytes)

    def _send(self, num_bytes: float) -> None:
        self._pending += 1
        self.num_bytes += num_bytes
        self._link.send(num_bytes, self._end)

    def _end(self) -> None:
        self._pending -= 1
        if self._is_computed and not self._pending and not self._is_over:
            self._on_end()
