"""The calibrated predictor: what its terms add up to, and all-reduces over several hosts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.parallel import Topology
from longctx.parallel.device_tables import DEVICES, LINKS, PRESETS
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor import CurvePredictor, Work
from longctx.serving.predictor.roofline import element_bytes_of_row
from longctx.simulation.hardware import all_reduce_over_hosts, predictor
from longctx.simulation.models import MODELS, num_parameters
from longctx.simulation.utilization import mbu, mfu, totals_of

LLAMA = MODELS["llama-3-8b"]


def test_terms_are_the_shares_of_the_device_table() -> None:
    """One device: products, weights and what overlaps, element-wise operators, latency, head, attention."""
    found, device = predictor(LLAMA, "h100-rdma"), DEVICES["H100"]
    head = LLAMA.vocab_size * LLAMA.hidden_size
    weights = num_parameters(LLAMA) - 2 * head - 65 * LLAMA.hidden_size
    assert device.element_share is not None
    assert device.attention_share is not None
    assert device.key_share is not None
    for rows in (1, 4096):
        products = 2 * rows * weights / (989e12 * device.flops_share)
        reading = 2 * weights / (3.35e12 * device.memory_share)
        expected = max(products, reading) + (1 - device.overlap) * min(products, reading)
        expected += 32 * rows * element_bytes_of_row(LLAMA, 1) / (3.35e12 * device.element_share)
        expected += 32 * device.layer_seconds + 2 * head / (3.35e12 * device.memory_share)
        assert found.seconds(Work(rows)) == pytest.approx(expected)
    pair = 4 * 32 * 4096 / (989e12 * device.attention_share)
    key = 2 * 32 * 1024 * 2 / (3.35e12 * device.key_share)
    # A decode is bound by reading, a chunk by products; each hides the other.
    assert found.seconds(Work(1, 0, 10**6)) - found.seconds(Work(1)) == pytest.approx(key * 10**6)
    chunk = Work().with_chunk(10**6, 512, False)
    assert found.seconds(chunk) - found.seconds(Work(512)) == pytest.approx(pair * chunk.pairs)


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


def test_what_overlaps_is_between_the_longer_and_the_sum() -> None:
    plain = CurvePredictor((1, 512), (1e-3, 2e-3), 3e-8, 1e-7, 1e-4)
    hidden = dataclasses.replace(plain, overlap=1.0)
    work = Work(5, 5, 1000).with_chunk(3000, 2, False).with_chunk(3000, 300, False)
    at = np.array([2 * 3000 + 3, 300 * 3000 + 45150]) * 3e-8, np.array([3002, 3300]) * 1e-7
    less = np.minimum(*at).sum() + 1000 * 3e-8
    assert plain.seconds(work) - hidden.seconds(work) == pytest.approx(less)
    with pytest.raises(ValueError, match=r"overlap must be 0 to 1, got 1\.5"):
        dataclasses.replace(plain, overlap=1.5)


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
                totals = totals_of([(work, plan.stage * found.seconds(work))])
                config, device = MODELS[model], topology.device
                assert 0 < mfu(config, totals, device, plan.num_devices) <= 1
                assert 0 < mbu(config, totals, device, plan) <= 1


def test_an_all_reduce_over_hosts_has_two_levels() -> None:
    topology = Topology.preset("meta-gtt")
    assert all_reduce_over_hosts(topology, 1) == topology
    nvlink, network = LINKS["nvlink-h100"], LINKS["rdma-400g"]
    assert nvlink.collective_share is not None
    assert network.collective_share is not None
    assert nvlink.collective_latency is not None
    for hosts, hops in ((2, 2), (4, 4), (8, 6)):
        link = all_reduce_over_hosts(topology, hosts).hardware("tensor")
        size, devices = 1e9, 8 * hosts
        seconds = link.collective(2 * (devices - 1) / devices * size)
        inside = 2 * 7 / 8 * size / (450e9 * nvlink.collective_share) + nvlink.collective_latency
        across = 2 * (hosts - 1) / hosts * size / 8 / (50e9 * network.collective_share) + hops * 19e-6
        assert seconds == pytest.approx(inside + across)
    wide = predictor(MODELS["llama-3-405b"], topology, ParallelPlan(tensor=16))
    assert wide.seconds(Work(1)) > 126 * 2 * (22e-6 + 38e-6)


def test_plans_that_do_not_suit_are_refused() -> None:
    with pytest.raises(ValueError, match="plan's tensor must divide the model's 32 query heads"):
        predictor(LLAMA, "h100-rdma", ParallelPlan(tensor=24))
    with pytest.raises(ValueError, match="plan's tensor must be a multiple of a host's 6 GPUs, got 8"):
        predictor(LLAMA, "h100-rdma", ParallelPlan(tensor=8), gpus_per_host=6)
    with pytest.raises(ValueError, match="topology must be one of"):
        predictor(LLAMA, "h99")
    with pytest.raises(ValueError, match="hosts and gpus_per_host must be at least 1, got 0 and 8"):
        all_reduce_over_hosts(Topology.preset("meta-gtt"), 0)
