"""The shadow audit: what is kept of decisions, and what is counted of their runs."""

import pickle
from math import inf

import pytest
from conductor_parts import cluster, instance, request

from longctx.cluster.conductor.audit import Outcome, ShadowAudit
from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.decision import Assignment, Rejection
from longctx.cluster.conductor.snapshot import Snapshot


def watched(audit: ShadowAudit, **settings: object) -> Conductor:
    """One instance of each kind, two requests decode at a time."""
    parts = cluster(instance("p"), instance("d", "decode", max_running=2))
    conductor = Conductor(ConductorConfig(**{"ttft": 5.0, "tpot": 1.0} | settings), parts.index, observer=audit)  # type: ignore[arg-type]
    for each in parts.state.instances.values():
        conductor.join(each.spec, 0.0)
    return conductor


def taken(audit: ShadowAudit) -> list[Snapshot]:
    return list(iter(audit.take, None))


def test_a_snapshot_has_what_was_known_and_goes_to_another_process() -> None:
    audit = ShadowAudit(1.0, 0.0)
    conductor = watched(audit)
    conductor.assign(request("decodes", (0, 9)), 0.0)
    conductor.prefilled("decodes", 1.0)
    conductor.assign(request("reads", (1, 9), max_tokens=500), 1.0)
    for i in range(4):
        conductor.assign(request(f"waits-{i}", (2 + i, 9)), 1.0)
    assert isinstance(conductor.assign(request("late", (9, 9)), 1.5), Rejection)
    (found,) = taken(audit)
    assert pickle.loads(pickle.dumps(found)) == found
    assert [each.request_id for each in found.open] == ["decodes", "reads", *(f"waits-{i}" for i in range(4))]
    decodes, reads, waits = found.open[:3]
    # 0.5 s of a step of 2.095 ms; outputs are 256 tokens, or 100 if that is the limit.
    assert (decodes.generated, decodes.output_tokens, decodes.computed, decodes.decoded_for) == (99, 100, 950, 0.5)
    assert (reads.generated, reads.output_tokens, reads.computed, reads.waited) == (0, 256, 499, 0.5)
    assert (waits.computed, waits.prompt_tokens) == (0, 950)
    assert (found.is_admitted, found.task.request_id, found.task.ttft, found.task.tpot) == (False, "late", 5.0, 1.0)
    assert found.ttft == pytest.approx(0.45 + 5 * 0.95)
    assert [(each.spec.name, each.queue_seconds) for each in found.instances] == [
        ("p", pytest.approx(4.25)),
        ("d", 0.0),
    ]


def test_wrong_rejections_are_counted() -> None:
    audit = ShadowAudit(1.0, 0.0)
    conductor = watched(audit)
    for i in range(4):
        assert isinstance(conductor.assign(request(f"long-{i}", (i, 60)), 0.0), Rejection)
    outcomes = [Outcome(1.0, 0.1), Outcome(1.0, 0.1, others_broken=1), Outcome(6.0, 0.1), Outcome(inf, inf)]
    for snapshot, outcome in zip(taken(audit), outcomes, strict=True):
        audit.note(snapshot, outcome)
    totals = audit.totals
    assert (totals.rejections, totals.rejections_audited, totals.rejections_wrong) == (4, 4, 1)


def test_the_estimate_stands_for_all_rejections() -> None:
    audit = ShadowAudit(0.1, 0.0, seed=3, capacity=1000)
    conductor = watched(audit)
    for i in range(2000):
        conductor.assign(request(f"long-{i}", (i, 60)), 0.0)
    snapshots = taken(audit)
    assert 140 < len(snapshots) < 260
    for i, snapshot in enumerate(snapshots):
        audit.note(snapshot, Outcome(1.0, 0.1) if i % 4 == 0 else Outcome(9.0, 0.1))
    assert audit.totals.rejections == 2000
    assert audit.totals.rejections_wrong_estimate == pytest.approx(500, rel=0.05)


def test_the_sample_is_the_seed_s() -> None:
    def sample(seed: int) -> list[str]:
        audit = ShadowAudit(0.2, 0.0, seed, capacity=1000)
        conductor = watched(audit)
        for i in range(100):
            conductor.assign(request(f"long-{i}", (i, 60)), 0.0)
        return [each.task.request_id for each in taken(audit)]

    assert sample(1) == sample(1) != sample(2)


@pytest.mark.parametrize("runs_first", [True, False])
def test_admissions_are_compared_with_what_they_got(runs_first: bool) -> None:
    audit = ShadowAudit(0.0, 1.0)
    conductor = watched(audit, tpot=0.01)
    assert isinstance(conductor.assign(request("r", (0, 9)), 0.0), Assignment)
    (snapshot,) = taken(audit)
    if runs_first:
        audit.note(snapshot, Outcome(1.0, 0.002))
    conductor.prefilled("r", 1.5)
    conductor.finished("r", 3.5, 101)
    if not runs_first:
        audit.note(snapshot, Outcome(1.0, 0.002))
    totals = audit.totals
    assert (totals.admissions, totals.admissions_audited, totals.admissions_wrong) == (1, 1, 1)
    assert (totals.predicted_ttft, totals.simulated_ttft, totals.ttft) == (pytest.approx(0.95), 1.0, 1.5)
    assert (totals.predicted_tbt, totals.simulated_tbt, totals.tbt) == (pytest.approx(0.002095), 0.002, 0.02)


def test_a_rejection_at_decode_s_door_is_kept_with_its_prompt_computed() -> None:
    audit = ShadowAudit(1.0, 0.0)
    conductor = watched(audit, admission="baseline")
    for i in range(3):
        conductor.assign(request(f"r{i}", (i, 9)), 0.0)
    results = [conductor.prefilled(f"r{i}", float(i + 1)) for i in range(3)]
    assert [each is None for each in results] == [True, True, False]
    (snapshot,) = taken(audit)
    assert (snapshot.task.request_id, snapshot.task.generated, snapshot.task.waited) == ("r2", 1, 3.0)
    assert len(snapshot.open) == 2


def test_samples_for_which_there_is_no_time_are_dropped() -> None:
    audit = ShadowAudit(1.0, 1.0, capacity=2)
    conductor = watched(audit)
    conductor.assign(request("admitted", (9, 9)), 0.0)
    for i in range(4):
        conductor.assign(request(f"long-{i}", (i, 60)), 0.0)
    assert [each.task.request_id for each in taken(audit)] == ["long-2", "long-3"]
    assert audit.totals.dropped == 3


def test_deferred_requests_and_those_that_nobody_could_serve_are_not_audited() -> None:
    audit = ShadowAudit(1.0, 1.0)
    conductor = watched(audit, defer_seconds=60.0)
    for i in range(5):
        conductor.assign(request(f"r{i}", (i, 9)), 0.0)
    taken(audit)
    late = conductor.assign(request("late", (9, 9)), 0.0)
    assert isinstance(late, Rejection)
    assert late.is_deferred
    conductor.drain("p", 0.0)
    assert isinstance(conductor.assign(request("nobody", (9, 9)), 0.0), Rejection)
    assert taken(audit) == []
    assert (audit.totals.admissions, audit.totals.rejections) == (5, 0)


@pytest.mark.parametrize(("name", "value"), [("rejections", 1.1), ("admissions", -0.1), ("capacity", 0), ("seed", -1)])
def test_arguments_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        ShadowAudit(**{name: value})  # type: ignore[arg-type]


def test_a_request_that_is_assigned_anew_is_compared_with_its_new_prediction_only() -> None:
    audit = ShadowAudit(0.0, 1.0)
    conductor = watched(audit)
    conductor.join(instance("d2", "decode"), 0.0)
    first = conductor.assign(request("r", (0, 9)), 0.0)
    assert isinstance(first, Assignment)
    (old,) = taken(audit)
    assert conductor.remove(first.decode, 0.5) == ["r"]
    conductor.assign(request("r", (0, 9)), 0.5)
    (new,) = taken(audit)
    audit.note(old, Outcome(7.0, 0.7))
    conductor.prefilled("r", 1.5)
    conductor.finished("r", 3.5, 101)
    assert audit.totals.admissions_audited == 0
    audit.note(new, Outcome(1.0, 0.002))
    assert (audit.totals.admissions_audited, audit.totals.simulated_ttft, audit.totals.ttft) == (1, 1.0, 1.0)


def test_an_admission_whose_new_assignment_is_not_sampled_is_compared_with_nothing() -> None:
    audit = ShadowAudit(0.0, 1.0)
    conductor = watched(audit)
    conductor.join(instance("d2", "decode"), 0.0)
    first = conductor.assign(request("r", (0, 9)), 0.0)
    assert isinstance(first, Assignment)
    (old,) = taken(audit)
    audit.note(old, Outcome(1.0, 0.002))
    conductor.remove(first.decode, 0.5)
    audit._admissions = 0.0  # from now on
    conductor.assign(request("r", (0, 9)), 0.5)
    conductor.prefilled("r", 1.5)
    conductor.finished("r", 3.5, 101)
    assert audit.totals.admissions_audited == 0
