"""The calibrated predictor: what its terms add up to, and all-reduces over several hosts."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.parallel import Topology
from longctx.parallel.device_tables import PRESETS
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor import CurvePredictor, Work
from longctx.simulation.hardware import all_reduce_over_hosts, predictor
from longctx.simulation.models import MODELS
from longctx.simulation.utilization import mbu, mfu

LLAMA = MODELS["llama-3-8b"]


@given(
    overlap=st.floats(0, 1),
    per_key=st.floats(1e-9, 1e-5),
    start=st.integers(0, 10**6),
    length=st.integers(1, 50_000),
    chunk=st.integers(1, 512),
)
def test_prefill_seconds_equal_the_sum_of_steps_that_overlap(
    overlap: float, per_key: float, start: int, length: int, chunk: int
) -> None:
    curve = CurvePredictor((1, 512), (1e-3, 2e-3), 3e-8, per_key, 1e-4, overlap=overlap)
    stop = start + length
    steps = [Work().with_chunk(at, min(chunk, stop - at), at + chunk >= stop) for at in range(start, stop, chunk)]
    assert curve.prefill_seconds(start, stop, chunk) == pytest.approx(sum(map(curve.seconds, steps)), rel=1e-9)


@pytest.mark.parametrize("name", [*PRESETS])
def test_utilisation_is_never_above_one(name: str) -> None:
    """Whatever the batch, the predictor's seconds are no less than those of the data sheet."""
    topology = Topology.preset(name)
    for plan in (ParallelPlan(), ParallelPlan(tensor=8), ParallelPlan(stage=4, tensor=2)):
        for model in ("llama-3-8b", "llama-3-405b-fp8"):
            found = predictor(MODELS[model], topology, plan)
            for work in (
                Work(1, 1, 1),
                Work(1, 1, 10**7),
                Work(200, 200, 2 * 10**8),
                Work.of([(0, 4096, True)]),
                Work.of([(10**6, 2048, False)]),
                Work.of([(10**6, 8, False)]),
            ):
                seconds = plan.stage * found.seconds(work)
                config, device = MODELS[model], topology.device
                assert 0 < mfu(config, work, device, plan.num_devices, seconds) <= 1
                assert 0 < mbu(config, work, device, plan, seconds) <= 1


def test_an_all_reduce_over_hosts_takes_longer_the_more_there_are() -> None:
    """Hop latencies of the network add up as those of a tree: 2 log2(hosts) of 19 us each at least."""
    topology = Topology.preset("meta-gtt")
    wider = [topology, *(all_reduce_over_hosts(topology, hosts) for hosts in (2, 4, 8))]
    seconds = [each.hardware("tensor").collective(1e9) for each in wider]
    assert seconds == sorted(set(seconds))
    wide = predictor(MODELS["llama-3-405b"], topology, ParallelPlan(tensor=16))
    assert wide.seconds(Work(1)) > 126 * 2 * 2 * 19e-6


def test_plans_that_do_not_suit_are_refused() -> None:
    twelve = dataclasses.replace(LLAMA, num_heads=24, num_kv_heads=12, intermediate_size=12_288)
    with pytest.raises(ValueError, match="plan's tensor must divide the model's 32 query heads"):
        predictor(LLAMA, "h100-rdma", ParallelPlan(tensor=24))
    with pytest.raises(ValueError, match="plan's tensor must be a multiple of a host's 8 GPUs, got 12"):
        predictor(twelve, "h100-rdma", ParallelPlan(tensor=12))
    with pytest.raises(ValueError, match="topology must be one of"):
        predictor(LLAMA, "h99")
