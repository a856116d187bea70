"""Synthetic workloads and arrivals: distributions, follow-ups, and what is refused."""

import itertools
import math

import numpy as np
import pytest

from longctx.simulation.workloads import (
    MIXES,
    Lengths,
    Quantiles,
    WorkloadRequest,
    arrive_at_rate,
    closed_loop,
    jitter_arrivals,
    keep_requests,
    make_conversations,
    make_mix,
    scale_lengths,
)
from longctx.simulation.workloads.request import check_arrivals


def short(count: int) -> list[WorkloadRequest]:
    return [WorkloadRequest(0.0, 100, 10, number=number) for number in range(count)]


def test_built_in_mixes_have_the_papers_quantiles() -> None:
    """Medha, 5.1: prompts of 393K (P50) and 839K (P90) tokens, outputs of 518 and 808; others below 8K."""
    requests = make_mix("sharegpt4-5-long", 20_000, seed=1)
    long = [x for x in requests if x.prompt_tokens >= 100_000]
    assert len(long) / len(requests) == pytest.approx(0.05, abs=0.005)
    assert np.percentile([x.prompt_tokens for x in long], [50, 90]) == pytest.approx([393_000, 839_000], rel=0.05)
    assert np.percentile([x.output_tokens for x in long], [50, 90]) == pytest.approx([518, 808], rel=0.05)
    assert max(x.prompt_tokens for x in requests if x.prompt_tokens < 100_000) <= 8_000
    assert requests == make_mix("sharegpt4-5-long", 20_000, seed=1) != make_mix("sharegpt4-5-long", 20_000, seed=2)
    assert all(MIXES["sharegpt4"].draw(50)[number].number == number for number in range(50))
    with pytest.raises(ValueError, match="mix must be one of sharegpt4, "):
        make_mix("sharegpt5", 3)


@pytest.mark.parametrize("points", [((0, 5),), ((0.1, 5), (1, 9)), ((0, 9), (1, 5)), ((0, 5), (0, 6), (1, 7))])
def test_quantiles_must_rise(points: tuple[tuple[float, int], ...]) -> None:
    with pytest.raises(ValueError, match="points must rise from a share of 0 to one of 1"):
        Quantiles(*points)


def test_a_closed_loop_keeps_as_many_requests_as_users() -> None:
    looped = closed_loop(short(7), users=3, delay=2.0)
    check_arrivals(looped)
    assert [x.arrival for x in looped if x.after is None] == [0, 0, 0]
    assert {x.number: x.after for x in looped if x.after is not None} == {3: 0, 4: 1, 5: 2, 6: 3}
    assert {x.session for x in looped} == {"user-0", "user-1", "user-2"}
    with pytest.raises(ValueError, match="users must be an integer of at least 1"):
        closed_loop(short(2), 0)
    with pytest.raises(ValueError, match="requests must not follow others"):
        closed_loop(looped, 2)


def test_conversations_grow_by_prompts_and_answers() -> None:
    turns = make_conversations(
        3, Lengths(3, 3), Lengths(700, 900), Lengths(10, 20), Lengths(50, 50), delay=4.0, shared_prefix=1024, seed=5
    )
    check_arrivals(turns)
    for first, second in itertools.pairwise(turns):
        if second.session == first.session:
            assert second.after == first.number
            assert 60 <= second.prompt_tokens - first.prompt_tokens <= 70
            assert second.blocks[: len(first.blocks)] == first.blocks
            # Full blocks are the same tokens, also those of the answer.
            full = first.length // 512 * 512
            assert len(first.blocks) == -(-first.length // 512)
            assert (second.tokens(1000)[: min(full, len(first.tokens(1000)))] == first.tokens(1000)[:full]).all()
        else:
            assert {*second.blocks} & {*first.blocks} == {0, 1}
    begun = arrive_at_rate(turns, 0.1, seed=1)
    assert len({x.arrival for x in begun}) == 3
    assert all(x.after is None or x.delay == 4.0 for x in begun)


def test_who_followed_a_request_that_is_left_out_follows_whom_that_one_followed() -> None:
    chain = [
        WorkloadRequest(1.0 * n, 10 * (n + 1), 1, number=n, after=n - 1 if n else None, delay=n * 1.0) for n in range(4)
    ]
    kept = keep_requests(chain, lambda x: x.number != 2)
    assert [(x.number, x.after, x.delay) for x in kept] == [(0, None, 0.0), (1, 0, 1.0), (3, 1, 5.0)]
    assert [(x.number, x.after) for x in keep_requests(chain, lambda x: x.number > 1)] == [(2, None), (3, 2)]
    with pytest.raises(ValueError, match="must follow one that stands before it"):
        check_arrivals([chain[3]])


def test_ticks_are_jittered_by_seed() -> None:
    ticks = [WorkloadRequest(3.0 * (n // 4), 5, 5, number=n) for n in range(400)]
    moved = jitter_arrivals(ticks, 3.0, seed=7)
    assert moved == jitter_arrivals(ticks, 3.0, seed=7) != jitter_arrivals(ticks, 3.0, seed=8)
    assert len({x.arrival for x in moved}) == 400
    assert all(0 <= x.arrival - ticks[x.number].arrival < 3 for x in moved)
    assert sorted(moved, key=lambda x: x.arrival) == moved


def test_follow_ups_stand_after_whom_they_follow_when_ticks_are_jittered() -> None:
    turns = make_conversations(20, Lengths(3, 3), Lengths(10, 20), Lengths(1, 5), Lengths(5, 5))
    for seed in range(3):
        seen = set[int]()
        for turn in jitter_arrivals(turns, 3.0, seed):
            assert turn.after is None or turn.after in seen
            seen.add(turn.number)


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, -math.inf, 1e300])
def test_rates_that_are_none_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate must be"):
        arrive_at_rate(short(2), rate)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"after": 5, "number": 5}, "after must be the number of an earlier request than 5, got 5"),
        ({"delay": 1.0}, "after must be given"),
        ({"after": 0, "number": 1, "delay": math.nan}, "delay must be finite"),
        ({"prompt_tokens": 2**31}, "prompt_tokens must be an integer of 1 to 2147483647"),
        ({"arrival": -1.0}, "arrival must be finite and 0 to"),
    ],
)
def test_requests_are_checked(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkloadRequest(**{"arrival": 0.0, "prompt_tokens": 5, "output_tokens": 5} | fields)


def test_scaled_lengths_keep_who_follows_whom() -> None:
    scaled = scale_lengths(closed_loop(short(4), 2), 0.1)
    assert [(x.prompt_tokens, x.output_tokens, x.after) for x in scaled[2:]] == [(10, 1, 0), (10, 1, 1)]
