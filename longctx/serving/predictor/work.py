"""`Work`: the features of a batch from which its time is predicted."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from longctx.parallel.cost import window_keys, window_pairs


class Work(NamedTuple):
    """The work of a batch on one context rank; made by `of`, `with_chunk` and `with_sharded`.

    Pairs and keys are those of a layer without a sliding window, and where `window` is given, those of a layer with
    one too. A work that was made without it gets it from `seen_through`.

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
      window: tokens that a query of a sliding layer sees, itself included; 0: not given, or no layer is sliding.
      window_decode_keys: `decode_keys` of a sliding layer.
      window_chunks: pairs, and keys, of each longer chunk in a sliding layer.

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
    window: int = 0
    window_decode_keys: int = 0
    window_chunks: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int, bool]], window: int = 0) -> "Work":
        """The work of local chunks, each given as (tokens before it, its tokens, whether a token is sampled)."""
        rows = samples = decode_keys = pairs = keys = seen = 0
        longer = []
        for start, count, does_sample in chunks:
            samples += does_sample
            if count == 1:
                rows += 1
                decode_keys += start + 1
                seen += min(start + 1, window)
            else:
                rows += count
                pairs += count * start + count * (count + 1) // 2
                keys += start + count
                longer.append((start, count))
        work = cls(rows, samples, decode_keys, tuple(longer), pairs, keys)
        if not window:
            return work
        in_window = tuple([_seen(*each, window) for each in longer])
        return work._replace(window=window, window_decode_keys=seen, window_chunks=in_window)

    @classmethod
    def of_many(cls, decodes: int, decode_keys: Any, starts: Any, tokens: int) -> "Work":
        """The works of batches of some decodes and a chunk of 0 or several tokens, as `seconds_of_many` takes them.

        Args:
          decodes: of each batch.
          decode_keys: that the decodes attend to, int64 `[batches]` or the same for all.
          starts: tokens before each chunk, int64 `[batches]` or the same for all.
          tokens: of each chunk; 0: there is none.
        """
        work = cls(decodes, decodes, decode_keys)
        return work.with_chunk(starts, tokens, False) if tokens else work

    def with_chunk(
        self, start: int, count: int, samples: bool, replicated: bool = False, window: int | None = None
    ) -> "Work":
        """This work and that of one more chunk: `count` tokens after `start` others on this rank.

        A replicated chunk, which other ranks compute too, has not all keys of its sequence on a rank: see
        `batch.replicated_start`. `samples`: whether a token is sampled after it. `window`: of the tokens in the window
        of a query, how many this rank has at most; None: all of them.
        """
        rows, sampled, decode_keys, chunks, pairs, keys, merged, *_ = self
        rows, sampled, merged, rest = rows + count, sampled + samples, merged + count * replicated, self[7:]
        if self.window:
            rest = (*self[7:12], *self._seen_with(start, count, self.window if window is None else window))
        if count == 1:
            decode_keys += start + 1
        else:
            chunks, keys = (*chunks, (start, count)), keys + start + count
            pairs += count * start + count * (count + 1) // 2
        # Not by `Work(...)`, which takes twice as long: the sizes of chunks are found by making many.
        return tuple.__new__(Work, (rows, sampled, decode_keys, chunks, pairs, keys, merged, *rest))

    def _seen_with(self, start: int, count: int, window: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """`window_decode_keys` and `window_chunks` with one more chunk."""
        if count == 1:
            return self.window_decode_keys + min(start + 1, window), self.window_chunks
        return self.window_decode_keys, (*self.window_chunks, _seen(start, count, window))

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
                window_decode_keys=self.window_decode_keys - (-min(start + 1, self.window) // ranks),
            )
        if not rows:
            return begin._replace(samples=self.samples + samples)
        # Each of the rank's rows sees all that is cached, and half of the new tokens.
        before = max(start, ranks * ring_cached) if exchange == "pass_q" else start
        longer = begin.with_chunk(before + (count - rows) // 2, rows, samples)
        longer = longer._replace(sharded=self.sharded + rows)
        if not self.window:
            return longer
        # With a window, rows near the start see less than others, and ranks have their share of these.
        seen = -(-rows * window_pairs(start, count, self.window) // count), window_keys(start, rows, self.window)
        return longer._replace(window_chunks=(*self.window_chunks, seen))

    def seen_through(self, window: int) -> "Work":
        """This work with that of layers with a window, as if all decodes were equally long if they were added without.

        So it overestimates decodes of which some are shorter than the window, and others longer.
        """
        if self.window == window:
            return self
        decodes = self.rows - sum(count for _, count in self.chunks)
        return self._replace(
            window=window,
            window_decode_keys=min(self.decode_keys, decodes * window),
            window_chunks=tuple([_seen(*each, window) for each in self.chunks]),
        )

    @property
    def local(self) -> int:
        """Rows that this rank computes alone, with all of their keys."""
        return self.rows - self.replicated - self.sharded

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to; attention's products are proportional to them."""
        return self.decode_keys + self.chunk_pairs

    @property
    def window_pairs(self) -> int:
        """`pairs` of a layer with a window."""
        return self.window_decode_keys + sum([pairs for pairs, _ in self.window_chunks])

    @property
    def window_keys(self) -> int:
        """`keys` of a layer with a window."""
        return self.window_decode_keys + sum([keys for _, keys in self.window_chunks])

    @property
    def keys(self) -> int:
        """Keys attended to, counted once for each chunk; the bytes that attention reads are proportional to them."""
        return self.decode_keys + self.chunk_keys


def _seen(start: int, count: int, window: int) -> tuple[int, int]:
    """Return the pairs, and the keys, of a chunk in a sliding layer."""
    return window_pairs(start, count, window), window_keys(start, count, window)
