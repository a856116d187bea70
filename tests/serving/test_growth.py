"""Memory grows with the request: pages of the next rank when it is reached, and never a deadlock."""

import pytest
from bare_scheduler import BareScheduler, ranks_over_time
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from longctx.serving import ParallelPlan
from longctx.serving.scheduler.page_planner import Claim, grantable
from longctx.serving.scheduler.policy import POLICIES
from longctx.serving.scheduler.sequence import State


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_sequences_that_grow_beside_each_other_all_end(data: st.DataObject) -> None:
    """Small pools, many sequences that need several ranks, prefixes, cancels; both admissions."""
    draw = data.draw
    context, stage = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    plan = ParallelPlan(
        stage,
        context,
        exchange=draw(st.sampled_from(["kvp", "pass_q"])),
        placement=draw(st.sampled_from(["grow", "grow", "grow", "interleave"])),
        rank_tokens=draw(st.sampled_from([None, 4, 10, 24])),
    )
    page_size = draw(st.sampled_from([1, 2, 4]))
    num_pages = draw(st.integers(2, 14))
    run = BareScheduler(
        plan,
        num_pages,
        page_size,
        draw(st.sampled_from(["reserve", "optimistic"])),
        draw(st.sampled_from(sorted(POLICIES))),
        max_running=draw(st.integers(2, 6)),
    )
    most = num_pages * context * page_size if plan.placement == "grow" else num_pages * page_size
    for _ in range(draw(st.integers(1, 25))):
        tokens = draw(st.integers(2, most))
        prompt = draw(st.integers(1, tokens - 1))
        run.add(
            prompt,
            min(tokens - prompt, 30),
            draw(st.sampled_from(["", "", "one", "other"])),
            priority=draw(st.sampled_from([0, 0, 1])),
            ttft_deadline=draw(st.sampled_from([None, 1e-3, 0.1])),
        )
        for _ in range(draw(st.integers(0, 6))):
            run.step()
            run.check()
        if draw(st.integers(0, 9)) == 0:
            run.cancel(draw(st.sampled_from(run.sequences)))
    idle = 0
    while run.has_work:
        idle = 0 if run.step().chunks else idle + 1
        run.check()
        assert idle <= 2 * stage, "nobody can go on"
        assert len(run.batches) < 20_000
    run.check_empty()


@given(
    needs=st.integers(0, 12),
    free=st.integers(0, 12),
    others=st.lists(st.builds(Claim, st.integers(0, 12), st.integers(0, 6)), max_size=4),
    rest=st.integers(0, 6),
)
def test_as_much_is_granted_as_lets_all_end(needs: int, free: int, others: list[Claim], rest: int) -> None:
    """Against a search through all orders; the state is safe before, as it always is."""

    def is_safe(free: int, claims: list[Claim]) -> bool:
        return not claims or any(
            claim.needs <= free and is_safe(free + claim.releasable, claims[:i] + claims[i + 1 :])
            for i, claim in enumerate(claims)
        )

    ended = Claim(0, rest)
    assume(is_safe(free, [ended, Claim(needs, 0), *others]))
    granted = [
        count
        for count in range(min(needs, free) + 1)
        if is_safe(free - count, [ended, Claim(needs - count, count), *others])
    ]
    assert grantable(needs, free, others, rest) == max(granted)


def plan_of(context: int, rank_tokens: int, **options: object) -> ParallelPlan:
    return ParallelPlan(context=context, exchange="kvp", rank_tokens=rank_tokens, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("admission", ["reserve", "optimistic"])
def test_pages_of_the_next_rank_are_promised_when_it_is_reached(admission: str) -> None:
    run = BareScheduler(plan_of(3, 40), 20, page_size=4, admission=admission)
    long = run.add(110, 4)
    promised = []
    while run.has_work:
        run.step()
        run.check()
        if long.state is State.PREFILLING:
            promised.append(len(long.pages) + sum(long.reserved))
    assert sorted({*promised}) == [10, 20, 28 if admission == "optimistic" else 29]
    assert [len(ranks) for ranks in ranks_over_time(run, long)] == [1, 2, 3]


def test_the_rank_to_grow_to_is_the_least_loaded_one_then() -> None:
    """Rank 1 is busy when the request begins, and rank 2 when it grows."""
    run = BareScheduler(plan_of(3, 40), 40, page_size=4)
    first = run.add(16, 1, tpot_target=1.0)
    assert run.step().chunks[0].ranks == (0,)
    long, other = run.add(60, 2), run.add(40, 40)
    run.step()
    home = long.ranks[0]
    busy = other.ranks[0]
    assert home != busy
    (idle,) = {0, 1, 2} - {home, busy}
    blocker = run.add(39, 1)  # goes to the rank that has nothing to do
    while long.computed < 40 and run.has_work:
        run.step()
        if long.computed == 32:
            assert blocker.state is State.FINISHED or idle in blocker.ranks
    run.run()
    assert ranks_over_time(run, long)[0] == (home,)
    assert first.state is State.FINISHED


def test_more_requests_begin_than_could_all_be_promised_everything() -> None:
    """Two of 80 tokens on 2 ranks of 60: both begin, one waits, both end, in the time that memory allows."""
    run = BareScheduler(plan_of(2, 20), 15, page_size=4, policy="fcfs")
    one, other = run.add(70, 10), run.add(70, 10)
    both = blocked = 0
    while run.has_work:
        batch = run.step()
        run.check()
        both += one.is_running and other.is_running
        blocked += other in batch.blocked
        assert one not in batch.blocked
    assert both > 0
    assert blocked > 0
    run.check_empty()


def test_reserved_decodes_never_wait_for_memory() -> None:
    """However long they are: what they may need is promised before their prompts end."""
    run = BareScheduler(plan_of(4, 16), 10, page_size=4, max_running=4)
    sequences = [run.add(20, 100) for _ in range(6)]
    last: dict[str, int] = {}
    while run.has_work:
        batch = run.step()
        run.check()
        for chunk in batch.chunks:
            if chunk.decodes:
                name = chunk.sequence.name
                assert batch.index - last.get(name, batch.index - 1) == 1, "a decode missed a step"
                last[name] = batch.index
    assert len(last) == 6
    assert run.scheduler.num_preempted == 0
    assert any(len(ranks) > 1 for s in sequences for ranks in ranks_over_time(run, s))


def test_a_request_that_grows_is_not_starved_by_small_ones() -> None:
    """Small requests come without end; the long one needs nearly all memory, and waits for some of it."""
    run = BareScheduler(plan_of(2, 40), 20, page_size=4, policy="fcfs")
    for _ in range(4):
        run.add(8, 12)
    long = run.add(150, 4)
    blocked = 0
    while long.state is not State.FINISHED:
        blocked += long in run.step().blocked
        if sum(s.state is State.WAITING for s in run.sequences) < 3:
            run.add(8, 12)
        assert len(run.batches) < 200
    assert blocked > 0


def test_small_requests_pass_a_large_one_until_it_has_room() -> None:
    """It needs all memory. Small ones come without end, and pass it if they have ended when the first one has."""
    run = BareScheduler(ParallelPlan(), 24, page_size=4, policy="fcfs")
    first = run.add(20, 40)
    run.step()
    large, last = run.add(80, 14, ttft_deadline=0.5), 0.0
    while not large.is_running:
        if sum(s.state is State.WAITING for s in run.sequences) < 3:
            run.add(4, 4)
        batch = run.step()
        assert (large in batch.blocked) != (large in batch.admitted)
        if first.state is State.FINISHED and not last:
            last = run.now
        assert not (last and len(batch.admitted) > (large in batch.admitted)), "passed when it was its turn"
        assert len(run.batches) < 1000
    assert large.passed_by > 10
    assert run.now - last < 0.02, "it waits for those that pass"
    run.run()


@pytest.mark.parametrize("max_running", [1, 6])
def test_who_has_no_room_is_named_in_each_step(max_running: int) -> None:
    """Also while nothing changes that might give it some, and where no slot is free besides."""
    run = BareScheduler(ParallelPlan(), 24, page_size=4, admission="optimistic", max_running=max_running)
    run.add(16, 64)
    run.step()  # it decodes
    large, steps = run.add(90, 2), 0
    while not large.is_running:
        batch = run.step()
        assert batch.blocked == ([] if large in batch.admitted else [large])
        steps += 1
    assert steps > 30
    run.run()


def test_what_exceeds_all_ranks_is_refused() -> None:
    run = BareScheduler(plan_of(3, 8), 10, page_size=4)
    run.add(100, 20)
    with pytest.raises(ValueError, match="need 31 pages of 4 tokens, more than the 30"):
        run.add(101, 21)
    run.run()


def test_limits_follow_each_requests_own_tpot_target() -> None:
    """A request with a tight target is on more ranks than one that may take its time."""
    run = BareScheduler(ParallelPlan(context=4, exchange="kvp"), 40, page_size=4, readable=lambda tpot: 400 * tpot)
    quick, slow = run.add(100, 2, tpot_target=0.1), run.add(100, 2, tpot_target=1.0)
    run.run()
    assert len(ranks_over_time(run, quick)[-1]) == 3
    assert len(ranks_over_time(run, slow)[-1]) == 1
