"""Backfilling: small requests pass one that waits for memory, and never put off when it gets some."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.serving import ParallelPlan
from longctx.serving.scheduler.sequence import Sequence, State
from tests.serving.bare_scheduler import BareScheduler

PLANS = [
    ParallelPlan(),
    ParallelPlan(stage=2),
    ParallelPlan(context=2, placement="interleave"),
    ParallelPlan(context=3, exchange="kvp", placement="grow", rank_tokens=40),
]
SIZES = st.tuples(st.integers(1, 30), st.integers(1, 40))  # prompt and output


@settings(max_examples=60, deadline=None)
@given(
    plan=st.sampled_from(PLANS),
    policy=st.sampled_from(["fcfs", "srpf", "ilrs"]),
    admission=st.sampled_from(["reserve", "optimistic"]),
    first=st.lists(SIZES, min_size=1, max_size=5),
    large=st.integers(150, 220),
    stream=st.lists(SIZES, min_size=1, max_size=6),
    error=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    early=st.integers(1, 9),
)
def test_a_large_request_waits_for_no_more_than_those_that_ran_before_it_and_those_that_ran_then(
    plan: ParallelPlan,
    policy: str,
    admission: str,
    first: list[tuple[int, int]],
    large: int,
    stream: list[tuple[int, int]],
    error: float,
    early: int,
) -> None:
    """Small ones come without end, are predicted wrongly, and some end early.

    They pass it. But it is admitted at the latest when all have ended that ran when it had no room, and then those that
    ran beside the last of these.
    """
    run = BareScheduler(
        plan, 60 // plan.context, page_size=4, policy=policy, admission=admission, max_running=24, token_budget=32
    )
    chunker = run.scheduler.chunker
    predict = chunker.token_seconds
    chunker.token_seconds = lambda decoding: error * predict(decoding)  # type: ignore[method-assign]
    for sizes in first:
        run.add(*sizes)
    for _ in range(3):
        run.step()
    sequence = run.add(large, 4, ttft_deadline=1e9, priority=1)
    before: list[Sequence] | None = None  # those that it waits for
    then: list[Sequence] | None = None
    late = 0
    while not sequence.is_running:
        small = [s for s in run.sequences if s is not sequence]
        while sum(s.state is State.WAITING for s in small) < 3:
            small.append(run.add(*stream[len(small) % len(stream)]))
        batch = run.step()
        if sequence in batch.blocked and before is None:
            before = [s for s in run.scheduler.running if s not in batch.admitted]
        if then is None and before is not None and not any(s.is_running for s in before):
            then = list(run.scheduler.running)
        late += then is not None and not any(s.is_running for s in then)
        assert late <= 1 + plan.stage, "it waits for those that came after"
        for s in small:
            if s.state is State.DECODING and not s.in_flight and s.order % 10 >= early:
                run.cancel(s)
        run.check()


def test_many_without_room_do_not_hide_one_that_has_some() -> None:
    run = BareScheduler(ParallelPlan(), 40, page_size=4, policy="fcfs")
    run.add(100, 20)
    run.step()
    for _ in range(40):
        run.add(100, 20)
    small = run.add(4, 4)
    assert run.step().admitted == [small]


@pytest.mark.parametrize(("outputs", "passes"), [(10, True), (50, False)])
def test_who_passes_returns_its_pages_in_time(outputs: int, passes: bool) -> None:
    """The large one needs all that is there when the first one has ended, so nothing is left for others then."""
    run = BareScheduler(ParallelPlan(), 30, page_size=4, policy="fcfs")
    run.add(20, 40)
    run.step()
    large, small = run.add(110, 11), run.add(4, outputs)
    batch = run.step()
    assert batch.blocked == [large]
    assert batch.admitted == [small] * passes
    assert large.passed_by == passes
    assert run.scheduler.admission.reservations[large].surplus == [0]
    run.run()


def test_who_takes_what_is_left_may_stay() -> None:
    """Ten pages are left beside the large one. Two small ones of nine pages each end after the first one."""
    run = BareScheduler(ParallelPlan(), 40, page_size=4, policy="fcfs")
    run.add(22, 20)
    run.step()
    large, small = run.add(110, 11), [run.add(1, 36), run.add(1, 36)]
    batch = run.step()
    assert (batch.blocked, batch.admitted) == ([large], small[:1])
    while not large.is_running:
        assert small[1].state is State.WAITING
        run.step()
    assert small[0].is_running, "the large one did not wait for it"
    run.run()
