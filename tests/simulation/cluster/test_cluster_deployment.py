"""Clusters of one model on the devices of a plan: what their instances are, and what they refuse."""

from typing import Any

import pytest

from longctx.cluster.conductor.config import ConductorConfig
from longctx.parallel.topology import Topology
from longctx.serving import ParallelPlan
from longctx.simulation.cluster import ClusterSettings
from longctx.simulation.deployment import ClusterDeployment
from longctx.simulation.models import MODELS
from longctx.simulation.workloads import WorkloadRequest

A800 = Topology.preset("a100-800g")


def deploy(**options: Any) -> ClusterDeployment:
    return ClusterDeployment(MODELS["llama-2-70b"], A800, options.pop("plan", ParallelPlan(tensor=8)), **options)


def test_prefill_instances_keep_prefixes_and_decode_instances_do_not() -> None:
    made = deploy(prefill=2, decode=1, coupled=1, chunk=1024, max_running=100, host_bytes=10**11)
    p0, p1, decode, coupled = made.instances()
    assert [each.name for each in made.instances()] == ["prefill-0", "prefill-1", "decode-0", "coupled-0"]
    assert [each.role for each in made.instances()] == ["prefill", "prefill", "decode", "both"]
    assert p0.config == p1.config
    assert (p0.config.prefix_cache, decode.config.prefix_cache, coupled.config.prefix_cache) == (True, False, True)
    assert p0.host_pages == 10**11 // (512 * 327_680)
    assert decode.host_pages == coupled.host_pages == 0
    assert made.num_devices == 32


def test_instances_with_any_role_are_made_alike() -> None:
    prefill, decode = deploy(prefill=1, decode=1, roles_change=True).instances()
    assert prefill.config == decode.config
    assert decode.config.tiers is not None


def test_who_is_never_rejected_waits() -> None:
    def patient(**config: Any) -> list[bool]:
        made = deploy(prefill=1, decode=1, coupled=1, config=ConductorConfig(**config))
        return [each.is_patient for each in made.instances() if each.role != "prefill"]

    assert patient(admission="none") == [True, True]
    assert patient(admission="early_rejection") == [False, True]


def test_prompts_of_coupled_instances_are_read_whole_or_in_chunks() -> None:
    long, short = WorkloadRequest(0.5, 60_000, 2, number=1), WorkloadRequest(0.0, 100, 200, number=0)
    gaps = []
    for chunk in (1 << 20, 512):
        config = ConductorConfig(admission="none")
        record = deploy(coupled=1, coupled_chunk=chunk, config=config).simulation().run([short, long])
        gaps.append({each.number: each.metrics.longest_gap for each in record.served}[0])
    assert gaps[0] > 10 * gaps[1]


def test_runs_take_settings() -> None:
    request = WorkloadRequest(0.0, 50_000, 2)
    waited = []
    for overlap in ("layer", "end"):
        made = deploy(prefill=1, decode=1, settings=ClusterSettings(overlap=overlap), bandwidth=1e10)  # type: ignore[arg-type]
        (moved,) = made.simulation().run([request]).moved
        waited.append(moved.exposed)
    assert waited[1] == pytest.approx(50_000 * 327_680 / 1e10)
    assert waited[0] < waited[1] / 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": 2}, "prefill and decode must both be at least 1"),
        ({"prefill": 1, "decode": 1, "names": ("a",)}, "names must be of all 2 instances"),
        ({"coupled": 1, "page_size": 0}, "page_size"),
        ({"coupled": -1}, "coupled"),
        ({"coupled": 1, "plan": ParallelPlan(tensor=3)}, "tensor"),
    ],
)
def test_what_cannot_be_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deploy(**options)
