"""Instances that die, come back, drain and change roles: every request ends once, with all its tokens."""

import dataclasses

import numpy as np
import pytest
from cluster_cases import check_each_once, coupled, decode, prefill, serve, two_and_two, workload

from longctx.cluster.conductor.config import RoleConfig
from longctx.simulation.cluster import Change, ClusterSettings
from longctx.simulation.workloads import WorkloadRequest


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_requests_of_a_dead_instance_are_served_by_others(name: str) -> None:
    requests = workload(80, rate=20.0)
    record = serve(two_and_two(), requests, [Change(3.0, name, "kill")])
    check_each_once(record, requests)
    assert not [each for each in record.rejected if each.due < 3.0]
    assert record.num_reassigned > 0
    assert any(each.num_assigned == 2 for each in record.placed)
    for served, placed in zip(record.served, record.placed, strict=True):
        if served.metrics.finished > 3.0:
            assert placed.assignment.decode != name
            if served.metrics.first_token > 3.0:
                assert placed.assignment.prefill != name


def test_tokens_that_were_made_are_not_made_again() -> None:
    # It dies in the midst of an answer: the other one reads prompt and answer, and goes on.
    request = WorkloadRequest(0.0, 1000, 400, number=0)
    whole = serve([coupled("a"), coupled("b")], [request])
    at = whole.served[0].metrics.finished / 2
    broken = serve([coupled("a"), coupled("b")], [request], [Change(at, "a", "kill")])
    (served,), (placed,) = broken.served, broken.placed
    assert served.instance == "b"
    assert served.metrics.output_tokens == 400
    assert served.ttft == whole.served[0].ttft
    computed = {each.name: each.totals.rows for each in broken.instances}
    had = computed["a"] - 1000  # rows of decodes: a token each, after the first
    assert 100 < had < 300
    assert abs(computed["a"] + computed["b"] - (1000 + had) - (1000 + 399)) <= 2
    assert served.metrics.longest_gap > whole.served[0].metrics.longest_gap
    assert placed.num_assigned == 2


def test_a_dead_sender_leaves_the_prefix_to_be_computed() -> None:
    blocks = tuple(range(200))
    first = WorkloadRequest(0.0, 200 * 64, 2, blocks, 64, 0)
    hold = [WorkloadRequest(8.0, 6000, 2, number=1)]
    again = WorkloadRequest(8.01, 200 * 64, 2, blocks, 64, 2)
    # 200 pages of 8 MB over 100 MB/s: the transfer is on its way when its sender dies.
    instances = [prefill("p0", bandwidth=1e8), prefill("p1", bandwidth=1e8), decode("d")]
    policy = _fetch_from_p0
    record = serve(instances, [first, *hold, again], [Change(9.0, "p0", "kill")], policy=policy)
    served = {each.number: each for each in record.served}
    assert sorted(served) == [0, 1, 2]
    assert served[2].metrics.cached_tokens == 0
    assert not [each for each in record.moved if each.kind == "prefix"]


def _fetch_from_p0(request, matches, pool, now, context):  # type: ignore[no-untyped-def]
    """The first request goes to p0; those after it to p1, which fetches what p0 has."""
    from longctx.cluster.conductor.policy import Choice
    from longctx.cluster.conductor.request import Transfer

    found = matches.get("p0", 0) * context.block_size
    if not found or len(pool) == 1:
        return Choice(pool[0].name, 0, None, 0.0, 0.0, 1.0)
    return Choice("p1", found, Transfer("p0", 0, found), 0.0, 1.0, 1.0)


def test_an_instance_that_comes_back_has_lost_its_cache() -> None:
    blocks = tuple(range(20))
    requests = [WorkloadRequest(at, 20 * 64, 2, blocks, 64, i) for i, at in enumerate([0.0, 5.0, 10.0])]
    changes = [Change(6.0, "p", "kill"), Change(7.0, "p", "join")]
    record = serve([prefill("p"), decode("d")], requests, changes)
    assert [each.metrics.cached_tokens for each in record.served] == [0, 19 * 64, 0]
    assert [each.name for each in record.instances] == ["p", "p", "d"]


def test_requests_wait_for_the_last_instance_to_come_back() -> None:
    requests = workload(20, rate=10.0)
    changes = [Change(1.0, "d", "kill"), Change(6.0, "d", "join")]
    record = serve([prefill("p"), decode("d")], requests, changes)
    check_each_once(record, requests)
    admitted = [each for each in requests if each.arrival < 1.0]
    served = {each.number for each in record.served}
    assert {each.number for each in admitted} <= served  # what came while nobody was there is rejected
    assert {each.bound for each in record.rejected} == {"no_instance"}


def test_what_is_left_when_nobody_comes_back_is_open() -> None:
    requests = workload(20, rate=10.0)
    record = serve([prefill("p"), decode("d")], requests, [Change(1.0, "d", "kill")])
    check_each_once(record, requests)
    assert record.open
    assert record.rejected


def test_a_drained_instance_ends_what_it_has_and_gets_nothing() -> None:
    requests = workload(60, rate=10.0)
    record = serve(two_and_two(), requests, [Change(2.0, "p0", "drain"), Change(4.0, "p0", "restore")])
    assert len(record.served) == len(requests)
    assert not record.num_reassigned
    used = {each.number: placed.assignment.prefill for each, placed in zip(record.served, record.placed, strict=True)}
    came = {each.number: each.arrival for each in requests}
    between = {name for number, name in used.items() if 2.0 < came[number] < 4.0}
    assert between == {"p1"}
    assert "p0" in {name for number, name in used.items() if came[number] > 4.0}


def test_roles_change_while_requests_are_served() -> None:
    any_role = [prefill("a"), prefill("b"), prefill("c")]
    changes = [Change(0.0, "c", "decode"), Change(3.0, "b", "decode"), Change(6.0, "c", "prefill")]
    requests = workload(90, rate=10.0)
    record = serve(any_role, requests, changes)
    check_each_once(record, requests)
    pairs = {}
    for served, placed in zip(record.served, record.placed, strict=True):
        pairs[served.number] = placed.assignment.prefill, placed.assignment.decode
    came = {each.number: each.arrival for each in requests}
    assert {pairs[n] for n in pairs if 3.0 < came[n] < 6.0} <= {("a", "c"), ("a", "b")}
    assert {pairs[n] for n in pairs if came[n] > 6.0} <= {("a", "b"), ("c", "b")}


def test_roles_change_by_load() -> None:
    # Long prompts and short answers: one of the two decoding instances is of more use as a prefill instance.
    any_role = [prefill("a"), *(dataclasses.replace(prefill(name), role="decode") for name in "bc")]
    rng = np.random.default_rng(0)
    requests = [WorkloadRequest(0.15 * i, int(rng.integers(2000, 3000)), 3, number=i) for i in range(200)]
    rule = RoleConfig(seconds=3.0, cool_down=5.0)
    still, moving = (serve(any_role, requests, roles=roles, ttft=1.0) for roles in (None, rule))
    assert not still.roles
    first = moving.roles[0]
    assert (first.instance in "bc", first.role) == (True, "prefill")
    assert np.mean([each.ttft for each in moving.served]) < np.mean([each.ttft for each in still.served])
    check_each_once(moving, requests)


def test_changes_are_checked() -> None:
    with pytest.raises(ValueError, match="must name instances"):
        serve(two_and_two(), workload(1), [Change(0.0, "x", "kill")])
    with pytest.raises(ValueError, match="action"):
        Change(0.0, "p0", "explode")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at must be"):
        Change(-1.0, "p0", "kill")
    with pytest.raises(TypeError, match="at must be"):
        Change("1", "p0", "kill")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="report_seconds"):
        ClusterSettings(report_seconds=0.0)
