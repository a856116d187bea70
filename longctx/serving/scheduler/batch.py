"""Steps as plain data, which the scheduler makes and an executor runs, and the work that each asks of context ranks."""

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import NamedTuple

from longctx.serving.kv_cache.connector import PageLoad, PageStore
from longctx.serving.kv_cache.placement import Interleaved
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.sequence import Sequence


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence: positions `start` to `start + num_tokens - 1`.

    `samples`: whether the token after them is sampled. `decodes`: whether they are the one token that was sampled
    last, which the host need not know yet. `ranks`: the context ranks that compute them: one alone, or several, each
    all of them (KV parallelism), or, where `sharded`, all ranks, each a part.
    """

    sequence: Sequence
    slot: int
    start: int
    num_tokens: int
    samples: bool
    decodes: bool
    ranks: tuple[int, ...] = (0,)
    sharded: bool = False


class TableRun(NamedTuple):
    """Entries of a page table: those of `slot` from `first` on become `pages`.

    `windows`: the window page of each of them, or `NO_PAGE`; empty if no layer has a window.
    """

    slot: int
    first: int
    pages: list[int]
    windows: List[int] = ()


class Exchange(NamedTuple):
    """Exchange of a step's rows over the context ranks, and the reason for it.

    Attributes:
      name: of sharded rows `"pass_kv"`, `"pass_q"` or `"all_gather"`; `"kvp"` if there are only replicated ones.
      reason: the rule, and what it went by, in one line.
    """

    name: str
    reason: str


@dataclass
class Batch:
    """One step. Decodes come first in `chunks`. `tables` are written before it; `admitted` have new slots.

    `blocked` had no room when it was planned: those that run and wait for memory to grow, and the first of those that
    wait to be admitted.

    `work` is what it asks of the rank that takes longest, `predicted` the seconds that it should take; `rank_seconds`
    are those of each context rank. `exchange` is what its rows exchange over ranks; None: nothing.

    Before it runs, in this order: the loads of sequences named in `dropped` end, so that none of their pages is written
    any more; pages in `stores` are read; `loads` begin.
    """

    index: int
    chunks: list[Chunk] = field(default_factory=list)
    tables: list[TableRun] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    blocked: list[Sequence] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    predicted: float = 0.0
    rank_seconds: tuple[float, ...] = ()
    exchange: Exchange | None = None
    stores: list[PageStore] = field(default_factory=list)
    loads: list[PageLoad] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    def advance(self, times: int, steps: int, seconds: float) -> None:
        """Become the batch `steps` steps later, which has the same decodes `times` tokens later.

        Args:
          times: tokens.
          steps: numbers of steps.
          seconds: that it is predicted to take.
        """
        self.index += steps
        self.admitted, self.tables = [], []
        if self.chunks:
            self.chunks = [chunk._replace(start=chunk.start + times) for chunk in self.chunks]
            work, window = self.work, self.work.window
            self.work = work._replace(
                decode_keys=work.decode_keys + times * len(self.chunks),
                window_decode_keys=sum([min(chunk.start + 1, window) for chunk in self.chunks]) if window else 0,
            )
            self.predicted, self.rank_seconds = seconds, (seconds,)

    @property
    def needs_tokens(self) -> bool:
        """Whether the masks of some of its tokens depend on the tokens before."""
        return any(chunk.samples and chunk.sequence.needs_tokens for chunk in self.chunks)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the results."""
        return [chunk.sequence for chunk in self.chunks if chunk.samples]


def work_by_rank(
    chunks: Iterable[Chunk], num_ranks: int, page_size: int = 1, exchange: str = "", window: int = 0
) -> list[Work]:
    """Return the work of each context rank with one exchange of the sharded rows; the rest as `work_by_exchange`."""
    return work_by_exchange(chunks, num_ranks, page_size, (exchange,), window)[exchange]


def work_by_exchange(
    chunks: Iterable[Chunk], num_ranks: int, page_size: int, exchanges: Iterable[str], window: int = 0
) -> dict[str, list[Work]]:
    """Return the work of each context rank, for each of some exchanges of the sharded rows.

    A rank of a replicated chunk attends to those keys of its sequence that it has; one of a sharded chunk has a share
    of the rows, which are spread evenly over the ranks. In sliding layers a rank of a replicated chunk has its share of
    each window where pages interleave; where they grow, it is taken to have as much of it as it has keys.

    Args:
      page_size: tokens of a page; not needed for one rank.
      exchanges, window: see `Work`.
    """
    if num_ranks == 1:
        work = Work.of([chunk[2:5] for chunk in chunks], window)
        return {exchange: [work] for exchange in exchanges}
    parts: list[list[tuple[int, int, bool]]] = [[] for _ in range(num_ranks)]
    interleaved: list[list[tuple[int, int, bool]]] = [[] for _ in range(num_ranks)] if window else parts
    replicated, sharded = [0] * num_ranks, list[Chunk]()
    for chunk in chunks:
        ranks = chunk.ranks
        if chunk.sharded:
            sharded.append(chunk)
        elif len(ranks) == 1:
            parts[ranks[0]].append(chunk[2:5])
        else:
            sequence, _, start, count, samples, *_ = chunk
            first, several = ranks[0], interleaved if isinstance(sequence.placement, Interleaved) else parts
            if count == 1 and start // page_size == len(sequence.pages) - 1:  # a decode: quicker, for there are many
                placement, pages = sequence.placement, sequence.rank_pages
                assert placement is not None
                owner, unused = placement.rank(len(sequence.pages) - 1), -(start + 1) % page_size
                for rank in ranks:
                    keys = pages[rank] * page_size - (unused if rank == owner else 0)
                    several[rank].append((keys - 1, 1, samples and rank == first))
                    replicated[rank] += 1
                continue
            for rank in ranks:
                here = replicated_start(sequence, rank, start, count, page_size)
                several[rank].append((here, count, samples and rank == first))
                replicated[rank] += count
    works = [Work.of(part, window) for part in parts]
    if interleaved is not parts:
        works = [_with_shares(*each, -(-window // num_ranks)) for each in zip(works, interleaved, strict=True)]
    works = [work._replace(replicated=rows) for work, rows in zip(works, replicated, strict=True)]
    return {
        exchange: _with_elsewhere(_with_sharded(works, sharded, page_size, exchange) if sharded else works)
        for exchange in exchanges
    }


def _with_shares(work: Work, chunks: list[tuple[int, int, bool]], window: int) -> Work:
    """A rank's work with chunks of which it has a share of the window."""
    for chunk in chunks:
        work = work.with_chunk(*chunk, window=window)
    return work


def _with_elsewhere(works: list[Work]) -> list[Work]:
    pairs = [work.decode_keys + work.chunk_pairs for work in works]
    total = sum(pairs)
    return [work._replace(elsewhere=total - here) for work, here in zip(works, pairs, strict=True)]


def _with_sharded(works: list[Work], chunks: list[Chunk], page_size: int, exchange: str) -> list[Work]:
    num_ranks, before, cached = len(works), 0, [0] * len(works)
    single = [chunk for chunk in chunks if chunk.num_tokens == 1]
    if single:  # at once, for there are many; their queries travel, not their keys
        rows, keys = (
            sharded_rows(len(single), 0, num_ranks),
            sum(-(-(chunk.start + 1) // num_ranks) for chunk in single),
        )
        samples, before, window = sum(chunk.samples for chunk in single), len(single), works[0].window
        seen = sum(-(-min(chunk.start + 1, window) // num_ranks) for chunk in single)
        works = [
            work._replace(
                rows=work.rows + rows,
                samples=work.samples + (samples if rank == 0 else 0),
                decode_keys=work.decode_keys + keys,
                window_decode_keys=work.window_decode_keys + seen,
                sharded=work.sharded + rows,
                exchange=exchange or work.exchange,
            )
            for rank, work in enumerate(works)
        ]
    for chunk in chunks:
        sequence, _, start, count, samples, _, ranks, _ = chunk
        if count == 1:
            continue
        rows, most = sharded_rows(count, before, num_ranks), max(cached)
        before += count
        cached = [keys + more for keys, more in zip(cached, keys_by_rank(sequence, start, page_size), strict=True)]
        added = max(cached) - most
        works = [
            work.with_sharded(start, count, num_ranks, added, samples and rank == ranks[0], exchange, rows)
            for rank, work in enumerate(works)
        ]
    return works


def sharded_rows(count: int, before: int, num_ranks: int) -> int:
    """Rows that `count` sharded tokens add to each rank, after `before` others of the step."""
    return -(-(before + count) // num_ranks) + -before // num_ranks


def place_rows(rows: list[int], ranks: tuple[int, ...], count: int) -> None:
    """Add rows of a sequence to those of their kind on each rank: in the same place on all ranks of the sequence."""
    top = max([rows[rank] for rank in ranks]) + count
    for rank in ranks:
        rows[rank] = top


def keys_by_rank(sequence: Sequence, position: int, page_size: int) -> list[int]:
    """Return how many of a sequence's tokens before `position` each context rank keeps, `[ranks]`; see `keys_on`."""
    placement = sequence.placement
    assert placement is not None
    return [keys_on(sequence, rank, position, page_size) for rank in range(placement.num_ranks)]


def keys_on(sequence: Sequence, rank: int, position: int, page_size: int) -> int:
    """Return how many of a sequence's tokens before `position` a context rank keeps.

    The position is among the tokens that the sequence has pages for, past those that it found in the cache, or after
    them all: there the pages to come count, as they are placed.
    """
    placement, have = sequence.placement, len(sequence.pages)
    assert placement is not None
    page, rest = divmod(position, page_size)
    pages = sequence.rank_pages[rank] if sequence.rank_pages else 0
    if page == have - 1:
        pages -= placement.rank(page) == rank
    elif page < have:
        pages -= placement.counts(page, have)[rank]
    elif page > have:
        pages += placement.counts(have, page)[rank]
    return pages * page_size + (rest if rest and placement.rank(page) == rank else 0)


def replicated_start(sequence: Sequence, rank: int, start: int, count: int, page_size: int) -> int:
    """Tokens before a replicated chunk, for `Work`: such that the chunk has the pairs that it has on this rank.

    All of the chunk's queries see the keys that the rank has before it, and of its own keys those that the rank keeps:
    half of them on average. `Work` counts half of the chunk's keys on every rank, so a rank that keeps fewer of them
    has as many fewer before it.
    """
    before, after = (keys_on(sequence, rank, position, page_size) for position in (start, start + count))
    here = before + (after - before - count) // 2
    return here if count == 1 else max(0, here)
