"""Admission: which load counts before which stage, what rejections say, priorities, deferral."""

from dataclasses import replace
from math import inf, nan

import pytest
from conductor_parts import RoundCosts, cluster, instance, request

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.overload import Admission, Load, Question, future_demands
from longctx.cluster.conductor.request import Assignment, Rejection

RULES = ("none", "baseline", "early_rejection", "predicted_early_rejection")


def two_pools(admission: object, slots: int = 4, **settings: object) -> Conductor:
    """One instance of each kind; four requests may decode at a time. A prompt of 9 blocks takes 0.95 s."""
    settings = {"ttft": 5.0, "tpot": 1.0, "decode_seconds": 10.0} | settings
    return cluster(instance("p"), instance("d", "decode", max_running=slots), admission=admission, **settings)


def fill_decode(conductor: Conductor, count: int, at: float = 0.0) -> None:
    """Have so many requests decode, since a second apart."""
    for i in range(count):
        assert isinstance(conductor.assign(request(f"old-{i}", (i, 1)), at + i), Assignment)
        assert conductor.prefilled(f"old-{i}", at + i) is None


def rejected(decision: object) -> Rejection:
    assert isinstance(decision, Rejection)
    return decision


@pytest.mark.parametrize("rule", RULES)
def test_prefill_load_is_checked_by_every_rule_but_none(rule: str) -> None:
    conductor = two_pools(rule, slots=64)
    decisions = [conductor.assign(request(f"r{i}", (i, 9)), 0.0) for i in range(6)]
    assert all(isinstance(each, Assignment) for each in decisions[:5])
    if rule == "none":
        assert isinstance(decisions[5], Assignment)
    else:
        found = rejected(decisions[5])
        assert (found.bound, found.stage) == ("ttft", "prefill")
        assert found.ttft == pytest.approx(6 * 0.95)
        assert found.load == pytest.approx(6 * 0.95 / 5)
        assert found.retry_after == pytest.approx(0.7)


@pytest.mark.parametrize("rule", RULES)
def test_tbt_of_the_selected_instance_is_compared_with_the_slo(rule: str) -> None:
    """Algorithm 1, line 27: one instance is too slow, while the mean of the pool is not; another one has no memory."""
    coupled = [instance("a", "both"), instance("b", "both", decode_tokens=500)]
    conductor = cluster(*coupled, admission=rule, policy="cache_aware", tpot=0.0045, ttft=50.0, decode_seconds=10.0)
    for i in range(3):  # all share the blocks of one instance
        assert isinstance(conductor.assign(request(f"r{i}", (0, 9), rest=5), float(i)), Assignment)
        assert conductor.prefilled(f"r{i}", i + 0.95) is None
        conductor.index.store("a", "device", conductor.state.decoding["r0"].request.keys)
    decision = conductor.assign(request("late", (0, 9), rest=5), 9.0)
    if rule in ("none", "baseline"):
        assert isinstance(decision, Assignment)
        assert (decision.decode, decision.tbt > 0.0045) == ("a", True)
    else:
        found = rejected(decision)
        assert (found.bound, found.stage) == ("tbt", "prefill")
        assert found.load == pytest.approx(found.tbt / 0.0045)
        assert found.retry_after == pytest.approx(0.95 + 10.0 - 9.0, abs=0.01)  # when the first of them has ended
    conductor.join(instance("c", "both"), 9.0)  # which keeps the SLO
    decision = conductor.assign(request("later", (0, 9), rest=5), 9.0)
    assert isinstance(decision, Assignment)
    assert (decision.prefill, decision.decode) == ("a", "c")


def test_a_step_that_is_too_slow_for_one_request_alone_never_passes() -> None:
    conductor = two_pools("early_rejection", slots=64, tpot=0.002)
    assert rejected(conductor.assign(request("r", (0, 9)), 0.0)).retry_after == inf


def test_a_request_that_waits_as_long_as_it_was_told_is_accepted() -> None:
    conductor = two_pools("early_rejection")
    for i in range(5):
        conductor.assign(request(f"r{i}", (i, 9)), 0.0)
    after = rejected(conductor.assign(request("late", (9, 9)), 0.0)).retry_after
    assert isinstance(conductor.assign(request("late", (9, 9)), after - 0.01), Rejection)
    assert isinstance(conductor.assign(request("late", (9, 9)), after + 0.01), Assignment)


def test_an_instance_is_loaded_by_its_greatest_ttft_whatever_the_request_s_own() -> None:
    """6.1: a long request is accepted at a load below 1, and then nobody is until it has been computed."""
    conductor = two_pools("early_rejection", slots=64, prefill_load="instance")
    assert isinstance(conductor.assign(request("long", (0, 60)), 0.0), Assignment)  # 6.05 s, the SLO is 5 s
    found = rejected(conductor.assign(request("short", rest=10), 1.0))
    assert (found.bound, found.load) == ("prefill_load", pytest.approx(6.05 / 5))
    assert found.retry_after == pytest.approx(5.05)
    late = rejected(conductor.assign(request("short", rest=10), 8.0))  # it is not computed yet
    assert late.load == pytest.approx(8 / 5)
    assert conductor.prefilled("long", 8.5) is None
    assert isinstance(conductor.assign(request("short", rest=10), 8.5), Assignment)


def test_a_prompt_that_alone_takes_too_long_is_told_never_to_come_again() -> None:
    assert rejected(two_pools("early_rejection").assign(request("long", (0, 60)), 0.0)).retry_after == inf


def test_baseline_finds_out_at_decode_s_door_and_early_rejection_before() -> None:
    early, late = two_pools("early_rejection"), two_pools("baseline")
    for conductor in (early, late):
        fill_decode(conductor, 4)
    found = rejected(early.assign(request("r", (9, 9)), 5.0))
    assert (found.bound, found.stage, found.load) == ("memory", "prefill", 1.25)
    assert isinstance(late.assign(request("r", (9, 9)), 5.0), Assignment)
    found = late.prefilled("r", 6.0)
    assert found is not None
    assert (found.bound, found.stage, found.load) == ("memory", "decode", 1.25)
    assert late.state.find("r") is None


def test_prediction_counts_who_will_have_ended_and_who_will_have_come() -> None:
    conductor = two_pools("predicted_early_rejection")
    fill_decode(conductor, 4)  # since 0, 1, 2 and 3: they end at 10, 11, 12 and 13
    # At 9.5 its prefill ends at 10.45: one has ended by then. Early rejection sees four of four.
    assert isinstance(conductor.assign(request("a", (5, 9)), 9.5), Assignment)
    # At 9.6 a second one's would end at 11.4: two have ended, and "a" has come.
    assert isinstance(conductor.assign(request("b", (6, 9)), 9.6), Assignment)
    # A third one's, without a prompt to speak of, ends at 11.45 as well: no third place.
    found = rejected(conductor.assign(request("c", rest=50), 9.6))
    assert (found.bound, found.load) == ("memory", 1.25)
    early = two_pools("early_rejection")
    fill_decode(early, 4)
    assert isinstance(early.assign(request("a", (5, 9)), 9.5), Rejection)


def test_what_is_predicted_is_spread_evenly_over_decode_instances() -> None:
    conductor = cluster(instance("p"), instance("d", "decode"), instance("e", "decode"), admission="none")
    for i in range(3):
        conductor.assign(request(f"r{i}", (i, 9)), 0.0)  # whose prompts end at 0.95, 1.9 and 2.85
    found = future_demands(conductor.state, 0.0, 2.0, decode_seconds=10.0)
    assert [each.name for each, _ in found] == ["d", "e"]
    assert [demand.batch for _, demand in found] == [1.0, 1.0]
    assert [demand.tokens for _, demand in found] == [950.0, 950.0]
    # With so short a t_d, the first of both has ended by then too.
    assert [demand.batch for _, demand in future_demands(conductor.state, 0.0, 2.0, 1.0)] == [0.5, 0.5]


def test_a_request_needs_memory_on_one_instance() -> None:
    decodes = [instance(name, "decode", decode_tokens=1000) for name in "de"]
    conductor = cluster(instance("p"), *decodes, admission="early_rejection", tpot=1.0)
    for i in range(2):  # one on each, of 600 tokens: both together have room for a third one, but none has
        conductor.assign(request(f"r{i}", (i, 4)), 0.0)
        assert conductor.prefilled(f"r{i}", 1.0) is None
    assert {each.assignment.decode for each in conductor.state.decoding.values()} == {"d", "e"}
    found = rejected(conductor.assign(request("r", (9, 4)), 2.0))
    assert (found.bound, found.load) == ("memory", 1.2)
    assert isinstance(conductor.assign(request("small", (9, 2)), 2.0), Assignment)


def test_the_pool_s_load_is_the_mean_and_the_cluster_s_the_greater() -> None:
    conductor = cluster(
        instance("p"), instance("q"), instance("d", "decode"), instance("e", "decode"), ttft=10.0, tpot=0.01
    )
    conductor.assign(request("r", (0, 9)), 0.0)
    assert conductor.loads(0.0) == (pytest.approx(0.95 / 2 / 10), 0.0)
    conductor.prefilled("r", 0.95)
    loads = conductor.loads(0.95)
    assert loads.decode == pytest.approx((0.002 + 0.95e-4) / 2 / 0.01, rel=1e-3)
    assert loads.decode > loads.prefill == 0.0
    assert cluster(instance("p")).loads(0.0) == (0.0, inf)


def test_tbt_binds_where_memory_does_not() -> None:
    conductor = two_pools("early_rejection", slots=64, tpot=0.00405)
    fill_decode(conductor, 3)
    found = rejected(conductor.assign(request("r", (9, 1)), 5.0))
    assert found.bound == "decode_load"
    assert found.load == pytest.approx((0.005 + 600 / 1e7) / 0.00405)
    assert found.retry_after == pytest.approx(5.0)  # the first of the three has lasted 10 s then


def test_a_limit_leaves_room_for_those_in_prefill() -> None:
    conductor = two_pools("early_rejection", decode_limit=0.75)
    fill_decode(conductor, 3)
    found = rejected(conductor.assign(request("r", (9, 9)), 5.0))
    assert (found.bound, found.stage, found.load) == ("memory", "prefill", pytest.approx(1 / 0.75))
    late = two_pools("early_rejection", decode_limit=0.75)
    late.assign(request("r", (9, 9)), 0.0)
    fill_decode(late, 3)
    assert late.prefilled("r", 5.0) is None  # at the door the fourth place is free


@pytest.mark.parametrize("rule", ["early_rejection", "predicted_early_rejection"])
def test_the_door_is_checked_again(rule: str) -> None:
    conductor = cluster(
        instance("p"),
        instance("q"),
        instance("d", "decode", max_running=4),
        admission=rule,
        tpot=1.0,
        decode_seconds=2.0,
    )
    slow = conductor.assign(request("slow", (9, 29)), 0.0)
    assert isinstance(slow, Assignment)
    fill_decode(conductor, 4)  # at the other one, and longer than they were thought to
    found = conductor.prefilled("slow", 20.0)
    assert found is not None
    assert (found.stage, found.load, found.ttft) == ("decode", 1.25, slow.ttft)


def test_own_slos_hold() -> None:
    conductor = two_pools("early_rejection")
    assert rejected(conductor.assign(request("r", (0, 9), ttft=0.5), 0.0)).load == pytest.approx(1.9)
    assert rejected(conductor.assign(request("s", (0, 9), tpot=0.001), 0.0)).bound == "decode_load"
    # A request of its own that may be slow must not spoil the batch for others.
    strict = two_pools("early_rejection", tpot=0.001)
    assert isinstance(strict.assign(request("t", (0, 9), tpot=100.0), 0.0), Rejection)


def test_priorities_pass_at_higher_loads() -> None:
    def priority(load: float, value: int) -> bool:
        conductor = two_pools(lambda question: Load(load, "prefill_load"), priority_step=0.1)
        return isinstance(conductor.assign(request("r", (0, 1), priority=value), 0.0), Assignment)

    assert [priority(1.05, value) for value in (-1, 0, 1)] == [False, False, True]
    assert [priority(0.95, value) for value in (-1, 0, 1)] == [False, True, True]
    # Between half and twice the limit, whatever a client says.
    assert not priority(2.01, 10**9)
    assert priority(0.5, -(10**9))
    assert not priority(0.51, -(10**9))


def test_deferral_ends_when_the_time_is_over() -> None:
    conductor = two_pools("early_rejection", defer_seconds=1.0)
    for i in range(5):
        conductor.assign(request(f"r{i}", (i, 9)), 0.0)
    late = request("late", (9, 9))
    assert rejected(conductor.assign(late, 0.0)).is_deferred  # it says 0.7 s
    assert not rejected(conductor.assign(late, 0.0, waited=0.4)).is_deferred
    never = rejected(conductor.assign(request("long", (0, 60)), 0.0))
    assert not never.is_deferred


def test_one_s_own_rule_is_asked_before_each_stage() -> None:
    asked: list[str] = []

    def rule(question: Question) -> Load | None:
        asked.append(question.before)
        assert question.prefill_end == question.now + question.open_request.assignment.ttft
        return Load(0.5 if question.before == "prefill" else 3.0, "tbt")

    conductor = two_pools(rule)
    assert isinstance(conductor.assign(request("r", (0, 9)), 0.0), Assignment)
    found = conductor.prefilled("r", 1.0)
    assert found is not None
    assert (found.bound, found.load, asked) == ("tbt", 3.0, ["prefill", "decode"])


@pytest.mark.parametrize("rule", ["baseline", "early_rejection"])
def test_memory_forbids_nobody_whom_an_engine_has_let_in(rule: str) -> None:
    """As after an instance was lost: more come to the others than they were to get."""
    for has_memory in (False, True):
        conductor = cluster(instance("p"), instance("d", "decode", decode_tokens=1500), admission=rule)
        for name in ("a", "b"):  # each needs 1,100 tokens
            assert isinstance(conductor.assign(request(name, (0, 9)), 0.0), Assignment)
        assert conductor.prefilled("a", 1.0) is None
        found = conductor.prefilled("b", 2.0, has_memory)
        assert (found is None) == has_memory
        conductor.finished("a", 3.0)
        conductor.finished("b", 3.0)
        assert conductor.loads(3.0) == (0.0, 0.0)


def test_rejections_leave_no_trace() -> None:
    quiet, stormy = (two_pools("predicted_early_rejection", policy="random", decode_seconds=None) for _ in range(2))
    for conductor in (quiet, stormy):
        fill_decode(conductor, 4)
    for i in range(200):
        assert isinstance(stormy.assign(request(f"retry-{i}", (9, 9)), 5.0), Rejection)
    assert stormy.loads(5.0) == quiet.loads(5.0)
    assert stormy.instances(5.0) == quiet.instances(5.0)
    assert stormy.assign(request("r", (1, 1), priority=9), 6.0) == quiet.assign(request("r", (1, 1), priority=9), 6.0)


def test_t_d_is_learned_from_requests_that_have_finished() -> None:
    admission = Admission(ConductorConfig())
    assert admission.decode_seconds == 10.0
    for seconds in (2.0, 4.0, 6.0):
        admission.learn(seconds)
    assert admission.decode_seconds == pytest.approx(4.0)
    for _ in range(2000):
        admission.learn(20.0)
    assert admission.decode_seconds == pytest.approx(20.0, rel=0.01)
    fixed = Admission(ConductorConfig(decode_seconds=3.0))
    fixed.learn(9.0)
    assert fixed.decode_seconds == 3.0
    for seconds in (nan, inf, -1.0):
        with pytest.raises(ValueError, match="seconds must be"):
            admission.learn(seconds)


def test_costs_that_are_no_numbers_let_nobody_pass() -> None:
    """Where it joins, an instance's costs are looked at in a few places only."""

    class Nonsense(RoundCosts):
        def decode_seconds(self, batch: int, tokens: int) -> float:
            return 0.001 if tokens % 100 == 0 else nan

    conductor = cluster(instance("p"), replace(instance("d", "decode"), costs=Nonsense()), admission="early_rejection")
    assert rejected(conductor.assign(request("r", (0, 9)), 0.0)).load == inf


def test_memory_is_awaited_until_enough_has_ended() -> None:
    conductor = cluster(
        instance("p"), instance("d", "decode", decode_tokens=1000), admission="none", decode_seconds=10.0
    )
    for i in range(2):  # each keeps 300 tokens
        conductor.assign(request(f"r{i}", (i, 1)), float(i))
        conductor.prefilled(f"r{i}", float(i))
    found = rejected(conductor.assign(request("big", (9, 6)), 2.0))
    assert (found.bound, found.retry_after) == ("memory", 9.0)  # it needs 800: both have to end, the later at 11
    assert rejected(conductor.assign(request("huge", (9, 12)), 2.0)).retry_after == inf


def test_without_a_rule_a_request_waits_for_memory_as_long_as_it_takes() -> None:
    parts = instance("p"), instance("d", "decode", decode_tokens=1000)
    conductor = cluster(*parts, admission="none", decode_seconds=10.0)
    conductor.assign(request("r", (0, 6)), 0.0)
    waits = rejected(conductor.assign(request("big", (9, 6)), 2.0, waited=1e6))
    assert (waits.bound, waits.is_deferred) == ("memory", True)
    assert not rejected(conductor.assign(request("huge", (9, 12)), 2.0)).is_deferred  # it never fits
    conductor.finished("r", 3.0)
    assert not isinstance(conductor.assign(request("big", (9, 6)), 3.0), Rejection)


def test_a_request_that_would_not_pass_alone_is_not_told_to_come_again() -> None:
    parts = (instance("p"), instance("d", "decode", decode_tokens=2000))
    for limits in ({"load_limit": 0.5}, {"decode_limit": 0.5}):
        conductor = cluster(*parts, admission="early_rejection", defer_seconds=60.0, **limits)
        big = conductor.assign(request("big", (0, 12)), 0.0)
        assert isinstance(big, Rejection)
        assert (big.bound, big.retry_after, big.is_deferred) == ("memory", inf, False)
        assert isinstance(conductor.assign(request("small", (0, 5)), 0.0), Assignment)
