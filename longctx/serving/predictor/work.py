"""What a batch asks of a device: `Work`."""

from collections.abc import Iterable
from typing import NamedTuple, Self


class Work(NamedTuple):
    """What seconds are predicted from.

    Attributes:
      rows: tokens computed: products with the weights, and messages between devices.
      samples: rows of logits.
      decode_keys: tokens that chunks of one token see, themselves included: bytes of keys and values read.
      chunks: (tokens before it, tokens) of every longer chunk.
    """

    rows: int = 0
    samples: int = 0
    decode_keys: int = 0
    chunks: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int, bool]]) -> Self:
        """Of a step's chunks, each so many tokens after others, and whether a token is sampled."""
        rows = samples = decode_keys = 0
        longer = []
        for start, count, does_sample in parts:
            rows += count
            samples += does_sample
            if count == 1:
                decode_keys += start + 1
            else:
                longer.append((start, count))
        return cls(rows, samples, decode_keys, tuple(longer))

    def with_chunk(self, start: int, count: int, samples: bool) -> "Work":
        """And so many tokens of one sequence, after `start` others."""
        if count == 1:
            return Work(self.rows + 1, self.samples + samples, self.decode_keys + start + 1, self.chunks)
        return Work(self.rows + count, self.samples + samples, self.decode_keys, (*self.chunks, (start, count)))

    @property
    def pairs(self) -> int:
        """Of a token and one that it sees: the products of attention."""
        return self.decode_keys + sum(count * start + count * (count + 1) // 2 for start, count in self.chunks)

    @property
    def keys(self) -> int:
        """Tokens that are seen, once for each chunk: the bytes of attention."""
        return self.decode_keys + sum(start + count for start, count in self.chunks)
