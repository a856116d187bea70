"""FP8 pages in predictions and simulations: fewer bytes of a token, in memory, in decodes and on links."""

from typing import Any

import pytest

from longctx.cluster.conductor.costs import PredictorCosts
from longctx.models.footprint import cache_bytes, kv_row_bytes
from longctx.parallel.device_tables import Link
from longctx.parallel.topology import Topology
from longctx.serving import EngineConfig, ParallelPlan
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.predictor.file import predictor_from_dict, predictor_to_dict
from longctx.serving.predictor.roofline import roofline
from longctx.serving.predictor.work import Work
from longctx.simulation.deployment import ClusterDeployment, Deployment
from longctx.simulation.models import MODELS
from longctx.simulation.planner.search import Goal, Planned, RejectedPlan, evaluate
from longctx.simulation.utilization import max_tokens, model_bytes
from longctx.simulation.workloads import WorkloadRequest

FP8 = "float8_e4m3fn"
LLAMA, RDMA = MODELS["llama-3-8b"], Topology.preset("h100-rdma")
SHARE = (128 + 4) / (2 * 128)  # of the bytes of a bfloat16 cache, with heads of 128
CONFIG: dict[str, Any] = {"max_length": 300_000, "token_budget": 512, "max_running": 8, "page_size": 64}


def test_a_row_has_a_byte_each_and_a_scale() -> None:
    assert kv_row_bytes(128, 2, FP8) == kv_row_bytes(128, 4, FP8) == 132
    assert kv_row_bytes(128, 2) == 256
    assert cache_bytes(LLAMA, 1000, 2, 4, kv_dtype=FP8) == SHARE * cache_bytes(LLAMA, 1000, 2, 4)


def test_decodes_read_half_and_prompts_take_as_long() -> None:
    plain, fp8 = (roofline(LLAMA, RDMA, 512, kv_dtype=dtype) for dtype in (None, FP8))
    shares = [RDMA.device.attention_cost(128, wide).key_share for wide in (2, 1)]
    assert fp8.per_key == pytest.approx(SHARE * plain.per_key * shares[0] / shares[1])
    empty, far = Work(1, 1), Work(1, 1, 10**6)
    read = [each.seconds(far) - each.seconds(empty) for each in (plain, fp8)]
    assert read[1] == pytest.approx(fp8.per_key / plain.per_key * read[0], rel=0.1)  # but for kernels
    assert fp8.seconds(empty) == pytest.approx(plain.seconds(empty), rel=0.02)
    assert predictor_from_dict(predictor_to_dict(fp8)) == fp8
    prompt = Work().with_chunk(100_000, 512, True)
    assert fp8.seconds(prompt) == pytest.approx(plain.seconds(prompt), rel=0.05)


def test_keys_travel_in_as_many_bytes_as_they_are_kept() -> None:
    """Queries and states are as wide as ever."""
    slow = Topology(RDMA.device, {"context": Link("slow", 1e9, share=1.0)})
    plain, fp8 = (roofline(LLAMA, slow, 512, kv_dtype=dtype, context=4) for dtype in (None, FP8))
    work = Work().with_sharded(1 << 20, 2048, 4, 1 << 18, True, "pass_kv", 512)
    assert plain.exchange is not None
    assert fp8.exchange is not None
    assert fp8.exchange.seconds(work, 0.0) == pytest.approx(SHARE * plain.exchange.seconds(work, 0.0))
    merged = Work(rows=8, replicated=8)
    assert fp8.exchange.seconds(merged, 0.0) == plain.exchange.seconds(merged, 0.0)
    assert predictor_from_dict(predictor_to_dict(fp8)) == fp8


def test_nearly_twice_the_pages_fit() -> None:
    plain, fp8 = (
        Deployment(LLAMA, RDMA, ParallelPlan(), EngineConfig(**CONFIG, kv_dtype=dtype)) for dtype in (None, FP8)
    )
    assert fp8.num_pages / plain.num_pages == pytest.approx(1 / SHARE, rel=1e-3)
    found = [max_tokens(LLAMA, ParallelPlan(tensor=2), RDMA.device, kv_dtype=dtype) for dtype in (None, FP8)]
    assert found[1] / found[0] == pytest.approx(1 / SHARE, rel=1e-4)
    read = [model_bytes(LLAMA, Work(1, 1, 10**6), kv_dtype=dtype) for dtype in (None, FP8)]
    assert read[0] - read[1] == pytest.approx((1 - SHARE) * 131072 * 10**6)


def test_a_long_decode_is_simulated_faster() -> None:
    request = [WorkloadRequest(0.0, 200_000, 50)]
    seconds = []
    for dtype in (None, FP8):
        deployment = Deployment(LLAMA, RDMA, ParallelPlan(), EngineConfig(**CONFIG, kv_dtype=dtype))
        (served,) = deployment.simulation().run(request).served
        assert served.metrics.tpot is not None
        seconds.append(served.metrics.tpot)
    decode = Work(1, 1, 200_000)
    expected = [roofline(LLAMA, RDMA, 512, kv_dtype=dtype).seconds(decode) for dtype in (None, FP8)]
    assert seconds[0] - seconds[1] == pytest.approx(expected[0] - expected[1], rel=0.01)


def test_a_prompt_that_memory_refused_is_planned() -> None:
    goal = Goal(700_000, 10_000.0, 10.0)
    found = [evaluate(LLAMA, RDMA, 1, goal, ParallelPlan(), "static:4096", 4096, dtype) for dtype in (None, FP8)]
    assert isinstance(found[0], RejectedPlan)
    assert found[0].reason == "memory"
    assert isinstance(found[1], Planned)
    assert found[1].deployment.config.kv_dtype == FP8


def test_a_cluster_keeps_and_sends_fewer_bytes() -> None:
    made: dict[str, Any] = {"prefill": 1, "decode": 1, "host_bytes": 10**11}
    plain, fp8 = (
        ClusterDeployment(LLAMA, RDMA, ParallelPlan(), kv_dtype=dtype, **made).instances() for dtype in (None, FP8)
    )
    assert fp8[0].host_pages / plain[0].host_pages == pytest.approx(1 / SHARE, rel=1e-3)
    assert isinstance(fp8[0].config.tiers, TierConfig)
    for one, other in zip(plain, fp8, strict=True):
        assert other.config.num_pages / one.config.num_pages == pytest.approx(1 / SHARE, rel=1e-2)  # type: ignore[operator]
    costs = [PredictorCosts.of_model(roofline(LLAMA, RDMA, 512), LLAMA, 512, kv_dtype=dtype) for dtype in (None, FP8)]
    assert costs[1].transfer_bytes(1000) == SHARE * costs[0].transfer_bytes(1000)


@pytest.mark.parametrize("dtype", ["int4", "float8", "bfloat16", "", "float8_e4m3fn\x00", "x" * 1000])
def test_other_dtypes_are_refused_by_name(dtype: str) -> None:
    calls = [
        lambda: EngineConfig(kv_dtype=dtype),
        lambda: cache_bytes(LLAMA, 10, kv_dtype=dtype),
        lambda: roofline(LLAMA, RDMA, 512, kv_dtype=dtype),
        lambda: max_tokens(LLAMA, ParallelPlan(), RDMA.device, kv_dtype=dtype),
        lambda: ClusterDeployment(LLAMA, RDMA, ParallelPlan(), 1, 1, kv_dtype=dtype),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^kv_dtype must be None") as caught:
            call()
        assert len(str(caught.value)) < 300


def test_baselines_have_none() -> None:
    with pytest.raises(ValueError, match="kv_dtype must be None with a baseline"):
        Deployment(LLAMA, RDMA, ParallelPlan(tensor=8), EngineConfig(kv_dtype=FP8), baseline="vllm")
