"""Virtual time: one heap of events, links that transfers share, and threads that share cores."""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List


class EventLoop:
    """Actions in the order of their times; of equal times, in the order in which they were planned.

    Attributes:
      now: virtual seconds since the beginning.
      num_events: how many actions have run.

    Examples:
      >>> from longctx.simulation import EventLoop
      >>> loop = EventLoop()
      >>> loop.at(2.0, lambda: print("second, at", loop.now))
      >>> loop.at(0.5, lambda: print("first, at", loop.now))
      >>> loop.run(until=10.0)
      first, at 0.5
      second, at 2.0
      >>> loop.now, loop.num_events
      (2.0, 2)
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Run an action at a time, in virtual seconds since the beginning.

        Raises:
          ValueError: the time is before now, or not finite.
        """
        if not self.now <= time < math.inf:
            raise ValueError(f"time must be finite and not before now={self.now}, got {time}")
        heapq.heappush(self._heap, (time, next(self._order), action))

    @property
    def next_time(self) -> float:
        """Time of the next action; infinite if none is planned."""
        return self._heap[0][0] if self._heap else math.inf

    @property
    def is_last_now(self) -> bool:
        """True if nothing else is planned for now."""
        return not self._heap or self._heap[0][0] > self.now

    def run(self, until: float = math.inf, after: Callable[[], object] | None = None) -> None:
        """Run all actions up to a time, this included.

        Time then stands at `until` if there are later actions, and else at the last one. `after` is called after each.
        """
        heap = self._heap
        while heap:
            if heap[0][0] > until:
                self.now = max(self.now, until)
                return
            self.now, _, action = heapq.heappop(heap)
            self.num_events += 1
            action()
            if after is not None:
                after()

    def clear(self) -> None:
        """Forget all actions that have not run."""
        self._heap.clear()


class Link:
    """A link that transfers share evenly while they are in flight.

    Args:
      loop: in whose time it sends.
      bandwidth: bytes per second, of all transfers together.
      latency: seconds from a transfer's last byte to its end.

    Raises:
      ValueError: the bandwidth is not positive, or the latency is negative or not finite.

    Source:
      Mooncake, 5.2: a host that many fetch from at a time sends to each of them more slowly.

    Examples:
      >>> from longctx.simulation import EventLoop, Link
      >>> loop = EventLoop()
      >>> link = Link(loop, bandwidth=50e9)
      >>> for name in ("a", "b"):  # 100 GB each, at the same time
      ...     link.send(100e9, lambda name=name: print(name, "has come, at", loop.now))
      >>> loop.run()
      a has come, at 4.0
      b has come, at 4.0
    """

    def __init__(self, loop: EventLoop, bandwidth: float, latency: float = 0.0) -> None:
        if not bandwidth > 0:
            raise ValueError(f"bandwidth must be positive, got {bandwidth}")
        if not 0 <= latency < math.inf:
            raise ValueError(f"latency must be finite and not negative, got {latency}")
        self._loop, self._bandwidth, self._latency = loop, bandwidth, latency
        # Every transfer gets as many bytes as each other one. So the next to end is the one for which these, counted
        # since the link was made, first reach its own mark.
        self._given, self._noted = 0.0, loop.now
        self._marks: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._version = 0

    def __len__(self) -> int:
        """Transfers in flight."""
        return len(self._marks)

    def send(self, num_bytes: float, action: Callable[[], object]) -> None:
        """Begin a transfer of some bytes; the action runs when it has ended.

        Raises:
          ValueError: `num_bytes` is negative or not finite.
        """
        if not 0 <= num_bytes < math.inf:
            raise ValueError(f"num_bytes must be finite and not negative, got {num_bytes}")
        self._note()
        heapq.heappush(self._marks, (self._given + num_bytes, next(self._order), action))
        self._plan()

    def _note(self) -> None:
        """Count what has been sent until now."""
        if self._marks:
            self._given += (self._loop.now - self._noted) * self._bandwidth / len(self._marks)
        self._noted = self._loop.now

    def _plan(self) -> None:
        """Plan the end of the transfer that ends first; a plan that was made before is void."""
        self._version += 1
        if self._marks:
            version, left = self._version, max(0.0, self._marks[0][0] - self._given)
            seconds = left * len(self._marks) / self._bandwidth
            self._loop.at(self._loop.now + seconds, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._note()
        mark, _, action = heapq.heappop(self._marks)
        self._given = max(self._given, mark)
        self._loop.at(self._loop.now + self._latency, action)
        self._plan()


class Thread:
    """A thread: its work is done in order, one piece at a time, and its core shares time evenly between threads.

    Args:
      cores: that it may run on, as links that send a second of work per second; each piece of work runs on the one
        that has the fewest threads when it begins.

    Attributes:
      seconds: of work that has not ended, by a core of its own.
    """

    def __init__(self, cores: List[Link]) -> None:
        self._cores = cores
        self._queue: deque[tuple[float, Callable[[], object]]] = deque()
        self.seconds = 0.0

    def run(self, seconds: float, action: Callable[[], object] = lambda: None) -> None:
        """Do work of some seconds after all that is queued; the action runs when it has ended."""
        self._queue.append((seconds, action))
        self.seconds += seconds
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        min(self._cores, key=len).send(self._queue[0][0], self._end)

    def _end(self) -> None:
        seconds, action = self._queue.popleft()
        self.seconds = self.seconds - seconds if self._queue else 0.0
        if self._queue:
            self._begin()
        action()
