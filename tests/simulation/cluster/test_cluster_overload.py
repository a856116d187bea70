"""Overload in simulated clusters: what is rejected where, what is deferred, and who comes first."""

from collections import Counter

import pytest
from cluster_cases import check_each_once, decode, prefill, serve, workload

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.simulation import Record, Simulation
from longctx.simulation.cluster import ClusterInstance
from longctx.simulation.workloads import WorkloadRequest

TPOT = 0.0165  # seconds, that a batch of a few decodes keeps


def cluster() -> list[ClusterInstance]:
    return [prefill("p0"), prefill("p1"), decode("d", config={"max_running": 64, "num_pages": 3000})]


def crowd() -> list[WorkloadRequest]:
    """Prompts that come faster than their answers end."""
    return [WorkloadRequest(0.1 * i, 1500, 150, number=i) for i in range(60)]


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    """Of each rule of admission, of the same requests."""
    rules = ("none", "baseline", "early_rejection", "predicted_early_rejection")
    return {rule: serve(cluster(), crowd(), admission=rule, tpot=TPOT, decode_seconds=2.0) for rule in rules}


def test_early_rejection_rejects_before_prefill_what_the_baseline_rejects_after_it(
    records: dict[str, Record],
) -> None:
    stages = {rule: Counter(each.stage for each in record.rejected) for rule, record in records.items()}
    assert not stages["none"]
    assert stages["baseline"]["decode"] > 0
    for rule in ("early_rejection", "predicted_early_rejection"):
        assert stages[rule]["prefill"] > stages["baseline"]["prefill"]
        assert stages[rule]["decode"] < stages["baseline"]["decode"]


def test_prompts_that_are_rejected_before_decode_were_read_in_vain(records: dict[str, Record]) -> None:
    for record in records.values():
        check_each_once(record, crowd())
        read = sum(each.totals.rows for each in record.instances if each.name != "d")
        wasted = sum(each.stage == "decode" for each in record.rejected)
        assert read == 1500 * (len(record.served) + wasted)


def test_loads_are_of_both_pools(records: dict[str, Record]) -> None:
    crowded, kept = records["none"], records["early_rejection"]
    assert max(each.decode for each in crowded.loads) > max(each.decode for each in kept.loads)
    times = [each.at for each in crowded.loads]
    assert times == [float(i) for i in range(len(times))]
    assert max(each.prefill for each in crowded.loads) > 0


def test_goodput_counts_those_that_completed_in_time(records: dict[str, Record]) -> None:
    crowded = records["none"]
    good = crowded.goodput(30.0, TPOT)
    assert 0 < len(good) < len(crowded.served)
    assert all(each.tpot is not None and each.tpot <= TPOT for each in good)
    assert {id(each) for each in good} <= {id(each) for each in crowded.served}


def test_a_deferred_request_is_served_later() -> None:
    told = serve(cluster(), crowd(), admission="early_rejection", tpot=TPOT)
    kept = serve(cluster(), crowd(), admission="early_rejection", tpot=TPOT, defer_seconds=20.0)
    check_each_once(kept, crowd())
    assert kept.num_deferred > 0
    assert len(kept.rejected) < len(told.rejected)
    late = [each for each in kept.served if each.metrics.admitted is not None and each.metrics.admitted > each.due + 1]
    assert late


def test_urgent_requests_are_accepted_where_others_are_not() -> None:
    requests = workload(120, rate=30.0)
    simulation = Simulation(cluster(), Conductor(ConductorConfig(ttft=0.3, priority_step=0.5), PrefixIndex()))
    record = simulation.run(requests, priority=lambda request: request.number % 2)
    assert record.rejected
    assert not [each for each in record.rejected if each.number % 2]
