"""Switch between TUN devices that delays, loses, reorders, limits and blocks packets: a program of its own.

Its arguments are file descriptors of the devices, whose addresses end in 1, 2 and so on. It obeys a line of JSON on
standard input at a time (`Rules`), which it answers by a line with the counts of packets so far, and ends with its
input.
"""

import heapq
import json
import os
import random
import select
import sys
import time
from dataclasses import asdict, dataclass, field

_MOST_PACKET = 65_536  # bytes
_MOST_QUEUED = 1.0  # seconds for which a packet waits for a slow line, before it is lost
_BURST = 64  # packets read from a device before another one's turn
_LATE = 0.01  # seconds by which a packet that is overtaken is later, beyond the delay


@dataclass
class Rules:
    """Faults of the network.

    Attributes:
      delay: seconds that each packet takes.
      loss: share of packets that are lost.
      reorder: share of packets that take twice the delay and 10 ms more, so that later ones overtake them.
      rate: bits per second of the line to each host; 0: no limit.
      blocked: pairs (from, to) of hosts, numbered from 0, between which no packet passes in this direction.
    """

    delay: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    rate: float = 0.0
    blocked: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Counts:
    """Packets that were passed on, lost by chance, blocked, and dropped as a line's queue was full."""

    passed: int = 0
    lost: int = 0
    blocked: int = 0
    dropped: int = 0


class Switch:
    """Switch over TUN devices that are open and do not block."""

    def __init__(self, devices: list[int]) -> None:
        self.counts = Counts()
        self._devices, self._random = devices, random.Random(7)
        self._queue: list[tuple[float, int, int, bytes]] = []  # due, count, to whom, what
        self._num_queued = 0
        self._free_at = [0.0] * len(devices)
        self.set(Rules())

    def set(self, rules: Rules) -> None:
        """Obey other rules from now on."""
        self._rules, self._blocked = rules, {(source, target) for source, target in rules.blocked}

    def run(self) -> None:
        """Switch until standard input ends."""
        poll = select.poll()
        numbers = {device: number for number, device in enumerate(self._devices)}
        for each in (sys.stdin.fileno(), *self._devices):
            poll.register(each, select.POLLIN)
        while True:
            wait = max(self._queue[0][0] - time.monotonic(), 0.0) * 1000 if self._queue else None
            for ready, _ in poll.poll(wait):
                if ready in numbers:
                    self._receive(numbers[ready])
                elif line := sys.stdin.readline():
                    self.set(Rules(**json.loads(line)))
                    print(json.dumps(asdict(self.counts)), flush=True)
                else:
                    return
            self._send()

    def _receive(self, source: int) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(self._devices[source], _MOST_PACKET)
            except BlockingIOError:
                return
            target = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of the destination in IPv4
            if 0 <= target < len(self._devices):
                self._pass_on(source, target, packet)

    def _pass_on(self, source: int, target: int, packet: bytes) -> None:
        rules, now = self._rules, time.monotonic()
        if (source, target) in self._blocked:
            self.counts.blocked += 1
            return
        if self._random.random() < rules.loss:
            self.counts.lost += 1
            return
        due = now + rules.delay
        if rules.rate:
            begin = max(self._free_at[target], now)
            if begin - now > _MOST_QUEUED:
                self.counts.dropped += 1
                return
            self._free_at[target] = begin + 8 * len(packet) / rules.rate
            due = self._free_at[target] + rules.delay
        if self._random.random() < rules.reorder:
            due += rules.delay + _LATE
        self._num_queued += 1
        heapq.heappush(self._queue, (due, self._num_queued, target, packet))

    def _send(self) -> None:
        now = time.monotonic()
        while self._queue and self._queue[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._queue)
            os.write(self._devices[target], packet)
            self.counts.passed += 1


if __name__ == "__main__":
    Switch([int(each) for each in sys.argv[1:]]).run()
