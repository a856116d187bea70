"""What a batch asks of a device: `Work`."""

from collections.abc import Iterable
from typing import NamedTuple, Self


class Work(NamedTuple):
    """What seconds are predicted from; made by `of` and `with_chunk`.

    Attributes:
      rows: tokens computed: products with the weights, and messages between devices.
      samples: rows of logits.
      decode_keys: tokens that chunks of one token see, themselves included: bytes of keys and values read.
      chunks: (tokens before it, tokens) of every longer chunk.
      chunk_pairs, chunk_keys: the longer chunks' part of `pairs` and `keys`.
    """

    rows: int = 0
    samples: int = 0
    decode_keys: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    chunk_pairs: int = 0
    chunk_keys: int = 0

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int, bool]]) -> Self:
        """The work of a step's chunks: (tokens before it, tokens, whether a token is sampled) of each."""
        rows = samples = decode_keys = pairs = keys = 0
        longer = []
        for start, count, does_sample in parts:
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
        """This work and that of `count` tokens of one sequence more, after `start` others."""
        rows, sampled, decode_keys, chunks, pairs, keys = self
        if count == 1:
            return Work(rows + 1, sampled + samples, decode_keys + start + 1, chunks, pairs, keys)
        pairs += count * start + count * (count + 1) // 2
        return Work(
            rows + count, sampled + samples, decode_keys, (*chunks, (start, count)), pairs, keys + start + count
        )

    @property
    def pairs(self) -> int:
        """Pairs of a token and one that it sees: the products of attention."""
        return self.decode_keys + self.chunk_pairs

    @property
    def keys(self) -> int:
        """Tokens that are seen, once for each chunk: the bytes of attention."""
        return self.decode_keys + self.chunk_keys
