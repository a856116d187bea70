"""FLOPs, bytes and memory of batches, against sums that go token by token."""

import dataclasses

import pytest

from longctx.models import LlamaConfig
from longctx.models.footprint import weight_bytes
from longctx.models.quantization_config import RowwiseFp8
from longctx.parallel.device_tables import DEVICES
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor import Work
from longctx.simulation.models import MODELS
from longctx.simulation.record import Totals
from longctx.simulation.utilization import (
    device_memory,
    gpu_seconds,
    max_tokens,
    mbu,
    mfu,
    model_bytes,
    model_flops,
)

SMALL = LlamaConfig(100, 32, 96, 3, 4, 2, 8)
FP8 = dataclasses.replace(SMALL, quantization=RowwiseFp8.of(3))
CHUNKS = [(10, 1, True), (3, 4, False), (0, 7, True)]  # tokens before, tokens, samples


def flops_by_token(model: LlamaConfig) -> int:
    """2 for each multiplication of a dense forward pass of `CHUNKS`, matrix by matrix and pair by pair."""
    total = 0
    heads, keys, hidden = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim, model.hidden_size
    for start, count, samples in CHUNKS:
        for position in range(start, start + count):
            for _ in range(model.num_layers):
                total += 2 * hidden * (heads + keys + keys) + 2 * heads * hidden  # q, k, v, o
                total += 3 * 2 * hidden * model.intermediate_size
                for _ in range(model.num_heads):
                    total += 2 * 2 * model.head_dim * (position + 1)  # scores, and values
        total += 2 * hidden * model.vocab_size * samples
    return total


@pytest.mark.parametrize("model", [SMALL, FP8])
def test_flops_equal_a_count_token_by_token(model: LlamaConfig) -> None:
    work = Work.of(CHUNKS)
    apart = Totals()
    for chunk in CHUNKS:
        apart.add(Work.of([chunk]), 2.0, 2.0)
    assert model_flops(model, work) == flops_by_token(model)
    assert model_flops(model, apart) == flops_by_token(model)
    assert (apart.steps, apart.busy, apart.rows) == (3, 6.0, 12)


def test_attention_counts_both_ways() -> None:
    """A prompt of T tokens has T (T + 1) / 2 pairs, or twice those (Mnemosyne, equation 1); decodes count alike."""
    pairs = 4 * 3 * 32
    for work, causal, full in ((Work.of([(0, 7, False)]), 28, 56), (Work.of([(9, 1, False)]), 10, 10)):
        linear = model_flops(SMALL, work) - pairs * causal
        assert model_flops(SMALL, work, causal=False) == linear + pairs * full


def test_the_papers_flops() -> None:
    """Context parallelism paper, appendix A; Mnemosyne, 2.1."""
    work = Work.of([(0, 1_000_000, False)])
    llama = MODELS["llama-3-405b"]
    linear = model_flops(llama, Work(rows=1_000_000))
    assert linear == pytest.approx(8.1e17, rel=0.02)
    assert model_flops(llama, work) - linear == pytest.approx(4.1e18, rel=0.01)
    llama = MODELS["llama-3-70b"]
    attention = model_flops(llama, work, causal=False) - model_flops(llama, Work(rows=1_000_000))
    assert attention == pytest.approx(2.62e18, rel=0.01)


def test_bytes_are_those_of_weights_and_keys() -> None:
    llama, work = MODELS["llama-3-8b"], Work.of([(999_999, 1, True)])
    embedding = llama.vocab_size * llama.hidden_size
    weights = weight_bytes(llama) - 2 * embedding
    assert model_bytes(llama, work) == pytest.approx(weights + 131072 * 1_000_000, rel=1e-4)
    # Two ranks read the weights, and 16 devices of a rank 8 KV heads twice.
    wide = model_bytes(llama, work, ParallelPlan(context=2, tensor=16))
    assert wide == pytest.approx(2 * weights + 2 * 131072 * 1_000_000, rel=1e-4)
    fp8, full = model_bytes(FP8, Work(1)), model_bytes(SMALL, Work(1))
    assert full - fp8 == 3 * 32 * 96  # of one of three layers, one byte instead of two


def test_utilisation_of_ideal_devices_is_one() -> None:
    device = DEVICES["H100"]
    for model in (MODELS["llama-3-8b"], MODELS["llama-3-405b-fp8"]):
        work = Work.of([(1000, 2048, True)])
        quantized = sum(len(names) for names in model.quantization.layers) if model.quantization else 0
        in_fp8 = 2 * work.rows * quantized * model.hidden_size * model.intermediate_size
        busy = ((model_flops(model, work) - in_fp8) / 989e12 + in_fp8 / 1979e12) / 16
        assert mfu(model, work, device, 16, busy) == pytest.approx(1)
        assert mfu(model, work, device, 16, 4 * busy) == pytest.approx(0.25)
        busy = model_bytes(model, work) / 3.35e12 / 8
        assert mbu(model, work, device, ParallelPlan(tensor=8), busy) == pytest.approx(1)
    assert gpu_seconds(3.0, 8) == 24
    with pytest.raises(ValueError, match="seconds must be positive and finite, got 0"):
        mfu(SMALL, Totals(), device, 1, 0)
    with pytest.raises(ValueError, match="devices must be at least 1, got 0"):
        gpu_seconds(1.0, 0)


def test_what_fits() -> None:
    """Mnemosyne 2.1: a million tokens of the 70B model have 320 GB of keys and values."""
    llama, device = MODELS["llama-3-70b"], DEVICES["H100"]
    one = device_memory(llama, ParallelPlan(tensor=8), device, 1_000_000)
    assert 8 * one.cache == pytest.approx(320 * 1024 * 1e6, rel=1e-6)
    assert 8 * one.weights == pytest.approx(141.1e9, rel=0.01)
    one.check()
    with pytest.raises(ValueError, match=r"plan needs 99.8 GB on each device \(weights 17.6 GB, keys and val"):
        device_memory(llama, ParallelPlan(tensor=8), device, 2_000_000).check()
    for plan in (ParallelPlan(tensor=8), ParallelPlan(stage=4, context=2, tensor=8)):
        most = max_tokens(llama, plan, device)
        assert device_memory(llama, plan, device, most).fits
        assert not device_memory(llama, plan, device, most + plan.context).fits
    assert max_tokens(llama, ParallelPlan(), device) == 0
    with pytest.raises(ValueError, match="plan's tensor must divide"):
        device_memory(llama, ParallelPlan(tensor=3), device, 1)
