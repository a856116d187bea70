"""The work of each context rank: pairs, keys and rows of local, replicated and sharded chunks, against counting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.serving.kv_cache.placement import Grown, Interleaved, Placement
from longctx.serving.predictor import Work
from longctx.serving.scheduler.batch import Chunk, keys_by_rank, keys_on, sharded_rows, work_by_rank
from longctx.serving.scheduler.sequence import Sequence

PAGE = 4


def placed(length: int, placement: Placement, have: int | None = None) -> Sequence:
    """A sequence with pages for its first `have` tokens; None: for all."""
    sequence = Sequence("a sequence", 0, length, 1)
    sequence.pages = list(range(-(-(length if have is None else have) // PAGE)))
    sequence.placement, sequence.rank_pages = placement, placement.counts(0, len(sequence.pages))
    sequence.ranks = tuple(rank for rank, count in enumerate(sequence.rank_pages) if count)
    return sequence


def chunk_of(sequence: Sequence, start: int, count: int, sharded: bool = False) -> Chunk:
    ranks = tuple(range(len(sequence.rank_pages))) if sharded else sequence.ranks
    return Chunk(sequence, 0, start, count, False, count == 1, ranks, sharded)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_ranks = draw(st.sampled_from([2, 3, 5, 8]))
    if draw(st.booleans()):
        return Interleaved(num_ranks, draw(st.integers(0, num_ranks - 1)))
    starts = sorted({0, *draw(st.lists(st.integers(1, 20), max_size=4))})
    return Grown(num_ranks, [(at, draw(st.integers(0, num_ranks - 1))) for at in starts])


@given(placements(), st.integers(1, 100), st.integers(0, 100), st.integers(0, 40))
def test_keys_on_a_rank_are_counted_page_by_page(placement: Placement, length: int, at: int, later: int) -> None:
    have = min(at, length)
    sequence = placed(length, placement, have)
    for position in (have, have + later, max(0, have - later)):
        on = [placement.rank(number // PAGE) for number in range(position)]
        expected = [on.count(rank) for rank in range(placement.num_ranks)]
        assert keys_by_rank(sequence, position, PAGE) == expected
        assert [keys_on(sequence, rank, position, PAGE) for rank in range(placement.num_ranks)] == expected


@given(placements(), st.integers(0, 70), st.integers(1, 30))
def test_pairs_of_replicated_rows_are_those_of_the_keys_on_each_rank(
    placement: Placement, start: int, count: int
) -> None:
    sequence = placed(start + count, placement)
    if len(sequence.ranks) == 1:
        return
    works = work_by_rank([chunk_of(sequence, start, count)], placement.num_ranks, PAGE)
    ranks = np.array([placement.rank(number // PAGE) for number in range(start + count)])
    queries, keys = np.arange(start, start + count)[:, None], np.arange(start + count)
    for rank, work in enumerate(works):
        if rank not in sequence.ranks:
            assert work._replace(elsewhere=0) == Work()
            continue
        assert work.elsewhere == sum(other.pairs for other in works) - work.pairs
        pairs = int(((keys <= queries) & (ranks == rank)).sum())
        assert work.rows == work.replicated == count
        assert work.local == work.sharded == 0
        if count == 1:
            assert work.pairs == work.keys == pairs
        else:
            # How a rank's part of the chunk is spread over it is not known: half of it is seen on average.
            assert abs(work.pairs - pairs) <= count * count / 2 + count


def test_a_long_context_counts_by_the_fullest_rank() -> None:
    """1,000,192 keys of 1,000,448 are on one of two ranks, not 500,224 on each."""
    page, first = 64, 1_000_192
    placement = Grown(2, [(0, 0), (first // page, 1)])
    sequence = placed(1, placement)
    sequence.rank_pages, sequence.ranks = [first // page, 4], (0, 1)
    sequence.pages = list(range(sum(sequence.rank_pages)))
    full, other = work_by_rank([chunk_of(sequence, first + 255, 1)], 2, page)
    assert (full.decode_keys, other.decode_keys) == (first, 256)
    full, other = work_by_rank([chunk_of(sequence, first, 256)], 2, page)
    assert full.pairs == pytest.approx(256 * first, rel=1e-6)
    assert other.pairs == 256 * 257 // 2


@given(
    st.sampled_from([2, 3, 5, 8]),
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 200)), min_size=1, max_size=4),
    st.sampled_from(["", "pass_kv", "pass_q", "all_gather"]),
)
def test_work_of_sharded_chunks_adds_up_to_all_of_it(
    num_ranks: int, chunks: list[tuple[int, int]], exchange: str
) -> None:
    placement = Interleaved(num_ranks, 0)
    batch = [chunk_of(placed(start + count, placement), start, count, sharded=True) for start, count in chunks]
    works = work_by_rank(batch, num_ranks, PAGE, exchange)
    tokens = sum(count for _, count in chunks)
    pairs = sum(count * start + count * (count + 1) // 2 for start, count in chunks)
    assert {(work.rows, work.sharded, work.local) for work in works} == {(-(-tokens // num_ranks),) * 2 + (0,)}
    # Rows and pages are rounded up for each chunk.
    most = sum((start + count + num_ranks * PAGE) * num_ranks for start, count in chunks)
    assert pairs <= sum(work.pairs for work in works) + most
    assert sum(work.pairs for work in works) <= pairs + most + num_ranks * PAGE * tokens
    cached = np.zeros(num_ranks, int)
    for start, count in chunks:
        on = [placement.rank(number // PAGE) for number in range(start)] if count > 1 else []
        cached += np.bincount(np.array(on, int), minlength=num_ranks)
    assert {work.ring_cached for work in works} == {cached.max()}
    assert {work.exchange for work in works} == {exchange}


def test_new_tokens_of_a_sharded_chunk_see_half_of_themselves() -> None:
    for ranks in (2, 4, 8):
        work = Work().with_sharded(0, 4096, ranks)
        assert work.rows == work.sharded == 4096 // ranks
        assert work.pairs == pytest.approx(4096 * 4097 / 2 / ranks, rel=1e-3)


def test_pass_q_takes_as_long_as_the_fullest_rank() -> None:
    """All queries go to the rank that has all of the cached keys; in pass-KV those keys go to all queries."""
    by_q = Work().with_sharded(8192, 1024, 4, 8192, exchange="pass_q")
    by_kv = Work().with_sharded(8192, 1024, 4, 8192, exchange="pass_kv")
    assert by_kv.pairs == pytest.approx(1024 * (8192 + 512) / 4, rel=1e-3)
    assert by_q.pairs == pytest.approx(1024 * (8192 + 512 / 4), rel=0.05)


def test_sharded_decodes_share_their_keys_and_rows() -> None:
    placement = Interleaved(4, 1)
    sequences = [placed(1001, placement) for _ in range(6)]
    works = work_by_rank([chunk_of(sequence, 1000, 1, sharded=True) for sequence in sequences], 4, PAGE)
    assert [work.rows for work in works] == [2] * 4
    assert [work.decode_keys for work in works] == [6 * 251] * 4
    assert [sharded_rows(1, before, 4) for before in range(5)] == [1, 0, 0, 0, 1]


def test_ranks_have_their_share_of_a_window_where_pages_interleave() -> None:
    ranks, window = 4, 16
    sequence = placed(400, Interleaved(ranks, 0))
    for start, count in ((399, 1), (300, 100)):
        works = work_by_rank([chunk_of(sequence, start, count)], ranks, PAGE, window=window)
        assert [work.window_pairs for work in works] == [count * window // ranks] * ranks
    grown = placed(400, Grown(ranks, [(0, 0), (90, 1)]))
    first, second, *_ = work_by_rank([chunk_of(grown, 399, 1)], ranks, PAGE, window=window)
    assert first.window_pairs == second.window_pairs == window
    sharded = Work(window=window).with_sharded(0, 400, ranks)
    assert sharded.window_pairs * ranks == Work.of([(0, 400, False)], window).window_pairs
    assert Work(window=window).with_sharded(399, 1, ranks).window_decode_keys == window // ranks
    chunks = [chunk_of(sequence, 399, 1, sharded=True)] * 3
    assert [work.window_decode_keys for work in work_by_rank(chunks, ranks, PAGE, window=window)] == [12] * ranks
