"""Plans of packed batches: every token once, the paper's figures, message sizes, and balance."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.parallel import plan_decode, plan_varseq

BALANCED = ("zigzag", "striped")
BATCHES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 500)), min_size=1, max_size=8)


@given(BATCHES, st.integers(1, 9), st.sampled_from(["contiguous", *BALANCED]), st.booleans())
def test_every_token_has_one_place(batch: list[tuple[int, int]], ranks: int, layout: str, by_layout: bool) -> None:
    new, cached = zip(*batch, strict=True)
    held = None if by_layout else np.arange(sum(cached)) // 5 % ranks
    plan = plan_varseq(new, cached, ranks, layout, held)
    counted = {(b, length_cached + t): 1 for b, (length, length_cached) in enumerate(batch) for t in range(length)}
    queries = _tokens(plan.q_positions, plan.q_segment_ids)
    keys = _tokens(plan.kv_positions, plan.kv_segment_ids)
    assert sorted(itertools.chain(*queries)) == sorted(counted)
    assert sorted(itertools.chain(*keys)) == sorted((b, p) for b, (t, c) in enumerate(batch) for p in range(t + c))
    for q, kv in zip(queries, keys, strict=True):
        assert set(q) <= set(kv)  # a rank keeps what it computes
        assert kv == sorted(kv)
    per_rank = [len(kv) for kv in keys]
    assert plan.kv_tokens.tolist() == per_rank
    cached_per_rank = [len(kv) - len(q) for q, kv in zip(queries, keys, strict=True)]
    assert plan.message_tokens == max(cached_per_rank) + -(-sum(new) // ranks)
    assert plan.q_indices.shape[1] == -(-sum(new) // ranks)
    # Indices say the same as positions and segments: new tokens are counted after all cached ones.
    flat = [(b, p) for b, (_, c) in enumerate(batch) for p in range(c)]
    flat += [(b, c + t) for b, (length, c) in enumerate(batch) for t in range(length)]
    assert [[flat[i] for i in row if i >= 0] for row in plan.kv_indices] == keys
    assert [[flat[sum(cached) + i] for i in row if i >= 0] for row in plan.q_indices] == queries
    assert plan.scores.tolist() == [sum(p + 1 for _, p in q) for q in queries]


def _tokens(positions: np.ndarray, segments: np.ndarray) -> list[list[tuple[int, int]]]:
    rows = [zip(s.tolist(), p.tolist(), strict=True) for s, p in zip(segments, positions, strict=True)]
    return [[(s, p) for s, p in row if s >= 0] for row in rows]


def test_full_prefill_of_figure_1() -> None:
    """Two sequences of four chunks on two ranks: rank 0 has the outer chunks of both, rank 1 the inner ones."""
    plan = plan_varseq([8, 4], None, 2)
    assert _tokens(plan.q_positions, plan.q_segment_ids) == [
        [(0, 0), (0, 1), (0, 6), (0, 7), (1, 0), (1, 3)],
        [(0, 2), (0, 3), (0, 4), (0, 5), (1, 1), (1, 2)],
    ]


def test_partial_prefill_of_figure_2() -> None:
    """Two cached tokens and four new ones each: the layout is over the new ones, wherever the cached ones are."""
    plan = plan_varseq([4, 4], [2, 2], 2, cached_ranks=np.zeros(4, int))
    assert _tokens(plan.q_positions, plan.q_segment_ids) == [
        [(0, 2), (0, 5), (1, 2), (1, 5)],
        [(0, 3), (0, 4), (1, 3), (1, 4)],
    ]
    assert plan.kv_tokens.tolist() == [8, 4]
    assert plan.message_tokens == 8


@given(st.data(), st.integers(2, 8), st.sampled_from(BALANCED))
@settings(max_examples=100)
def test_long_sequences_balance_within_one_percent(data: st.DataObject, ranks: int, layout: str) -> None:
    lengths = st.lists(st.tuples(st.integers(400 * ranks, 1500 * ranks), st.integers(0, 20000)), min_size=1, max_size=6)
    new, cached = zip(*data.draw(lengths), strict=True)
    plan = plan_varseq(new, cached, ranks, layout)
    assert np.abs(plan.scores / plan.scores.mean() - 1).max() < 0.01
    # Keys are balanced within a token for each sequence, and in all within one new token and one cached token.
    assert np.ptp(plan.kv_tokens) <= 2
    # Contiguous beside it: of one sequence, the last rank has far more to do.
    contiguous, balanced = (plan_varseq(new[:1], cached[:1], ranks, x).scores for x in ("contiguous", layout))
    assert contiguous[-1] / contiguous.mean() > 1.005 + balanced.max() / balanced.mean() - 1


@given(BATCHES, st.integers(1, 8), st.sampled_from(BALANCED))
@settings(max_examples=300)
def test_short_sequences_balance_within_one_row(batch: list[tuple[int, int]], ranks: int, layout: str) -> None:
    new, cached = zip(*batch, strict=True)
    plan = plan_varseq(new, cached, ranks, layout)
    longest_row = max(length + old for length, old in batch)
    assert np.abs(plan.scores - plan.scores.mean()).max() <= max(longest_row, 0.01 * plan.scores.mean())


def test_report_shows_the_balance() -> None:
    zigzag, contiguous = (plan_varseq([3200], [0], 8, layout).report(8, 64) for layout in ("zigzag", "contiguous"))
    assert "busiest rank +0.00% above the mean; 400 KV tokens in a message" in zigzag
    assert "busiest rank +87.47% above the mean" in contiguous
    # 3200 * 3201 / 2 pairs over 8 ranks, 4 * 8 * 64 FLOP each.
    assert zigzag.splitlines()[1].split() == ["0", "400", "400", "1.311"]
    assert "+0.00%" in plan_varseq([], None, 2).report(8, 64)


@given(st.integers(0, 40), st.integers(0, 100), st.integers(1, 9))
def test_decode_rows_rotate_over_ranks(batch: int, step: int, ranks: int) -> None:
    rows = plan_decode(batch, step, ranks)
    assert rows.shape == (ranks, -(-batch // ranks))
    assert sorted(rows[rows >= 0].tolist()) == list(range(batch))
    per_rank = (rows >= 0).sum(1)
    assert np.ptp(per_rank) <= 1
    # Over N steps every rank keeps one token of each sequence.
    owners = np.array(
        [
            [np.flatnonzero((plan_decode(batch, step + i, ranks) == b).any(1))[0] for b in range(batch)]
            for i in range(ranks)
        ]
    )
    assert (np.sort(owners, 0) == np.arange(ranks)[:, None]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([4], [1, 2], 2), "cached_lengths must have one entry a sequence, 1, got 2"),
        (([-4], [1], 2), "new_lengths must be non-negative integers"),
        (([4], [1.5], 2), "cached_lengths must be non-negative integers"),
        (([4], [1], 0), "num_shards must be a positive integer, got 0"),
        (([4], [1], 2, "spiral"), "layout must be one of"),
        (([4], [1], 2, "zigzag", np.array([2])), "cached_ranks must be 1 ranks below 2, one a cached token"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_varseq(*arguments)  # type: ignore[arg-type]


def test_wrong_arguments_of_plan_decode_are_named() -> None:
    with pytest.raises(ValueError, match="step must be an integer of at least 0, got -1"):
        plan_decode(3, -1, 2)
