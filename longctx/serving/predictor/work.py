"""`Work`: the features of a batch from which its time is predicted."""

from collections.abc import Iterable
from typing import NamedTuple, Self


class Work(NamedTuple):
    """The work of a batch on one rank; made by `of` and `with_chunk`.

    Attributes:
      rows: tokens computed; products with the weights and messages between devices are proportional to them.
      samples: rows of logits.
      decode_keys: keys that chunks of one token attend to, their own included.
      chunks: (tokens before the chunk, tokens of the chunk) of every longer chunk.
      chunk_pairs, chunk_keys: the longer chunks' part of `pairs` and `keys`.
    """

    rows: int = 0
    samples: int = 0
    decode_keys: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    chunk_pairs: int = 0
    chunk_keys: int = 0

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int, bool]]) -> Self:
        """The work of chunks, each given as (tokens before it, its tokens, whether a token is sampled from it)."""
        rows = samples = decode_keys = pairs = keys = 0
        longer = []
        for start, count, does_sample in chunks:
            samples += does_sample
            if count == 1:
                rows += 1
                decode_keys += start + 1
            else:
                rows += count
                pairs += count * start + count * (count + 1) // 2
                keys += start + count
                longer.append((start, count))
        return cls(rows, samples, decode_keys, tuple(longer), pairs, keys)

    def with_chunk(self, start: int, count: int, samples: bool) -> "Work":
        """This work and that of one more chunk: `count` tokens after `start` others."""
        rows, sampled, decode_keys, chunks, pairs, keys = self
        if count == 1:
            return Work(rows + 1, sampled + samples, decode_keys + start + 1, chunks, pairs, keys)
        pairs += count * start + count * (count + 1) // 2
        return Work(
            rows + count, sampled + samples, decode_keys, (*chunks, (start, count)), pairs, keys + start + count
        )

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to; attention's products are proportional to them."""
        return self.decode_keys + self.chunk_pairs

    @property
    def keys(self) -> int:
        """Keys attended to, counted once for each chunk; the bytes that attention reads are proportional to them."""
        return self.decode_keys + self.chunk_keys
