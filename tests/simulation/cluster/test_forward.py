"""Snapshots run forward: as the simulated cluster itself goes on, and what a request does to others."""

import functools
import pickle
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from longctx.cluster.audit_process import AuditProcess
from longctx.cluster.conductor.audit import Forward, Outcome, ShadowAudit
from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.costs import PredictorCosts
from longctx.cluster.conductor.decision import Assignment, Rejection
from longctx.cluster.conductor.request import ClusterRequest
from longctx.cluster.conductor.snapshot import OpenTask, Snapshot
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.models.config import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving.parallel_plan import ParallelPlan
from longctx.simulation.cluster import ClusterDeployment
from longctx.simulation.cluster.cluster_simulation import ClusterSimulation
from longctx.simulation.cluster.forward import ClusterForward, ServedForward
from longctx.simulation.models import MODELS
from longctx.simulation.workloads import Lengths, WorkloadRequest, arrive_at_rate, synthesize

MODEL: LlamaConfig = MODELS["llama-3-8b"]
CONFIG = ConductorConfig(admission="early_rejection", ttft=2.0, tpot=0.02)
CLUSTER = ClusterDeployment(
    MODEL,
    Topology.preset("a100-800g"),
    ParallelPlan(),
    prefill=1,
    decode=1,
    config=CONFIG,
    host_bytes=0,
    max_running=32,
)
IDLE = OpenTask("task", "prefill-0", "decode-0", 4000, 0, 100, 0, 0.0, 0.0, 0.0, 2.0, 0.02)


def snapshot(task: OpenTask = IDLE, *open_tasks: OpenTask) -> Snapshot:
    return Snapshot(False, task, 0.0, 0.0, (), open_tasks)


@pytest.fixture(scope="module")
def forward() -> ClusterForward:
    return ClusterForward(CLUSTER.instances())


def test_an_idle_cluster_serves_as_simulated(forward: ClusterForward) -> None:
    (served,) = CLUSTER.run([WorkloadRequest(0.0, IDLE.prompt_tokens, IDLE.output_tokens)]).served
    found = forward(snapshot())
    assert served.ttft is not None
    assert served.tpot is not None
    assert found.ttft == pytest.approx(served.ttft, abs=1e-5)
    assert found.tbt == pytest.approx(served.tpot, rel=0.02)  # pages move in no time here
    assert found.others_broken == 0


def test_prompts_before_it_are_computed_before(forward: ClusterForward) -> None:
    alone = forward(snapshot()).ttft
    before = IDLE._replace(request_id="before", prompt_tokens=16_000, waited=0.5)
    behind = forward(snapshot(IDLE, before)).ttft
    half = forward(snapshot(IDLE, before._replace(computed=8_000))).ttft
    assert alone < half < behind
    assert behind == pytest.approx(alone + forward(snapshot(before)).ttft - 0.5, rel=0.05)
    # What it waited for before counts, and so does what it still waits for.
    assert forward(snapshot(IDLE._replace(waited=3.0))).ttft == pytest.approx(3.0 + alone)
    assert forward(snapshot(IDLE._replace(ready_in=1.0))).ttft == pytest.approx(1.0 + alone)
    assert forward(snapshot(IDLE._replace(computed=3_999))).ttft < alone / 2


def test_an_answer_at_decode_s_door_is_only_decoded(forward: ClusterForward) -> None:
    found = forward(snapshot(IDLE._replace(generated=1, computed=4000, waited=1.5, decoded_for=0.0)))
    assert found.ttft == 1.5
    assert found.tbt == pytest.approx(forward(snapshot()).tbt, rel=0.02)


def test_a_request_that_slows_others_down_too_much_breaks_them(forward: ClusterForward) -> None:
    others = [
        IDLE._replace(request_id=f"r{i}", generated=1, computed=4000, waited=1.0, output_tokens=200) for i in range(20)
    ]
    beside = forward(snapshot(others[0], *others[1:])).tbt
    with_it = forward(
        snapshot(others[0], *others[1:], IDLE._replace(generated=1, computed=4000, output_tokens=200))
    ).tbt
    assert beside < with_it
    strict = [each._replace(tpot=(beside + with_it) / 2) for each in others]
    task = IDLE._replace(generated=1, computed=4000, output_tokens=200)
    assert forward(snapshot(task, *others)).others_broken == 0
    assert forward(snapshot(task, *strict)).others_broken == len(strict)


def test_a_coupled_instance_reads_and_writes() -> None:
    coupled = replace(CLUSTER, prefill=0, decode=0, coupled=1, coupled_chunk=4096)
    task = IDLE._replace(prefill="coupled-0", decode="coupled-0")
    (served,) = coupled.run([WorkloadRequest(0.0, 4000, 100)]).served
    found = ClusterForward(coupled.instances())(snapshot(task))
    assert found.ttft == pytest.approx(served.ttft, abs=1e-5)
    assert found.tbt == pytest.approx(served.tpot)


def test_an_instance_that_is_not_there_is_named(forward: ClusterForward) -> None:
    with pytest.raises(ValueError, match="snapshot must have instances of"):
        forward(snapshot(IDLE._replace(prefill="gone")))


def audited(config: ConductorConfig, rate: float, count: int) -> tuple[ShadowAudit, ClusterForward]:
    """A run of the simulated cluster, observed."""
    audit = ShadowAudit(1.0, 1.0, capacity=10_000)
    requests = arrive_at_rate(synthesize(count, Lengths(1_000, 8_000), Lengths(20, 200)), rate)
    ClusterSimulation(CLUSTER.instances(), config, observer=audit).run(requests)
    return audit, ClusterForward(CLUSTER.instances())


def test_predictions_of_a_whole_run_are_near_what_requests_got() -> None:
    audit, forward = audited(CONFIG, rate=2.0, count=40)
    for each in iter(audit.take, None):
        audit.note(each, forward(each))
    totals = audit.totals
    assert totals.admissions_audited == totals.admissions > 20
    assert totals.simulated_ttft == pytest.approx(totals.ttft, rel=0.3)  # without who comes later
    assert totals.simulated_tbt == pytest.approx(totals.tbt, rel=0.1)


def test_a_rule_that_rejects_too_much_is_found_out() -> None:
    strict = replace(CONFIG, load_limit=0.1)
    audit, forward = audited(strict, rate=4.0, count=40)
    for each in iter(audit.take, None):
        audit.note(each, forward(each))
    totals = audit.totals
    assert totals.rejections_audited == totals.rejections > 10
    assert totals.rejections_wrong > 0.9 * totals.rejections
    assert totals.rejections_wrong_estimate == totals.rejections_wrong


def busy_conductor(audit: ShadowAudit) -> Conductor:
    """A conductor of the cluster's instances, which has admitted one request and rejected one."""
    conductor = Conductor(CONFIG, PrefixIndex(), audit)
    for each in CLUSTER.instances():
        conductor.join(each.spec(PredictorCosts.of_model(each.predictor, MODEL, 8192), each.role, False), 0.0)
    none = np.empty(0, np.uint64)
    assert isinstance(conductor.assign(ClusterRequest("a", 8_000, 100, none), 0.0), Assignment)
    assert isinstance(conductor.assign(ClusterRequest("b", 30_000, 100, none), 0.0), Rejection)
    return conductor


def test_instances_that_serve_are_simulated_as_they_say() -> None:
    audit = ShadowAudit(1.0, 1.0)
    busy_conductor(audit)
    admitted, rejected = pickle.loads(pickle.dumps(list(iter(audit.take, None))))
    served = ServedForward(MODEL, CLUSTER.instances()[0].config)
    assert served(admitted).ttft == pytest.approx(ClusterForward(CLUSTER.instances())(admitted).ttft)
    assert served(rejected).ttft > 2.0


def _make_nothing() -> Forward:
    return lambda snapshot: Outcome(1.0, 0.01)


def _make_failing() -> Callable[[Snapshot], Outcome]:
    def fail(snapshot: Snapshot) -> Outcome:
        raise ValueError(f"no {snapshot.task.request_id}")

    return fail


@pytest.mark.parametrize(
    "make", [functools.partial(ServedForward, MODEL, CLUSTER.instances()[0].config), _make_failing]
)
def test_a_process_runs_samples(make: Callable[[], Forward], caplog: pytest.LogCaptureFixture) -> None:
    audit = ShadowAudit(1.0, 0.0)
    busy_conductor(audit)
    process = AuditProcess(audit, make)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (audit.totals.rejections_audited or caplog.records):
            time.sleep(0.02)
    finally:
        process.close()
    if make is _make_failing:
        assert "no b" in caplog.text
    else:
        assert (audit.totals.rejections_audited, audit.totals.rejections_wrong) == (1, 0)
