"""`RemotePrefill`: the pages of a prompt that another server is asked to read, while it reads it."""

import threading
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any

from longctx.serving.kv_cache.connector import LeasedSource, PageBlock, PageFetch
from longctx.serving.kv_cache.page_pool import Key


class RemotePrefill:
    """A `LeasedSource`, for one fetch: another one ends at once, with nothing.

    It goes from one server to the next until one has sent a page. Any thread may call it.

    Args:
      cancel: ends the reading, wherever it is. It must not wait.

    Attributes:
      patience: seconds for which the engine waits for the next page, see `PageMover`: the prompt may have to queue.
    """

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()  # of all that follows
        self._source: LeasedSource | None = None
        self._fetch: _Fetch | None = None
        self._is_settled = self._is_over = self._is_complete = False
        self.patience = 30.0

    # What the engine calls.

    def fetch(self, keys: List[Key], wake: Any) -> PageFetch:
        fetch = _Fetch(self, list(keys), wake)
        with self._lock:
            if self._fetch is not None:
                fetch.is_second = True
                return fetch
            self._fetch = fetch
            fetch.inner = None if self._source is None else self._source.fetch(fetch.keys, wake)
        return fetch

    def release(self) -> None:
        """Nobody wants the pages any more, or they are all there."""
        with self._lock:
            self._is_over = self._is_settled = True
            source, self._source = self._source, None
        if not self._is_complete:  # else it is about to end
            self._cancel()
        if source is not None:
            source.release()
        self._wake()

    # What whoever asks the servers calls.

    def begin(self, source: LeasedSource, seconds: float) -> bool:
        """A server is about to be asked, whose pages come from here within so many seconds; False: nobody wants them.

        Whether they come, the source knows.
        """
        self.patience = seconds
        with self._lock:
            if self._is_over:
                return False
            self._source = source
            if self._fetch is not None:
                self._fetch.inner = source.fetch(self._fetch.keys, self._fetch.wake)
        self._wake()
        return True

    def end(self) -> bool:
        """The server has refused, or failed; whether another one may be asked: if this one has sent no page."""
        with self._lock:
            if self._is_settled:
                return False
            source, self._source = self._source, None
            inner = None
            if self._fetch is not None:
                inner, self._fetch.inner = self._fetch.inner, None
        if inner is not None:
            inner.close()
        if source is not None:
            source.release()
        return True

    def settle(self) -> None:
        """No other server will be asked."""
        with self._lock:
            self._is_settled = True
        self._wake()

    def _wake(self) -> None:
        fetch = self._fetch
        if fetch is not None:
            fetch.wake()

    # What the fetch calls.

    def take(self, fetch: "_Fetch", max_bytes: int) -> list[PageBlock]:
        with self._lock:
            if fetch.inner is None:
                return []
            blocks = fetch.inner.take(max_bytes)
            self._is_settled = self._is_settled or bool(blocks)
            is_useless = not blocks and fetch.inner.is_over and not self._is_settled
        if is_useless:  # its pages don't come, whatever it reads
            self._cancel()
        return blocks

    def close(self, fetch: "_Fetch") -> None:
        """The engine wants no more; if that is not all, nobody has to read any further."""
        with self._lock:
            inner = fetch.inner
            self._is_complete = inner is not None and inner.num_pages == len(fetch.keys)
        if not self._is_complete:
            self.release()
        if inner is not None:
            inner.close()

    def is_over(self, fetch: "_Fetch") -> bool:
        with self._lock:
            return (
                fetch.is_second or self._is_over or (self._is_settled and (fetch.inner is None or fetch.inner.is_over))
            )


class _Fetch:
    """A `PageFetch` whose pages come from whoever reads the prompt at the time."""

    def __init__(self, prefill: RemotePrefill, keys: list[Key], wake: Callable[[], Any]) -> None:
        self._prefill, self.keys, self.wake = prefill, keys, wake
        self.inner: PageFetch | None = None
        self.is_second = False

    def take(self, max_bytes: int) -> list[PageBlock]:
        return self._prefill.take(self, max_bytes)

    @property
    def is_over(self) -> bool:
        return self._prefill.is_over(self)

    @property
    def num_pages(self) -> int:
        return 0 if self.inner is None else self.inner.num_pages

    def close(self) -> None:
        if not self.is_second:
            self._prefill.close(self)
