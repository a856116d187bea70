"""`PredictorCosts` beside the predictor that it is made of, and `PendingBlocks` beside sets."""

import dataclasses
import math

import numpy as np
import pytest
from conductor_parts import keys_of
from hypothesis import given
from hypothesis import strategies as st

from longctx.cluster.conductor.costs import PredictorCosts
from longctx.cluster.conductor.state import PendingBlocks
from longctx.models import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor import RuntimePredictor, Work
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.roofline import roofline

LLAMA_70B = LlamaConfig(32000, 8192, 28672, 80, 64, 8, 128, max_positions=200_000)
A100_TP8 = roofline(LLAMA_70B, Topology.preset("a100-nvlink"), 8192, tensor=8)
MEASURED = RuntimePredictor.of_rows({rows: 1e-2 + 1e-4 * rows for rows in (8, 64, 512)}, (1, 8), (1e-8, 1e-7), 1e-5)


@pytest.mark.parametrize("predictor", [A100_TP8, MEASURED, Corrected(MEASURED)])
def test_prompts_and_decodes_are_those_of_the_predictor(predictor: RuntimePredictor) -> None:
    costs = PredictorCosts.of_model(predictor, LLAMA_70B, 512)
    for cached, prompt in [(0, 1), (0, 8000), (4096, 8000), (7999, 8000)]:
        for _ in range(2):
            assert costs.prefill_seconds(cached, prompt) == predictor.prefill_seconds(cached, prompt, 512)
    assert costs.prefill_seconds(8000, 8000) == 0.0
    for batch, tokens in [(1, 1), (1, 130_000), (64, 512_000), (500, 500)]:
        expected = predictor.seconds(Work(batch, batch, tokens))
        assert costs.decode_seconds(batch, tokens) == pytest.approx(expected, rel=1e-9)
    assert costs.decode_seconds(0, 0) == 0.0


def test_costs_of_another_predictor_remember_nothing_of_the_first() -> None:
    costs, corrected = PredictorCosts.of_model(MEASURED, LLAMA_70B, 512), Corrected(MEASURED)
    corrected.prompt_factor = 2.0
    before = costs.prefill_seconds(0, 8000)
    assert dataclasses.replace(costs, predictor=corrected).prefill_seconds(0, 8000) == 2 * before
    assert costs.prefill_seconds(0, 8000) == before


def test_a_prompt_in_a_step_of_decodes_is_one_step_and_must_fit() -> None:
    costs = PredictorCosts.of_model(MEASURED, LLAMA_70B, 512)
    step = Work(8, 8, 8000).with_chunk(4096, 504, True)
    assert costs.inline_seconds(8, 8000, 4096, 4600) == MEASURED.seconds(step)
    assert costs.inline_seconds(8, 8000, 4096, 4601) == math.inf
    four = PredictorCosts.of_model(A100_TP8, LLAMA_70B, 512, ParallelPlan(context=4))
    share = Work(2, 2, 2000).with_sharded(0, 2000, 4, samples=True)
    assert four.inline_seconds(8, 8000, 0, 2000) == A100_TP8.seconds(share)


def test_bytes_are_those_of_keys_and_values() -> None:
    """LLaMA2-70B: 80 layers, 8 KV heads of 128, keys and values, two bytes each: 320 KiB a token."""
    costs = PredictorCosts.of_model(A100_TP8, LLAMA_70B, 8192, ParallelPlan(tensor=8))
    assert costs.transfer_bytes(1000) == 1000 * 80 * 8 * 128 * 2 * 2


def test_batches_beyond_the_largest_step_take_several() -> None:
    costs = PredictorCosts.of_model(MEASURED, LLAMA_70B, 512)
    assert costs.decode_seconds(1024, 0) == pytest.approx(2 * MEASURED.seconds(Work(512, 512, 0)))


def test_a_token_takes_a_step_in_each_stage() -> None:
    one, four = (PredictorCosts.of_model(A100_TP8, LLAMA_70B, 512, ParallelPlan(stage=n)) for n in (1, 4))
    assert four.decode_seconds(8, 8000) == pytest.approx(4 * one.decode_seconds(8, 8000))
    last = A100_TP8.seconds(Work().with_chunk(1536, 464, True))
    assert four.prefill_seconds(0, 2000) == pytest.approx(one.prefill_seconds(0, 2000) + 3 * last)


def test_context_ranks_share_decodes_and_prompts_take_what_is_said() -> None:
    plan = ParallelPlan(context=4)
    costs = PredictorCosts.of_model(A100_TP8, LLAMA_70B, 512, plan, prompt_seconds=lambda start, stop: stop - start)
    assert costs.prefill_seconds(10, 2000) == 1990
    assert costs.decode_seconds(8, 8000) == pytest.approx(A100_TP8.seconds(Work(2, 2, 2000)))


@pytest.mark.parametrize(("chunk", "token_bytes"), [(0, 1.0), (512, 0.0), (512, math.nan), (10**9, 1.0)])
def test_costs_that_can_not_be(chunk: int, token_bytes: float) -> None:
    with pytest.raises(ValueError, match=r"must be|can be predicted"):
        PredictorCosts(MEASURED, chunk, token_bytes)


prompts = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=4).map(lambda parts: keys_of(*parts))


@given(st.lists(st.tuples(st.sampled_from("abc"), prompts), max_size=12), prompts, st.randoms(use_true_random=False))
def test_pending_blocks_are_those_of_all_prompts(
    added: list[tuple[str, np.ndarray]], asked: np.ndarray, random
) -> None:
    """As if each instance had the set of its prompts' keys, whatever the order in which prompts come and go."""
    pending, there = PendingBlocks(), list[tuple[str, np.ndarray]]()
    steps = [*added, *random.sample(added, len(added))]
    for i, (name, keys) in enumerate(steps):
        if i < len(added):
            pending.add(name, keys)
            there.append((name, keys))
        else:
            pending.remove(name, keys)
            at = next(j for j, each in enumerate(there) if each[0] == name and np.array_equal(each[1], keys))
            del there[at]
        expected = {}
        for each in "abc":
            known = {key for other, keys in there if other == each for key in keys.tolist()}
            blocks = next((j for j, key in enumerate(asked.tolist()) if key not in known), len(asked))
            expected |= {each: blocks} if blocks else {}
        assert pending.match(asked) == expected
    assert len(pending) == 0
