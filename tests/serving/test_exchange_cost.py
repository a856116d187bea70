"""Predicted seconds of what ranks exchange, of FP8 weights and of the fullest rank; the limit of a rank."""

import dataclasses
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.models import LlamaConfig, RowwiseFp8, weight_bytes
from longctx.parallel import Device, Link, Topology
from longctx.parallel.cost import Hardware
from longctx.parallel.device_tables import DEVICES
from longctx.parallel.topology import AXES
from longctx.serving import EngineConfig, ParallelPlan, Slo
from longctx.serving.predictor import CurvePredictor, RuntimePredictor, Work
from longctx.serving.predictor.roofline import roofline
from longctx.serving.predictor.runtime import ExchangeCost, readable_tokens
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.chunking import Chunking, limit_of_rank
from longctx.simulation import Instance, Simulation
from longctx.simulation.workloads import WorkloadRequest

LLAMA_8B = LlamaConfig.preset("llama-3.1-8b")
LLAMA_405B = LlamaConfig.preset("llama-3.1-405b")
GTT = Topology.preset("meta-gtt")


def gtt(context: int = 4) -> CurvePredictor:
    """Llama 3 405B on the context parallelism paper's hosts."""
    return roofline(LLAMA_405B, GTT, 512, tensor=8, context=context)


def test_few_new_tokens_are_predicted_to_go_by_pass_q_as_measured() -> None:
    """Table 4: pass-Q was faster for 1,280 and 3,200 new tokens of 128,000; where nothing is said the faster counts."""
    predictor = gtt()
    for new in (1280, 3200):
        seconds = {
            name: predictor.seconds(Work().with_sharded(128_000 - new, new, 4, (128_000 - new) // 4, exchange=name))
            for name in ("pass_kv", "pass_q", "all_gather", "")
        }
        assert min(seconds, key=seconds.__getitem__) == "pass_q"
        assert seconds[""] == seconds["pass_q"]


@pytest.mark.parametrize(
    ("ranks", "cached", "send", "all_to_all"),
    [(2, 128_000, 32.3, 81.1), (4, 128_000, 105.7, 79.9), (2, 32_000, 33.3, 66.8), (4, 32_000, 104.9, 72.2)],
)
def test_a_decode_waits_as_long_as_measured(ranks: int, cached: int, send: float, all_to_all: float) -> None:
    """Table 8 of the context parallelism paper: microseconds of SendRecv and All2All, pass-Q, in a layer of a decode.

    The engine gathers the new keys besides, which is all that it sends where nothing is cached.
    """
    exchange = gtt(ranks).exchange
    assert exchange is not None
    decode = exchange.seconds(Work().with_sharded(cached, 1, ranks, exchange="pass_q"), 0.0)
    gather = exchange.seconds(Work().with_sharded(0, 2 * ranks, ranks, exchange="pass_q"), 0.0)
    assert 0 < gather < decode
    assert (decode - gather) / 126 == pytest.approx((send + all_to_all) * 1e-6, rel=0.12)


def test_keys_that_travel_under_attention_cost_what_attention_loses() -> None:
    """Table 5: attention of 414 us hides no hop of 627 us at T = 3200, and that of 1,608 us all of 631 us at 12,800."""
    exchange = gtt().exchange
    assert exchange is not None
    for new, send, attention in ((3200, 627e-6, 414e-6), (12_800, 631e-6, 1608e-6)):
        cached = 128_000 - new
        work = Work().with_sharded(cached, new, 4, cached // 4, exchange="pass_kv")
        exposed, alone = (exchange.seconds(work, 126 * 4 * part) / 126 / 3 for part in (attention, 0.0))
        assert alone == pytest.approx(send, rel=0.07)
        assert max(0.0, 0.9 * (send - attention)) < exposed < max(0.0, send - attention) + 0.15 * send


@given(
    st.sampled_from([2, 3, 8]),
    st.integers(0, 10**6),
    st.integers(1, 8192),
    st.sampled_from(["", "pass_kv", "pass_q", "all_gather"]),
)
def test_exchanges_never_save_time(ranks: int, cached: int, new: int, name: str) -> None:
    predictor = gtt(ranks)
    alone = dataclasses.replace(predictor, exchange=None)
    sharded = Work().with_sharded(cached, new, ranks, -(-cached // ranks), True, name)
    assert predictor.seconds(sharded) > alone.seconds(sharded)
    replicated = Work().with_chunk(cached, new, True, True)
    assert predictor.seconds(replicated) > alone.seconds(replicated)
    assert predictor.seconds(Work().with_chunk(cached, new, True)) == alone.seconds(
        Work().with_chunk(cached, new, True)
    )


def test_the_network_is_slower_than_a_host() -> None:
    """The same plan on one host's NVLink, over RDMA and over TCP."""
    seconds = [
        roofline(LLAMA_8B, Topology.preset(name), 512, stage=2, context=4).seconds(work)
        for work in (Work().with_sharded(64_000, 512, 4, 16_000), Work().with_chunk(16_000, 16, True, True))
        for name in ("h100-nvlink", "h100-rdma", "h100-tcp")
    ]
    assert seconds[0] < seconds[1] < seconds[2]
    assert seconds[3] < seconds[4] <= seconds[5]


def test_quantised_weights_are_half_the_bytes_and_twice_the_rate() -> None:
    in_fp8 = dataclasses.replace(LLAMA_405B, quantization=RowwiseFp8.of(126, "all"))
    device = Device("plain", DEVICES["H100"].flops, 3.35e12)
    host = Topology(device, {"tensor": Link("link", 450e9, 10e-6)})
    full, quantized = (roofline(model, host, 8192, tensor=8) for model in (LLAMA_405B, in_fp8))
    for rows, least in ((1, 1.6), (8192, 1.4)):
        assert least < full.seconds(Work(rows)) / quantized.seconds(Work(rows)) <= 2.0


def test_uneven_stages_take_as_long_as_the_larger() -> None:
    """126 layers are 32 on each of 4 stages, but for two of them, which have 31."""
    host = Topology.preset("h100-nvlink")
    whole, quarter = (roofline(LLAMA_405B, host, 512, tensor=8, stage=stage) for stage in (1, 4))
    assert quarter.per_pair == pytest.approx(whole.per_pair * 32 / 126)


def test_wrong_topologies_are_refused() -> None:
    alone = Topology(GTT.device, {"tensor": GTT.link("tensor")})
    with pytest.raises(ValueError, match="topology must have a link for the axis context, it has tensor"):
        roofline(LLAMA_8B, alone, 512, tensor=8, context=2)
    assert roofline(LLAMA_8B, alone, 512, tensor=8).exchange is None


def test_exchange_costs_are_plain_data() -> None:
    cost = gtt().exchange
    assert cost is not None
    assert msgspec.convert(dataclasses.asdict(cost), ExchangeCost) == cost
    assert cost.hardware == dataclasses.replace(GTT.hardware("context"))
    assert Hardware(**dataclasses.asdict(cost.hardware)) == cost.hardware


def test_the_limit_of_a_rank_keeps_the_target_beside_chunks() -> None:
    """Llama 3 8B on 4 stages of 4 H100, 30 ms a token.

    A decode alone could read 1.66M tokens, where a step with a chunk of 128 after as many takes 77 ms.
    """
    host = Topology(Device("plain", {"bfloat16": 989e12}, 3.35e12), dict.fromkeys(AXES, Link("link", 450e9, 7.6e-6)))
    predictor = roofline(LLAMA_8B, host, 512, stage=4, tensor=4)

    def beside(tokens: float) -> float:
        return 4 * predictor.seconds(Work(1, 1, 1).with_chunk(int(tokens), 128, False))

    alone = readable_tokens(predictor, 0.03, 4, 10**7)
    assert alone == pytest.approx(1.66e6, rel=0.01)
    assert beside(alone) == pytest.approx(0.077, rel=0.01)
    limit = readable_tokens(predictor, 0.03, 4, 10**7, chunk=128)
    assert limit < alone / 2
    assert beside(limit) <= 0.03 < beside(limit + 1)
    for tight in (1e-4, 5e-3):  # no step with a chunk is so fast, or not even a decode is
        assert readable_tokens(predictor, tight, 4, 10**7, chunk=512) == readable_tokens(predictor, tight, 4, 10**7)
    assert readable_tokens(predictor, None, 4, 10**7, chunk=128) == float("inf")


@pytest.mark.parametrize("chunking", ["static", "adaptive"])
def test_the_limit_of_a_rank_is_predicted_with_no_more_rows_than_a_step_has(chunking: str) -> None:
    """A profile knows no step of more: the decode beside the chunk is one of its rows."""
    measured = RuntimePredictor.of_rows({8: 1e-3}, (1, 8), (1e-6, 4e-6))
    limit = limit_of_rank(measured, Chunking.parse(chunking, 8, 4), 0.05, 1, 10**6)
    assert 1000 < limit < 50_000


def test_a_decode_takes_as_long_as_the_fullest_rank() -> None:
    """1,000,192 of a request's keys are on the first of two ranks. Counted evenly they would be 500,224."""
    plan = ParallelPlan(context=2, tensor=8, exchange="kvp", rank_tokens=1_000_192)
    config = EngineConfig(num_pages=16_000, token_budget=8192, max_running=2, max_length=1_010_000, slo=Slo(tpot=None))
    predictor = roofline(LLAMA_8B, Topology.preset("h100-rdma"), 8192, tensor=8, context=2)
    batches: list[tuple[Work, float]] = []

    def seconds(batch: Batch) -> float:
        batches.append((batch.work, batch.predicted))
        return batch.predicted

    model = dataclasses.replace(LLAMA_8B, max_positions=2_000_000)
    simulation = Simulation([Instance(model, config, predictor, plan, seconds=seconds)])
    simulation.run([WorkloadRequest(0.0, 1_000_447, 2)])
    work, predicted = batches[-1]
    assert (work.rows, work.replicated, work.decode_keys) == (1, 1, 1_000_192)
    even = predictor.seconds(Work().with_chunk(500_223, 1, True, True))
    assert predicted > 1.2 * even
    assert predicted == pytest.approx(predictor.seconds(work))
    # A chunk that is read by both ranks is predicted by the fuller one too.
    chunks = [(work, predicted) for work, predicted in batches if work.replicated > 1]
    assert chunks
    assert all(work.chunk_pairs >= work.rows * 990_000 for work, _ in chunks)
    assert all(a <= b for (_, a), (_, b) in itertools.pairwise(chunks[:-1]))


def test_ranks_that_share_weights_read_a_part_of_them() -> None:
    """Over free links a decode saves what a device need not read; replicated rows also save products."""
    free = Topology(DEVICES["H100"], dict.fromkeys(AXES, Link("free", 1e18, share=1.0)))
    tensor, shared = (roofline(LLAMA_405B, free, 8192, tensor=8, context=4, ffn=ffn) for ffn in ("tensor", "all"))
    bandwidth = DEVICES["H100"].reached_bandwidth
    saved = (weight_bytes(LLAMA_405B, 1, 8) - weight_bytes(LLAMA_405B, 1, 8, ffn_ranks=4)) / bandwidth
    for decode in (Work(1, 1, 1000, replicated=1), Work(1, 1, 1000)):
        # Smaller weights are read at a smaller share of the bandwidth.
        assert tensor.seconds(decode) - shared.seconds(decode) == pytest.approx(saved, rel=0.06)
    chunk, local = Work(4096, replicated=4096), Work(4096)
    assert shared.seconds(chunk) < 0.45 * tensor.seconds(chunk)
    assert shared.seconds(local) == pytest.approx(tensor.seconds(local), rel=0.1)


def test_what_rows_exchange_for_shared_weights() -> None:
    """Over a link of 1 byte/s, bytes of a layer are those of compiled steps (`test_helix.py`)."""
    model = LlamaConfig(64, 32, 48, 1, 4, 2, 16)
    link = Link("slow", 1.0, share=1.0)
    topology = Topology(DEVICES["H100"], {"tensor": link, "context": link})
    exchange = roofline(model, topology, 64, tensor=2, context=2, element_bytes=4, ffn="all").exchange
    assert exchange is not None
    local, replicated = (exchange.seconds(Work(16, replicated=rows), 0.0) for rows in (0, 16))
    assert local == 16 * 2 * 16 * 4 / 2 + 3 * 16 * 32 * 4
    assert exchange.shared is not None
    sums, over_tensor = 2 * (2 * 3 / 4) * 16 * 32 * 4, 2 * 16 * 32 * 4
    counted = exchange.shared.replicated_share * over_tensor  # by the curve of rows
    assert replicated == pytest.approx(16 * 2 * 17 * 4 / 2 + sums - counted)
