"""The calibrated predictor: what its terms add up to, and all-reduces over several hosts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.parallel import Topology
from longctx.parallel.device_tables import PRESETS
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor import CurvePredictor, Work
from longctx.simulation.hardware import MOST_ROWS, all_reduce_over_hosts, predictor, saturating_rows
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


@pytest.mark.parametrize("name", ["meta-gtt", "a100-800g"])
def test_an_all_reduce_over_hosts_takes_as_long_as_its_slower_level(name: str) -> None:
    """Hop latencies of the network add up as those of a tree, and both levels send at the same time."""
    topology = Topology.preset(name)
    inner, outer = topology.link("tensor"), topology.link("context")
    hop, network = outer.reduce_latency or outer.latency, topology.hardware("context").collective(1, count=0)
    llama, rows = MODELS["llama-3-405b"], 1 << 16
    for hosts, hops in ((2, 2), (4, 4), (8, 6)):
        wider = all_reduce_over_hosts(topology, hosts)
        many = 2.0**30
        across = 2 * (hosts - 1) / hosts / 8 * many * network
        if inner.reduce_table is None:
            sent = 2 * (8 * hosts - 1) / (8 * hosts) * many
            found = wider.hardware("tensor").collective(sent)
            within = topology.hardware("tensor").collective(2 * 7 / 8 * many)
            latency = topology.hardware("tensor").collective(0)
            assert found == pytest.approx(max(within, across + latency) + hops * hop)
        else:
            table = wider.link("tensor").reduce_table
            assert table is not None
            for size in (256, 2**20, many):
                found, within = table.reduce(size, 8 * hosts), inner.reduce_table.reduce(size, 8)
                assert found == pytest.approx(max(within, across * size / many) + hops * hop)
            assert found < within + across
        plan = ParallelPlan(tensor=8 * hosts)
        seconds = predictor(llama, topology, plan, max_rows=rows).seconds(Work(rows))
        assert seconds > 126 * 2 * (2 * (hosts - 1) / hosts / 8 * rows * 16384 * 2 * network + hops * hop)


def test_plans_that_do_not_suit_are_refused() -> None:
    twelve = dataclasses.replace(LLAMA, num_heads=24, num_kv_heads=12, intermediate_size=12_288)
    with pytest.raises(ValueError, match="plan's tensor must divide the model's 32 query heads"):
        predictor(LLAMA, "h100-rdma", ParallelPlan(tensor=24))
    with pytest.raises(ValueError, match="plan's tensor must be a multiple of a host's 8 GPUs, got 12"):
        predictor(twelve, "h100-rdma", ParallelPlan(tensor=12))
    with pytest.raises(ValueError, match="topology must be one of"):
        predictor(LLAMA, "h99")


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b"])
@pytest.mark.parametrize("name", ["h100-rdma", "medha-a100", "meta-gtt"])
def test_the_smallest_step_that_saturates_the_devices(name: str, model: str, tensor: int) -> None:
    """Half as many rows are fewer a second by more than a tenth of the most, and no step has many more."""
    plan, topology = ParallelPlan(tensor=tensor), Topology.preset(name)
    rows = saturating_rows(MODELS[model], topology, plan)
    steps = predictor(MODELS[model], topology, plan, max_rows=MOST_ROWS)
    linear = np.interp(sizes := 2 ** np.arange(15), steps.rows, steps.linear)
    most = (sizes / linear).max()
    rate = dict(zip(sizes.tolist(), sizes / linear, strict=True))
    assert rate[rows] >= 0.9 * most
    assert all(found < 0.9 * most for size, found in rate.items() if size < rows)


def test_a_share_of_the_weights_is_saturated_by_larger_steps() -> None:
    """With a part of each product a device has less to compute for the latencies of kernels and all-reduces."""
    found = [saturating_rows(LLAMA, Topology.preset("h100-rdma"), ParallelPlan(tensor=tensor)) for tensor in (1, 2, 8)]
    assert found == sorted(set(found))
