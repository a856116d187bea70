"""`Work`: the features of a batch from which its time is predicted."""

from collections.abc import Iterable
from typing import NamedTuple


class Work(NamedTuple):
    """The work of a batch on one context rank; made by `of`, `with_chunk` and `with_sharded`.

    Attributes:
      rows: tokens computed; products with the weights and messages between devices are proportional to them.
      samples: rows of logits.
      decode_keys: keys on this rank that chunks of one token attend to, their own included.
      chunks: (tokens before the chunk, tokens of the chunk) of every longer chunk, as attention on this rank has them.
      chunk_pairs, chunk_keys: the longer chunks' part of `pairs` and `keys`.
      replicated: of `rows`, those that other ranks compute too, and whose states are merged over ranks.
      sharded: of `rows`, this rank's share of sharded chunks.
      exchange: of the sharded rows: `"pass_kv"`, `"pass_q"` or `"all_gather"`; `""`: not known, or there are none.
      ring_cached: cached keys of the sharded chunks on the rank that has most of them, the fullest: what each message
        of a ring has room for, beside the new keys of one rank, `sharded`.
      elsewhere: `pairs` of the other ranks. Where devices share processors, as those of a CPU do, they wait for them.

    Source:
      Mnemosyne, 4.1 and 4.2, and Context Parallelism for Scalable Million-Token Inference, 3.4.

    Examples:
      >>> from longctx.serving.predictor import Work
      >>> work = Work.of([(100_000, 1, True), (4096, 512, False)])  # a decode, and a chunk of a prompt
      >>> work.rows, work.samples, work.decode_keys
      (513, 1, 100001)
      >>> work.pairs == (100_000 + 1) + sum(4096 + 1 + token for token in range(512))
      True
    """

    rows: int = 0
    samples: int = 0
    decode_keys: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    chunk_pairs: int = 0
    chunk_keys: int = 0
    replicated: int = 0
    sharded: int = 0
    exchange: str = ""
    ring_cached: int = 0
    elsewhere: int = 0

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int, bool]]) -> "Work":
        """The work of local chunks, each given as (tokens before it, its tokens, whether a token is sampled)."""
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

    def with_chunk(self, start: int, count: int, samples: bool, replicated: bool = False) -> "Work":
        """This work and that of one more chunk: `count` tokens after `start` others on this rank.

        A replicated chunk, which other ranks compute too, has not all keys of its sequence on a rank: see
        `batch.replicated_start`. `samples`: whether a token is sampled after it.
        """
        rows, sampled, decode_keys, chunks, pairs, keys, merged, *_ = self
        rows, sampled, merged, rest = rows + count, sampled + samples, merged + count * replicated, self[7:]
        if count == 1:
            return Work(rows, sampled, decode_keys + start + 1, chunks, pairs, keys, merged, *rest)
        chunks, keys = (*chunks, (start, count)), keys + start + count
        pairs += count * start + count * (count + 1) // 2
        return Work(rows, sampled, decode_keys, chunks, pairs, keys, merged, *rest)

    def with_sharded(
        self,
        start: int,
        count: int,
        ranks: int,
        ring_cached: int = 0,
        samples: bool = False,
        exchange: str = "",
        rows: int | None = None,
    ) -> "Work":
        """This work and a rank's share of one more sharded chunk.

        Pairs of a query and a key are divided evenly, those of new tokens among themselves too: `T (T + 1) / 2 / N` of
        these. In pass-Q a rank compares all queries with the keys that it has, so the fullest counts for all.

        Args:
          start: keys cached before the chunk, on all ranks.
          count: tokens of the chunk, on all ranks.
          ranks: N.
          ring_cached: by how much the chunk increases `ring_cached`.
          samples: whether a token is sampled after it.
          exchange: of its rows, as of `Work`; empty: not known.
          rows: that it adds on this rank, when several chunks are packed; None: `count / ranks`, rounded up.
        """
        rows = -(-count // ranks) if rows is None else rows
        begin = self._replace(exchange=exchange or self.exchange, ring_cached=self.ring_cached + ring_cached)
        if count == 1:
            return begin._replace(
                rows=self.rows + rows,
                samples=self.samples + samples,
                decode_keys=self.decode_keys - (-(start + 1) // ranks),
                sharded=self.sharded + rows,
            )
        if exchange == "pass_q":
            start = max(start, ranks * ring_cached)
        if not rows:
            return begin._replace(samples=self.samples + samples)
        # Each of the rank's rows sees all that is cached, and half of the new tokens.
        start += (count - rows) // 2
        longer = begin.with_chunk(start, rows, samples)
        return longer._replace(sharded=self.sharded + rows)

    @property
    def local(self) -> int:
        """Rows that this rank computes alone, with all of their keys."""
        return self.rows - self.replicated - self.sharded

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to; attention's products are proportional to them."""
        return self.decode_keys + self.chunk_pairs

    @property
    def keys(self) -> int:
        """Keys attended to, counted once for each chunk; the bytes that attention reads are proportional to them."""
        return self.decode_keys + self.chunk_keys
