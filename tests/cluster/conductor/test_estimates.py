"""Estimates follow assignments at once, time, ends, and what instances report."""

from typing import Any

import pytest
from conductor_parts import cluster, instance, request

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.instance import Report
from longctx.cluster.conductor.request import Assignment, Rejection
from longctx.cluster.conductor.state import InstanceView


def one_of_each(**settings: Any) -> Conductor:
    return cluster(instance("p0"), instance("d0", "decode"), **{"admission": "none"} | settings)


def view(conductor: Conductor, name: str, now: float) -> InstanceView:
    return next(each for each in conductor.instances(now) if each.name == name)


def queue(conductor: Conductor, now: float) -> float:
    return view(conductor, "p0", now).queue_seconds


def decoding(conductor: Conductor, now: float = 0.0) -> tuple[int, int, int]:
    found = view(conductor, "d0", now)
    return found.decoding, found.decode_tokens, found.reserved_tokens


def test_queue_is_the_sum_of_prompts_less_what_the_first_has_had() -> None:
    conductor = one_of_each()
    for i in range(3):
        conductor.assign(request(str(i), rest=1000), 0.0)
    assert queue(conductor, 0.0) == pytest.approx(3.0)
    assert queue(conductor, 0.4) == pytest.approx(2.6)
    assert queue(conductor, 5.0) == pytest.approx(2.0)  # it takes longer than predicted: the others wait still
    conductor.first_token("0", 5.0)
    assert queue(conductor, 5.5) == pytest.approx(1.5)
    conductor.cancelled("2", 5.5)
    assert queue(conductor, 5.5) == pytest.approx(0.5)
    conductor.first_token("1", 6.0)
    assert queue(conductor, 6.0) == 0.0


def test_prompt_that_waits_for_its_transfer_does_not_begin() -> None:
    slow = instance("p0", bandwidth=1_000_000.0)  # a thousand tokens a second
    conductor = cluster(slow, instance("p1"), instance("d0", "decode"), admission="none")
    conductor.index.store("p0", "device", request("", (1, 10)).keys.tolist())
    conductor.assign(request("busy", rest=9000), 0.0, exclude={"p1"})
    found = conductor.assign(request("a", (1, 10), rest=2000), 0.0)
    assert isinstance(found, Assignment)
    assert (found.prefill, found.transfer_seconds) == ("p1", pytest.approx(1.0))
    assert [view(conductor, "p1", now).queue_seconds for now in (0.0, 1.0, 2.0)] == pytest.approx([2.0, 2.0, 1.0])
    assert [view(conductor, "p0", now).sending_seconds for now in (0.0, 0.25, 2.0)] == pytest.approx([1.0, 0.75, 0.0])
    conductor.cancelled("a", 0.25)
    assert view(conductor, "p0", 0.25).sending_seconds == 0.0


def test_requests_decode_after_their_prompt_until_they_end() -> None:
    conductor = one_of_each()
    conductor.assign(request("a", rest=1000), 0.0)
    assert decoding(conductor) == (0, 0, 0)
    conductor.first_token("a", 1.0)
    conductor.first_token("a", 1.1)  # told twice
    assert decoding(conductor) == (1, 1000, 1100)
    conductor.finished("a", 2.0)
    conductor.finished("a", 2.0)
    conductor.cancelled("a", 2.0)
    assert decoding(conductor) == (0, 0, 0)


def test_requests_that_are_in_prefill_count_for_the_choice_of_where_to_decode() -> None:
    parts = (instance("p0"), instance("d0", "decode"), instance("d1", "decode"))
    conductor = cluster(*parts, admission="none")
    found = [conductor.assign(request(str(i)), 0.0) for i in range(4)]
    assert [each.decode for each in found if isinstance(each, Assignment)] == ["d0", "d1", "d0", "d1"]


def test_report_corrects_the_queue_and_what_it_does_not_know_comes_on_top() -> None:
    conductor = one_of_each()
    for name in ("a", "b"):
        conductor.assign(request(name, rest=1000), 0.0)
    conductor.report("p0", Report(5.0, 0, 0, frozenset("a")), 1.0)
    assert queue(conductor, 1.0) == pytest.approx(6.0)
    conductor.assign(request("c", rest=500), 1.0)
    assert queue(conductor, 1.0) == pytest.approx(6.5)
    assert queue(conductor, 3.0) == pytest.approx(4.5)
    assert queue(conductor, 9.0) == pytest.approx(0.5)  # the report's are done, and the next one too
    conductor.report("p0", Report(0.25, 0, 0, frozenset("abc")), 9.0)
    assert queue(conductor, 9.0) == pytest.approx(0.25)


def test_prompt_that_a_report_no_longer_counts_does_not_come_on_top_again() -> None:
    """It is computed, but its first token has not been told yet."""
    conductor = one_of_each()
    conductor.assign(request("a", rest=1000), 0.0)
    conductor.report("p0", Report(0.9, 0, 0, frozenset("a")), 0.1)
    conductor.report("p0", Report(0.0, 0, 0), 1.0)
    assert queue(conductor, 1.0) == 0.0


def test_cancelled_prompt_is_taken_off_what_was_reported() -> None:
    conductor = one_of_each()
    for name in ("a", "b"):
        conductor.assign(request(name, rest=1000), 0.0)
    conductor.report("p0", Report(3.0, 0, 0, frozenset("ab")), 0.0)
    conductor.cancelled("a", 0.5)
    assert queue(conductor, 0.5) == pytest.approx(1.5)
    conductor.first_token("b", 1.0)
    assert queue(conductor, 1.0) == 0.0


def test_report_corrects_decodes_and_what_it_does_not_know_comes_on_top() -> None:
    conductor = one_of_each()
    for name in ("a", "b"):
        conductor.assign(request(name, rest=1000), 0.0)
        conductor.first_token(name, 1.0)
    conductor.report("d0", Report(0.0, 1, 1050, frozenset("a")), 2.0)
    assert decoding(conductor) == (2, 2050, 2200)
    conductor.report("d0", Report(0.0, 2, 2100, frozenset("ab")), 3.0)
    assert decoding(conductor) == (2, 2100, 2200)
    conductor.finished("a", 4.0)
    assert decoding(conductor) == (1, 1100, 1100)
    conductor.finished("b", 4.0)
    assert decoding(conductor) == (0, 0, 0)


def test_requests_of_another_router_count() -> None:
    """Two routers side by side: each knows of the other's requests by reports."""
    conductor = cluster(instance("p0"), instance("d0", "decode", decode_tokens=3000), admission="none")
    conductor.report("p0", Report(7.0, 0, 0, frozenset("xy")), 0.0)
    conductor.report("d0", Report(0.0, 2, 2500, frozenset("xy")), 0.0)
    assert queue(conductor, 1.0) == pytest.approx(6.0)
    assert decoding(conductor) == (2, 2500, 2500)
    found = conductor.assign(request("a", rest=401), 0.0)
    assert isinstance(found, Rejection)
    assert found.bound == "memory"
    assert isinstance(conductor.assign(request("a", rest=400), 0.0), Assignment)


def test_request_that_another_router_has_placed_counts_where_it_is() -> None:
    """Neither a load nor an administrator's drain forbids it, and nothing is left of it."""
    conductor = one_of_each()
    conductor.drain("d0", 0.0)
    assert conductor.attach(request("a", rest=1000), "d0", 0.0).decode == "d0"
    with pytest.raises(ValueError, match="no open request"):
        conductor.attach(request("a", rest=1000), "d0", 0.0)
    with pytest.raises(ValueError, match="no instance 'd1'"):
        conductor.attach(request("b", rest=1000), "d1", 0.0)
    assert queue(conductor, 0.0) == 0.0
    assert conductor.prefilled("a", 1.0) is None
    assert decoding(conductor) == (1, 1000, 1100)
    conductor.finished("a", 2.0)
    assert decoding(conductor) == (0, 0, 0)


def test_slots_of_another_router_count() -> None:
    conductor = cluster(instance("p0"), instance("d0", "decode", max_running=2), admission="none")
    conductor.report("d0", Report(0.0, 2, 200, frozenset("xy")), 0.0)
    assert isinstance(conductor.assign(request("a"), 0.0), Rejection)


@pytest.mark.parametrize(
    "report",
    [
        Report(float("nan"), 0, 0),
        Report(float("inf"), 0, 0),
        Report(-1.0, 0, 0),
        Report(0.0, -1, 0),
        Report(0.0, 0, 1.5),  # type: ignore[arg-type]
        Report("1", 0, 0),  # type: ignore[arg-type]
        Report(0.0, 0, 0, None),  # type: ignore[arg-type]
    ],
)
def test_nonsense_in_a_report_changes_nothing(report: Report) -> None:
    conductor = one_of_each()
    conductor.assign(request("a"), 0.0)
    before = conductor.instances(0.0)
    with pytest.raises((TypeError, ValueError)):
        conductor.report("p0", report, 0.0)
    assert conductor.instances(0.0) == before


def test_memory_is_kept_from_the_end_of_prefill_on_where_the_load_is_judged() -> None:
    """With a rule of admission, what has no room any more when its prompt is computed is rejected there (3, step 4)."""
    parts = (instance("p0"), instance("d0", "decode", decode_tokens=2500))
    conductor = cluster(*parts, admission="baseline")
    for name in ("a", "b", "c"):
        assert isinstance(conductor.assign(request(name, rest=1000), 0.0), Assignment)
    assert conductor.prefilled("a", 1.0) is None
    assert conductor.prefilled("b", 2.0) is None
    rejected = conductor.prefilled("c", 3.0)
    assert isinstance(rejected, Rejection)
    assert (rejected.bound, rejected.stage) == ("memory", "decode")
    assert conductor.state.find("c") is None
    assert decoding(conductor, 3.0) == (2, 2000, 2200)
    assert queue(conductor, 3.0) == 0.0


def test_request_that_goes_on_after_a_failure_is_judged_by_memory_only() -> None:
    conductor = one_of_each(admission="early_rejection", ttft=0.5)
    assert isinstance(conductor.assign(request("a", rest=1000), 0.0), Rejection)
    found = conductor.assign(request("a", rest=1000), 0.0, generated=30)
    assert isinstance(found, Assignment)
    assert found.prefill_seconds == pytest.approx(1.03)
    assert conductor.prefilled("a", 2.0) is None
    assert decoding(conductor) == (1, 1030, 1100)


def test_rejected_requests_are_deferred_while_waiting_may_help() -> None:
    conductor = one_of_each(admission="early_rejection", ttft=1.5, defer_seconds=10.0)
    conductor.assign(request("a", rest=1000), 0.0)
    first = conductor.assign(request("b", rest=1000), 0.0)
    last = conductor.assign(request("b", rest=1000), 0.0, waited=9.99)
    assert isinstance(first, Rejection)
    assert isinstance(last, Rejection)
    assert first.is_deferred
    assert not last.is_deferred
