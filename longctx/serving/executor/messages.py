"""How many cached pages a rank sends at a time: a few numbers, as each is static in a compiled step."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

_LEAST_PAGES, _FACTOR = 64, 4


class Message(NamedTuple):
    """Pages that a rank sends at a time, and how many times at most. With 0 pages, only new keys travel."""

    pages: int
    rounds: int

    def rounds_for(self, pages: int) -> int:
        """How many times it takes to send so many pages."""
        return -(-pages // self.pages) if self.pages else 1


NOTHING_CACHED = Message(0, 1)


class Messages:
    """Lengths of messages, which grow by a factor of 4 from 64 pages to those of the longest sequence.

    Each is sent up to 4 times, so that little of what is sent is padding, and the longest one any number of times: it
    has a limit in bytes, and sequences that are packed may have more pages than the longest.

    Args:
      num_pages: of each rank. entries: pages of the longest sequence.
      page_bytes: of a page's keys and values in one layer of a device.
      most_bytes: of a message.
    """

    def __init__(self, num_pages: int, entries: int, page_bytes: float, most_bytes: float) -> None:
        most = max(1, min(num_pages, int(most_bytes / page_bytes)))
        lengths = [min(_LEAST_PAGES, most)]
        while _FACTOR * lengths[-1] <= min(entries, most):
            lengths.append(_FACTOR * lengths[-1])
        rounds = [-(-longer // length) for length, longer in itertools.pairwise([*lengths, num_pages])]
        self._messages = list(map(Message, lengths, rounds))

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    @property
    def shortest(self) -> Message:
        return self._messages[0]

    def of(self, pages: int) -> Message:
        """For so many pages on the rank that has most: the longest message that they fill."""
        return max((x for x in self._messages if x.pages <= pages), default=self.shortest)
