"""Leases: their pages are those of one sequence, as long as it has them, and are not kept from others for long."""

from collections.abc import Sequence
from typing import Any

import pytest
from fake_store import FakeStore
from test_handoff import run
from test_page_loads import storing_engine

from longctx.serving import Engine, Output, ParallelPlan, Request, SamplingParams

ONE = SamplingParams(max_tokens=1)


def test_a_lease_is_of_one_request() -> None:
    engine = storing_engine(FakeStore(), 60)
    engine.submit(Request([1] * 20, ONE, "first", lease="a"))
    with pytest.raises(ValueError, match="lease must be new, and 'a' is another request's"):
        engine.submit(Request([2] * 20, ONE, "second", lease="a"))
    outputs: dict[str, list[Output]] = {}
    run(engine, outputs)
    lease = engine.pages.lease("a")
    assert (len(lease.pages), lease.keys) == (5, engine.prepare(Request([1] * 20)).keys)


def test_of_two_requests_that_come_at_once_one_has_the_lease() -> None:
    engine = storing_engine(FakeStore(), 60)
    requests = [Request([1] * 20, ONE, "first", lease="a"), Request([2] * 24, ONE, "second", lease="a")]
    submit = engine.executor.submit

    def during(batch: Any) -> Any:  # while a step runs
        while requests:
            engine.submit(requests.pop(0))
        return submit(batch)

    engine.executor.submit = during  # type: ignore[method-assign]
    engine.submit(Request([3] * 4, ONE))
    outputs: dict[str, list[Output]] = {}
    run(engine, outputs)
    assert outputs["first"][0].lease is not None
    assert outputs["second"][0].lease is None
    assert engine.pages.lease("a").keys == engine.prepare(Request([1] * 20)).keys


@pytest.mark.parametrize("plan", [ParallelPlan(), ParallelPlan(stage=3)])
def test_a_preempted_request_offers_no_pages(plan: ParallelPlan) -> None:
    engine = storing_engine(FakeStore(), 16, plan, admission="optimistic")
    outputs: dict[str, list[Output]] = {}
    engine.submit(Request([*range(8)], SamplingParams(max_tokens=40, ignore_eos=True), "urgent", priority=1))
    engine.submit(Request([7] * 30, SamplingParams(max_tokens=30, ignore_eos=True), "leased", lease="a"))
    seen = 0
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                outputs.setdefault(event.request_id, []).append(event.output)
        if "a" not in engine.core.leases:
            continue
        lease = engine.pages.lease("a")
        if lease.is_over:
            continue
        pages = lease.owner.pages
        assert lease.pages == pages[: len(lease.pages)], "it offers pages that are another one's"
        seen += bool(lease.pages)
    assert seen
    assert engine.stats().preemptions
    assert outputs["leased"][0].metrics.preemptions


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.05
        return self.now


def leased_engine(prompts: list[list[int]], tenants: Sequence[str] = (), **options: Any) -> Engine:
    engine = storing_engine(FakeStore(), 40, **options)
    engine.now = Clock()
    for i, prompt in enumerate(prompts):
        tenant = tenants[i] if tenants else ""
        engine.submit(Request(prompt, ONE, lease=f"lease {i}", tenant=tenant))
    run(engine, {})
    return engine


def test_leases_that_nobody_asks_for_make_room() -> None:
    engine = leased_engine([[1] * 72, [2] * 72])  # 36 of 40 pages
    begun = engine.now()
    (output,) = engine.generate([[3] * 60], ONE)
    assert output.finish_reason == "length"
    assert 1 < engine.now() - begun < 5
    assert "lease 1" in engine.core.leases


def test_leases_of_the_tenant_that_has_most_make_room() -> None:
    engine = leased_engine([[1] * 32, [2] * 48, [3] * 48], ["quiet", "noisy", "noisy"])  # 8 + 12 + 12 of 40 pages
    begun = engine.now()
    engine.generate([[4] * 60], ONE)
    assert 1 < engine.now() - begun < 5
    assert [f"lease {i}" in engine.core.leases for i in range(3)] == [True, False, True]


def test_less_than_half_of_the_pages_wait_for_five_seconds() -> None:
    engine = leased_engine([[1] * 72])  # 18
    begun = engine.now()
    engine.generate([[3] * 120], ONE)
    assert 5 < engine.now() - begun < 10
    assert not len(engine.core.leases)
