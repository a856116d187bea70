"""Any course of events under any admission rule: loads stay loads, rejections say why and leave no trace."""

from math import inf, isnan

import pytest
from conductor_parts import cluster, instance, request
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ADMISSIONS
from longctx.cluster.conductor.instance import Report
from longctx.cluster.conductor.request import Assignment, Rejection

_REPORT_NUMBERS = st.sampled_from([0, 1, 3, 500, 10**9, -1, 0.5, inf, -inf, float("nan"), True, "1", None])
_EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("assign"),
            st.integers(1, 30),
            st.sampled_from([None, 0.5, 3.0]),
            st.sampled_from([-5, 0, 1, 10**12]),
        ),
        st.tuples(st.sampled_from(["prefilled", "finished", "cancelled"]), st.integers(0, 9)),
        st.tuples(st.just("report"), st.sampled_from("pd"), _REPORT_NUMBERS, _REPORT_NUMBERS, _REPORT_NUMBERS),
        st.tuples(
            st.just("role"), st.sampled_from(["p", "q", "d", "e"]), st.sampled_from(["prefill", "decode", "both"])
        ),
        st.tuples(st.just("remove"), st.sampled_from(["q", "e"])),
    ),
    max_size=40,
)


def _state(conductor: Conductor, now: float) -> tuple[object, ...]:
    return (
        conductor.instances(now),
        conductor.loads(now),
        list(conductor.state.prefilling),
        list(conductor.state.decoding),
    )


@given(_EVENTS, st.sampled_from(ADMISSIONS), st.sampled_from([None, 2.0]))
@settings(max_examples=60, deadline=None)
def test_any_course_of_events(events: list[tuple], admission: str, decode_seconds: float | None) -> None:
    conductor = cluster(
        instance("p"), instance("q"), instance("d", "decode", max_running=3), instance("e", "decode", max_running=3),
        admission=admission, ttft=4.0, tpot=0.004, decode_seconds=decode_seconds, defer_seconds=1.0,
    )  # fmt: skip
    open_ids: list[str] = []
    for number, (kind, *args) in enumerate(events):
        now, name = number * 0.4, f"r{number}"
        before = _state(conductor, now)
        if kind == "assign":
            blocks, slo, priority = args
            decision = conductor.assign(request(name, (number, blocks), ttft=slo, priority=priority), now)
            if isinstance(decision, Assignment):
                open_ids.append(name)
            else:
                _check(decision, conductor, priority, slo or 4.0)
                assert _state(conductor, now) == before
        elif kind == "report":
            _report(conductor, now, *args)
        elif kind == "role":
            if args[0] in conductor.state.instances:
                conductor.set_role(*args, now)
        elif kind == "remove":
            if args[0] in conductor.state.instances:
                gone = conductor.remove(args[0], now)
                open_ids = [each for each in open_ids if each not in gone]
        elif open_ids:
            chosen = open_ids[args[0] % len(open_ids)]
            if kind == "prefilled":
                has_ended = conductor.prefilled(chosen, now) is not None
            else:
                has_ended = True
                conductor.finished(chosen, now) if kind == "finished" else conductor.cancelled(chosen, now)
            if has_ended:
                open_ids.remove(chosen)
        loads = conductor.loads(now)
        assert min(loads) >= 0
        assert not any(isnan(each) for each in loads)


def _check(rejection: Rejection, conductor: Conductor, priority: int, ttft: float) -> None:
    """What a rejection says is true."""
    assert rejection.retry_after > 0
    assert rejection.is_deferred == (rejection.retry_after <= 1.0)
    if rejection.bound not in ("no_instance", "memory") or rejection.load < inf:
        assert conductor.config.admission != "none"
        assert rejection.load > min(2.0, max(0.5, 1.0 + 0.1 * priority))
    if rejection.bound == "ttft":
        assert rejection.load == pytest.approx(rejection.ttft / ttft)


def _report(conductor: Conductor, now: float, name: str, *figures: object) -> None:
    """Nonsense is refused, and changes nothing."""
    queue, decoding, tokens = figures
    counts = all(type(each) is int and each >= 0 for each in (decoding, tokens))
    is_fine = counts and type(queue) in (int, float) and 0 <= queue < inf  # type: ignore[operator]
    report, before = Report(*figures, known=frozenset()), _state(conductor, now)  # type: ignore[arg-type]
    if is_fine:
        conductor.report(name, report, now)
    else:
        with pytest.raises((TypeError, ValueError), match="must be"):
            conductor.report(name, report, now)
        assert _state(conductor, now) == before
