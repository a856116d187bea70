"""Whose prompt is read next, and how much of it in a step."""

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Protocol

from longctx.serving.sequence import Sequence


class Policy(Protocol):
    """Pure functions of plain data: no clock, no randomness. Decodes are not its affair: they always run."""

    def rank(self, sequences: Iterable[Sequence], now: float) -> List[Sequence]:
        """Sequences to be admitted or read, the most urgent first; they come in order of arrival."""
        ...

    def share(
        self, prefills: List[Sequence], decodes: List[Sequence], room: int, now: float
    ) -> List[tuple[Sequence, int]]:
        """Rows for each prompt that is being read, at most `room` together, in the order of `rank`."""
        ...


@dataclass(frozen=True)
class FirstComeFirstServed:
    """In order of arrival. No prompt takes more than `chunk_size` rows of a step while others could use them."""

    chunk_size: int

    def rank(self, sequences: Iterable[Sequence], now: float) -> List[Sequence]:
        return list(sequences)

    def share(
        self, prefills: List[Sequence], decodes: List[Sequence], room: int, now: float
    ) -> List[tuple[Sequence, int]]:
        shares: list[int] = []
        for sequence in prefills:
            if room == 0:
                break
            shares.append(min(sequence.remaining, self.chunk_size, room))
            room -= shares[-1]
        for i, count in enumerate(shares):  # what nobody else wants goes to the first who can use it
            extra = min(prefills[i].remaining - count, room)
            shares[i] += extra
            room -= extra
        return list(zip(prefills, shares, strict=False))
