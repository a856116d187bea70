"""Weights or activations that are not finite end the requests that they reach, with a sentence, and no others."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import ORACLE, VOCAB, Oracle, make_engine, make_model

from longctx.models.validation import FP8_KV
from longctx.serving import Engine, ParallelPlan, Request, SamplingParams

BAD = 13  # the token whose embedding is not finite
SIX = SamplingParams(max_tokens=6, ignore_eos=True)
WARM = SamplingParams(max_tokens=6, temperature=0.7, seed=3, ignore_eos=True, presence_penalty=0.5)
RNG = np.random.default_rng(0)
GOOD = [RNG.choice([t for t in range(VOCAB) if t != BAD], length).tolist() for length in (40, 9, 33, 21)]
POISONED = [[*GOOD[0][:20], BAD, *GOOD[0][20:]], [BAD], [*GOOD[1], BAD]]


def poisoned(oracle: Oracle, value: float) -> dict[str, Any]:
    embed = oracle.params["embed"]
    return oracle.params | {"embed": embed.at[BAD].set(jnp.full(embed.shape[1], value, embed.dtype))}


def check(engine: Engine, params: SamplingParams, oracle: Oracle = ORACLE) -> None:
    """Poisoned requests among others, in steps with them, and on pages that these have afterwards."""
    for _ in range(2):
        prompts = [GOOD[0], POISONED[0], GOOD[1], POISONED[1], GOOD[2], POISONED[2]]
        outputs = engine.generate(prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            if prompt in POISONED:
                assert output.finish_reason == "error"
                assert output.token_ids == []
                assert output.error is not None
                assert "logits are not finite" in output.error
            elif BAD not in output.token_ids:
                assert output.error is None
                if engine.config.kv_dtype is None:
                    assert output.token_ids == oracle.expected_tokens(prompt, params)
                else:
                    assert len(oracle.follows(output.token_ids, prompt, params)) == params.max_tokens
        assert engine.stats().pages_held == 0


@pytest.mark.parametrize(("value", "params"), [(float("nan"), SIX), (float("inf"), WARM)], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_end_their_request_alone(value: float, params: SamplingParams) -> None:
    assert sum(BAD not in ORACLE.expected_tokens(prompt, params) for prompt in GOOD) > 2
    check(make_engine(poisoned(ORACLE, value), prefix_cache=False), params)


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(1, 2, 1, exchange="pass_kv", placement="interleave"),
        pytest.param(ParallelPlan(1, 2, 1, exchange="pass_q", placement="interleave"), marks=pytest.mark.slow),
        pytest.param(ParallelPlan(2, 1, 2), marks=pytest.mark.slow),
    ],
    ids=["pass_kv", "pass_q", "stages and tensor"],
)
def test_logits_that_are_not_finite_end_their_request_alone_on_meshes(plan: ParallelPlan) -> None:
    shapes = {"page_size": 8, "num_pages": 24, "token_budget": 16, "buckets": (16,)}
    engine = make_engine(poisoned(ORACLE, float("nan")), ORACLE, plan, **shapes)
    check(engine, SIX)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [ParallelPlan(1, 2, 1, exchange="pass_kv", placement="interleave"), ParallelPlan()],
    ids=["pass_kv", "one device"],
)
def test_a_row_of_nan_in_fp8_pages_reaches_its_request_alone(plan: ParallelPlan) -> None:
    oracle = Oracle(make_model(), FP8_KV)
    shapes = {"page_size": 8, "num_pages": 24, "token_budget": 16, "buckets": (16,), "kv_dtype": FP8_KV}
    check(make_engine(poisoned(oracle, float("nan")), oracle, plan, **shapes), SIX, oracle)


def test_a_model_of_nan_answers_nothing() -> None:
    params = dict(ORACLE.params)
    params["final_norm"] = params["final_norm"] * float("nan")
    engine = make_engine(params)
    outputs = engine.generate(GOOD, SIX)
    assert [x.finish_reason for x in outputs] == ["error"] * len(GOOD)
    several = engine.generate(Request(GOOD[1], SamplingParams(max_tokens=6, n=3, temperature=1.0, logprobs=2)))
    assert [(x.finish_reason, x.token_ids, x.logprobs) for x in several] == [("error", [], [])] * 3
    assert not engine.has_work
