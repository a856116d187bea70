"""Tenants share the engine by weight: no burst of one starves another."""

from collections import Counter

import pytest
from fake_device import EOS, expected_tokens, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.serving import Engine, EngineConfig, Event, Request, SamplingParams
from longctx.serving.scheduler.policy import POLICIES


def submit(engine: Engine, tenant: str, count: int, prompt_length: int = 8, max_tokens: int = 4) -> None:
    for i in range(count):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        engine.submit(Request([i % 50, *[1] * (prompt_length - 1)], params, f"{tenant}-{i}", tenant=tenant))


def order_of_ends(engine: Engine) -> list[Event]:
    ends = []
    while engine.has_work:
        ends += [event for event in engine.step() if event.output is not None]
    return ends


@pytest.mark.parametrize(
    "policy", [pytest.param(x, marks=() if x in ("fcfs", "lrs") else pytest.mark.slow) for x in sorted(POLICIES)]
)
def test_a_thousand_prompts_do_not_starve_one(policy: str) -> None:
    engine = make_engine(policy=policy, prefix_cache=False)
    submit(engine, "many", 300)
    for _ in range(5):
        engine.step()
    submit(engine, "one", 1)
    ends = [event.request_id for event in order_of_ends(engine)]
    # It waits for a slot, not for those who wait: those who run then end about as soon.
    assert ends.index("one-0") < 2 * engine.config.max_running


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tenants_are_served_by_weight(weight: float) -> None:
    engine = make_engine(prefix_cache=False, tenant_weights={"heavy": weight})
    submit(engine, "light", 120)
    submit(engine, "heavy", 120)
    ends = order_of_ends(engine)[:80]
    counts = Counter(event.request_id.partition("-")[0] for event in ends)
    assert counts["heavy"] / counts["light"] == pytest.approx(weight, rel=0.2)


def test_a_large_request_is_not_passed_over_for_ever() -> None:
    """It needs all pages while small ones of another tenant come without end."""
    engine = make_engine(num_pages=24, page_size=4, prefix_cache=False)
    submit(engine, "small", 4)
    engine.step()
    submit(engine, "large", 1, prompt_length=80, max_tokens=14)
    ends: list[str] = []
    for i in range(400):
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        engine.submit(Request([i % 50] * 8, params, f"more-{i}", tenant="small"))
        ends += [event.request_id for event in engine.step() if event.output is not None]
        if "large-0" in ends:
            break
    assert "large-0" in ends


def test_who_rests_saves_nothing_up() -> None:
    engine = make_engine(prefix_cache=False)
    submit(engine, "busy", 200)
    submit(engine, "other", 1)
    order_of_ends(engine)
    engine = make_engine(prefix_cache=False)
    submit(engine, "early", 1)
    order_of_ends(engine)  # it was served when nobody else was there
    submit(engine, "late", 60)
    submit(engine, "early", 60)
    counts = Counter(event.request_id.partition("-")[0] for event in order_of_ends(engine)[:60])
    assert abs(counts["early"] - counts["late"]) <= 6


@settings(max_examples=10, deadline=None)
@given(
    tenants=st.lists(st.sampled_from("abc"), min_size=1, max_size=25),
    cancels=st.sets(st.integers(0, 24)),
    admission=st.sampled_from(["reserve", "optimistic"]),
    steps=st.integers(0, 5),
)
def test_every_request_of_every_tenant_is_answered(
    tenants: list[str], cancels: set[int], admission: str, steps: int
) -> None:
    engine = make_engine(admission=admission, tenant_weights={"a": 0.01, "b": 100})
    outputs = {}
    params = SamplingParams(max_tokens=9)
    for i, tenant in enumerate(tenants):
        engine.submit(Request([i, 2, 3, 4, 5], params, str(i), tenant=tenant))
        for _ in range(steps):
            outputs |= {event.request_id: event.output for event in engine.step() if event.output is not None}
        if i in cancels:
            engine.cancel(str(i))
    outputs |= {event.request_id: event.output for event in order_of_ends(engine)}
    assert sorted(map(int, outputs)) == list(range(len(tenants)))
    for i, output in outputs.items():
        if output.finish_reason != "cancelled":
            assert output.token_ids == expected_tokens([int(i), 2, 3, 4, 5], params, eos=EOS)
    assert engine.stats().pages_held == 0


@pytest.mark.parametrize("weights", [3, {"a": 0}, {"a": float("nan")}, {"a": "1"}, {1: 1.0}, {"a": True}])
def test_weights_are_checked(weights: object) -> None:
    with pytest.raises((TypeError, ValueError), match="tenant_weights"):
        EngineConfig(tenant_weights=weights)  # type: ignore[arg-type]
