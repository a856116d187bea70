"""Embeddings that the engine makes: pooled hidden states of prompts, as transformers computes them."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from dense_oracle import agrees, make_engine
from models.hf_reference import Case
from transformers import PreTrainedModel

from longctx.models import load_checkpoint
from longctx.parallel.mesh import make_mesh
from longctx.serving import Engine, EngineConfig, ParallelPlan, Request, SamplingParams
from longctx.serving.request.handoff import Handoff

Pooling = Literal["mean", "last"]
CASE = Case()
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, CASE.vocab_size, length).tolist() for length in (1, 5, 40, 100, 64)]
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
PLANS = [
    ParallelPlan(),
    ParallelPlan(1, 2, 1, rank_tokens=24),
    ParallelPlan(2, 1, 1),
    ParallelPlan(1, 1, 2),
    pytest.param(ParallelPlan(1, 3, 1, exchange="pass_q", placement="interleave"), marks=pytest.mark.slow),
    pytest.param(ParallelPlan(1, 3, 1, exchange="pass_kv", placement="interleave"), marks=pytest.mark.slow),
    pytest.param(ParallelPlan(3, 2, 1, exchange="kvp", rank_tokens=24), marks=pytest.mark.slow),
    pytest.param(ParallelPlan(2, 2, 2, rank_tokens=24), marks=pytest.mark.slow),
]


def embed(pooling: Pooling) -> SamplingParams:
    return SamplingParams(max_tokens=1, pooling=pooling)


def reference_embedding(reference: PreTrainedModel, prompt: list[int], pooling: Pooling) -> np.ndarray:
    with torch.no_grad():
        hidden = reference.base_model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
    return hidden.mean(0) if pooling == "mean" else hidden[-1]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_embeddings_equal_those_of_transformers(plan: ParallelPlan, tmp_path: Path) -> None:
    reference = CASE.write(tmp_path)
    mesh = make_mesh(plan.stage, plan.context, plan.tensor)
    model, params = load_checkpoint(tmp_path, mesh)
    config = EngineConfig(page_size=8, num_pages=40, max_running=4, token_budget=32, buckets=(32,))
    engine = Engine(model, params, config, mesh, plan=plan)
    before = engine.generate(PROMPTS[3], GREEDY)[0].token_ids
    wanted: list[tuple[list[int], SamplingParams]] = [
        (prompt, embed(pooling)) for prompt in PROMPTS for pooling in ("mean", "last")
    ]
    wanted.insert(4, (PROMPTS[3], GREEDY))
    outputs = engine.generate([prompt for prompt, _ in wanted], [sampling for _, sampling in wanted])
    for output, (prompt, sampling) in zip(outputs, wanted, strict=True):
        if sampling.pooling is None:
            assert output.embedding is None
            assert output.token_ids == before
            continue
        assert output.embedding is not None
        expected = reference_embedding(reference, prompt, sampling.pooling)
        np.testing.assert_allclose(output.embedding, expected, atol=1e-5 * np.abs(expected).max())
        if sampling.pooling == "mean":  # the rows of cached pages are not kept
            assert output.metrics.cached_tokens == 0


def test_the_last_row_needs_no_more_than_the_cache_lacks() -> None:
    engine, prompt = make_engine(), list(range(1, 34))
    outputs = [engine.generate(prompt, embed("last"))[0] for _ in range(2)]
    assert [output.metrics.cached_tokens for output in outputs] == [0, 32]
    first, second = (output.embedding for output in outputs)
    assert first is not None
    assert second is not None
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_preempted_requests_pool_each_row_once() -> None:
    prompts = [RNG.integers(0, 50, 60).tolist() for _ in range(4)]
    alone = [make_engine().generate(prompt, embed("mean"))[0].embedding for prompt in prompts]
    engine = make_engine(admission="optimistic")
    sampling = [SamplingParams(max_tokens=60, ignore_eos=True), embed("mean")] * 4
    mixed = [prompt for each in prompts for prompt in (each[:9], each)]
    outputs = engine.generate(mixed, sampling)
    assert engine.stats().preemptions > 0
    for output, expected in zip(outputs[1::2], alone, strict=True):
        assert output.embedding is not None
        assert expected is not None
        np.testing.assert_allclose(output.embedding, expected, atol=1e-5)
    assert all(agrees(x.token_ids, mixed[2 * i], sampling[0]) for i, x in enumerate(outputs[::2]))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_handoff_carries_an_embedding(pooling: Pooling) -> None:
    prompt = RNG.integers(0, 50, 40).tolist()
    output = make_engine().generate(prompt, embed(pooling))[0]
    handoff = Handoff.from_dict(Handoff.of([output]).to_dict())
    handoff.check(len(prompt), embed(pooling), 50)
    assert handoff.embedding is not None
    other = make_engine()
    other.submit(Request(prompt, embed(pooling)), handoff=handoff)
    (resumed,) = [event.output for event in other.step() if event.output is not None]
    assert resumed.embedding is not None
    assert output.embedding is not None
    np.testing.assert_allclose(resumed.embedding, output.embedding, rtol=1e-6)


def test_what_contradicts_pooling_is_refused() -> None:
    with pytest.raises(ValueError, match="pooling needs max_tokens=1"):
        SamplingParams(pooling="mean")
    with pytest.raises(ValueError, match="pooling must be one of"):
        SamplingParams(max_tokens=1, pooling="max")  # type: ignore[arg-type]
    output = make_engine().generate([1, 2, 3], embed("last"))[0]
    with pytest.raises(ValueError, match="must have an embedding"):
        Handoff(0, Handoff.of([output]).completions).check(3, embed("last"), 50)
