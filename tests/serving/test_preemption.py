"""Prompts give slots and pages to more urgent ones under optimistic admission, but not to and fro."""

import random

import pytest
from bare_scheduler import BareScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.serving import ParallelPlan
from longctx.serving.scheduler.preemption import preemption_key
from longctx.serving.scheduler.sequence import Sequence, State


def first_token(run: BareScheduler, sequence: Sequence) -> float:
    """Run until the first token of a sequence is sampled; seconds since now."""
    begin = run.now
    while sequence.length == sequence.prompt_length:
        run.step()
        run.check()
    return run.now - begin


@pytest.mark.parametrize(("policy", "context"), [("ilrs", 1), ("srpf", 2), ("edf", 2)])
def test_a_short_prompt_does_not_wait_for_the_pages_of_a_long_one(policy: str, context: int) -> None:
    """Whose pages stay in the cache, so that it computes little of them again."""
    run = BareScheduler(
        ParallelPlan(context=context, exchange="kvp"),
        500 // context,
        page_size=4,
        admission="optimistic",
        policy=policy,
    )
    long = run.add(1990, 1, "document", ttft_deadline=10.0)
    while long.computed < 1000:
        run.step()
    short = run.add(200, 1, ttft_deadline=0.5)
    alone = run.scheduler.forecast.time.prefill_seconds(0, 200)
    assert first_token(run, short) < 4 * alone
    assert long.preemptions == 1
    run.run()
    assert long.recomputed <= 200 + run.page_size
    run.check_empty()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_short_prompt_does_not_wait_for_the_slot_of_a_long_one(stage: int) -> None:
    run = BareScheduler(ParallelPlan(stage), 4000, admission="optimistic", max_running=2)
    long = [run.add(4000, 1, name, ttft_deadline=60.0) for name in ("one", "other")]
    for _ in range(100):
        run.step()
    short = run.add(8, 1, ttft_deadline=0.1)
    assert first_token(run, short) < 0.1
    assert sum(s.preemptions for s in long) == 1
    run.run()
    assert sum(s.recomputed for s in long) <= run.page_size  # of a page that was not full


@pytest.mark.parametrize("policy", ["ilrs", "edf"])
def test_nobody_is_preempted_under_reserve(policy: str) -> None:
    run = BareScheduler(ParallelPlan(), 100, policy=policy, max_running=2)
    long = run.add(380, 10, ttft_deadline=10.0)
    run.step()
    short = run.add(40, 1, ttft_deadline=0.01)
    run.run()
    assert run.scheduler.num_preempted == 0
    assert long.state is short.state is State.FINISHED


def test_decodes_are_not_preempted_for_urgency() -> None:
    run = BareScheduler(ParallelPlan(), 100, admission="optimistic", max_running=2)
    decodes = [run.add(4, 150, ttft_deadline=10.0) for _ in range(2)]
    for _ in range(3):
        run.step()
    run.add(8, 1, ttft_deadline=0.01)
    run.run()
    assert run.scheduler.num_preempted == 0
    assert all(decode.length == 154 for decode in decodes)


def test_who_would_be_less_late_than_the_one_that_gives_way_waits() -> None:
    """The long prompt would miss its deadline if it had to compute again what it has computed: it goes on."""
    run = BareScheduler(ParallelPlan(), 100, admission="optimistic", policy="srpf")
    needed = run.scheduler.forecast.time.prefill_seconds(0, 390)
    long = run.add(390, 1, ttft_deadline=1.2 * needed)  # nothing of it can be found in the cache
    while long.computed < 200:
        run.step()
    run.add(100, 1, ttft_deadline=1.0)
    run.run()
    assert long.preemptions == 0


def test_a_lower_priority_gives_way_whatever_its_slack() -> None:
    run = BareScheduler(ParallelPlan(), 100, admission="optimistic", policy="fcfs")
    low = run.add(390, 1, ttft_deadline=1e-3)
    while low.computed < 200:
        run.step()
    high = run.add(100, 1, priority=1, ttft_deadline=10.0)
    assert first_token(run, high) < run.scheduler.forecast.time.prefill_seconds(0, 390)
    assert low.preemptions == 1
    run.run()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_prompts_do_not_take_turns_at_preempting_each_other(data: st.DataObject) -> None:
    """Nobody computes more than twice its prompt again, and computes on between two preemptions."""
    draw = data.draw
    context = draw(st.integers(1, 4))
    plan = ParallelPlan(draw(st.integers(1, 2)), context, exchange="kvp", rank_tokens=draw(st.sampled_from([None, 40])))
    run = BareScheduler(
        plan,
        60 // context,
        4,
        "optimistic",
        draw(st.sampled_from(["ilrs", "lrs", "lrs_relative", "edf", "srpf"])),
        max_running=draw(st.integers(1, 4)),
    )
    preempted: dict[Sequence, list[int]] = {}
    for number in range(draw(st.integers(2, 30))):
        long = draw(st.booleans())
        run.add(
            draw(st.integers(100, 200) if long else st.integers(1, 30)),
            1,  # no decode needs a page
            draw(st.sampled_from(["", f"{number}"])),
            priority=draw(st.sampled_from([0, 0, 0, 1])),
            ttft_deadline=draw(st.sampled_from([1e-3, 0.02, 0.2, 2.0])),
        )
        for _ in range(draw(st.integers(0, 15))):
            before = {s: s.computed for s in run.scheduler.running.prefilling}
            run.step()
            run.check()
            for sequence, computed in before.items():
                if sequence.state is State.WAITING:
                    preempted.setdefault(sequence, []).append(computed)
    run.run()
    for sequence in run.sequences:
        assert sequence.recomputed <= 2 * sequence.prompt_length
    for computed in preempted.values():
        assert computed == sorted(computed)
    run.check_empty()


@pytest.mark.parametrize(("policy", "seed"), [("ilrs", 0), ("fcfs", 3)])
def test_a_long_prompt_does_not_thrash_beside_decodes_that_need_pages(policy: str, seed: int) -> None:
    """It grows over nearly all memory, and small requests that decode come without end.

    Whoever takes its pages, it begins again only when it can have all, and keeps them against those who came later.
    """
    draw = random.Random(seed)
    plan = ParallelPlan(context=4, exchange="kvp", rank_tokens=40)
    run = BareScheduler(plan, 20, 4, "optimistic", policy, max_running=8)

    def add_small() -> None:
        run.add(draw.randint(4, 20), draw.randint(10, 40), ttft_deadline=1.0)

    for _ in range(6):
        add_small()
    run.step()
    long = run.add(240, 4, ttft_deadline=3.0)  # nothing of it can be found in the cache
    admissions = 0
    while long.state is not State.FINISHED:
        again = long.preemptions > 0
        batch = run.step()
        run.check()
        if again and long in batch.admitted:
            admissions += 1
            assert long.claim == 0
        if sum(s.state is State.WAITING for s in run.sequences) < 3:
            add_small()
        assert len(run.batches) < 4000, "it is starved"
    assert long.recomputed <= 2 * long.prompt_length
    assert admissions == long.preemptions
    run.run()
    run.check_empty()


def test_a_prompt_that_computes_again_what_it_lost_goes_after_decodes_that_came_later() -> None:
    prompt = Sequence("prompt", 1, 40, 4, state=State.PREFILLING, computed=10, no_preempt_before=20)
    older, later, urgent = (
        Sequence(f"decode {order}", order, 40, 4, state=State.DECODING, priority=priority)
        for order, priority in ((0, 0), (2, 0), (3, 1))
    )
    assert sorted([later, prompt, urgent, older], key=preemption_key) == [urgent, older, prompt, later]
    prompt.computed = 20
    assert sorted([later, prompt, urgent, older], key=preemption_key) == [urgent, older, later, prompt]
