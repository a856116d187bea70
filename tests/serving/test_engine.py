"""The engine on one device: every request gets the tokens that a dense computation of it alone gives."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import MODEL, ORACLE, PARAMS, VOCAB, agrees, expected_tokens, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from models.hf_reference import Case, greedy
from workload import Workload

from longctx.models import ByteTokenizer, load_checkpoint
from longctx.parallel.mesh import make_mesh
from longctx.serving import Engine, EngineConfig, ParallelPlan, Request, SamplingParams

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, length).tolist() for length in (1, 8, 33, 17, 70)]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def test_tokens_of_the_oracle_vary() -> None:
    assert min(len(set(expected_tokens(prompt, GREEDY))) for prompt in PROMPTS) > 3


@pytest.mark.parametrize(
    "options", [{"chunking": "static:9", "run_ahead": 1}, {"run_ahead": 5, "admission": "optimistic"}]
)
def test_tokens_do_not_depend_on_batches_or_chunks(options: dict) -> None:
    engine = make_engine(**options)
    for _ in range(2):  # the second time finds the prompts in the cache
        outputs = engine.generate(PROMPTS, GREEDY)
        assert all(agrees(x.token_ids, prompt, GREEDY) for x, prompt in zip(outputs, PROMPTS, strict=True))
    assert [x.metrics.cached_tokens for x in outputs] == [0, 0, 32, 16, 64]
    alone = [engine.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert all(agrees(x.token_ids, prompt, GREEDY) for x, prompt in zip(alone, PROMPTS, strict=True))


@pytest.mark.parametrize(
    "changes", [{}, {"frequency_penalty": 0.5, "logit_bias": tuple((i, 0.25 * i) for i in range(0, VOCAB, 3))}]
)
def test_preempted_requests_are_recomputed(changes: dict) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, **changes)
    engine = make_engine(admission="optimistic", prefix_cache=False)
    prompts = [prompt[:17] for prompt in PROMPTS[1:]]
    outputs = engine.generate(prompts, params)
    assert engine.stats().preemptions > 0
    assert max(x.metrics.recomputed_tokens for x in outputs) > 0
    assert all(agrees(x.token_ids, prompt, params) for x, prompt in zip(outputs, prompts, strict=True))


def test_sampled_tokens_depend_on_the_seed_only() -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=1.5, top_k=20, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, min_p=0.01, seed=2, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, seed=1),
        SamplingParams(max_tokens=12, repetition_penalty=1.5, frequency_penalty=0.5, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, n=3, seed=1, frequency_penalty=1.0, logit_bias=((3, 2.0),)),
    ]
    engine = make_engine()
    expected = [expected_tokens(p, x, i) for p, x in zip(PROMPTS, params, strict=True) for i in range(x.n)]
    for _ in range(2):
        assert [x.token_ids for x in engine.generate(PROMPTS, params)] == expected
    single = [x.token_ids for p, params in zip(PROMPTS, params, strict=True) for x in engine.generate(p, params)]
    assert single == expected
    other = SamplingParams(max_tokens=12, temperature=1.5, top_k=20, seed=3, ignore_eos=True)
    assert engine.generate(PROMPTS[0], other)[0].token_ids != expected[0]


def test_engine_seeds_reproduce_sampled_tokens() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    first, again, other = (
        [x.token_ids for x in make_engine(seed=seed).generate([PROMPTS[1]] * 2, params)] for seed in (0, 0, 1)
    )
    assert first == again != other
    assert first[0] != first[1]


@settings(max_examples=4)
@given(
    seed=st.integers(0, 2**20),
    run_ahead=st.integers(1, 4),
    admission=st.sampled_from(["reserve", "optimistic"]),
    prefix_cache=st.booleans(),
    policy=st.sampled_from(["fcfs", "edf", "srpf", "lrs", "lrs_relative", "ilrs"]),
    chunking=st.sampled_from(["static", "static:7", "adaptive"]),
)
def test_random_workloads_give_the_oracles_tokens(
    seed: int, run_ahead: int, admission: str, prefix_cache: bool, policy: str, chunking: str
) -> None:
    engine = make_engine(
        run_ahead=run_ahead, admission=admission, prefix_cache=prefix_cache, policy=policy, chunking=chunking
    )
    Workload(engine, seed, expected_tokens, prime=ORACLE.prime).run(50)


def dense_logprobs(params: dict, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(MODEL(params, tokens), -1))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
def test_logprobs_match_a_dense_computation(dtype: object) -> None:
    """The prompt is prefilled in several chunks; bf16 is within 2.5 x the error of a dense run plus 2e-3."""
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    prompt = PROMPTS[4]
    (output,) = make_engine(params, buckets=(32,)).generate(
        prompt, SamplingParams(max_tokens=9, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    )
    tokens = np.array(prompt + output.token_ids)
    exact = dense_logprobs(jax.tree.map(lambda x: x.astype(jnp.float32), params), tokens)
    allowed = 1e-4 if dtype == jnp.float32 else 2.5 * np.abs(dense_logprobs(params, tokens) - exact).max() + 2e-3
    logprobs = [*(output.prompt_logprobs or []), *(output.logprobs or [])]
    assert len(logprobs) == len(tokens) - 1
    for position, (logprob, top) in enumerate(logprobs, 1):
        before = exact[position - 1]
        assert abs(logprob - before[tokens[position]]) <= allowed
        assert len(top) == (2 if position < len(prompt) else 3)
        for token, value in top:
            assert abs(value - before[token]) <= allowed
        best = np.sort(before)[::-1][: len(top)]
        np.testing.assert_allclose([value for _, value in top], best, atol=allowed)


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        pytest.param(Case(), ParallelPlan(), marks=pytest.mark.slow),
        (Case("qwen2", kv_heads=4, tied=True, rope="yarn"), ParallelPlan(tensor=4)),
        pytest.param(Case(layers=5), ParallelPlan(3, 1, 2), marks=pytest.mark.slow),
        pytest.param(Case(layers=5), ParallelPlan(2, 2, 2, rank_tokens=24), marks=pytest.mark.slow),
        pytest.param(Case("qwen3", kv_heads=1, tied=True, head_dim=16), ParallelPlan(tensor=2), marks=pytest.mark.slow),
        pytest.param(Case("qwen3", head_dim=16), ParallelPlan(3, 2, 1, rank_tokens=24), marks=pytest.mark.slow),
        pytest.param(Case("mistral", kv_heads=4, head_dim=16), ParallelPlan(3, 1, 2), marks=pytest.mark.slow),
        pytest.param(
            Case(rope="llama3"), ParallelPlan(3, 2, 1, exchange="kvp", rank_tokens=24), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_tokens_equal_those_of_transformers(case: Case, plan: ParallelPlan, tmp_path: Path) -> None:
    reference = case.write(tmp_path)
    mesh = make_mesh(plan.stage, plan.context, plan.tensor)
    model, params = load_checkpoint(tmp_path, mesh)
    config = EngineConfig(page_size=8, num_pages=24, max_running=4, token_budget=32, buckets=(32,))
    prompts = [RNG.integers(3, case.vocab_size, length) for length in (5, 40, 64, 23)]
    engine = Engine(model, params, config, mesh, plan=plan)
    outputs = engine.generate([x.tolist() for x in prompts], GREEDY)
    params = jax.device_get(params)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = greedy(reference, prompt[None], 12)[0].tolist()
        if output.token_ids != expected:
            at = next(i for i, (a, b) in enumerate(zip(output.token_ids, expected, strict=True)) if a != b)
            second, best = np.sort(np.asarray(model(params, np.array([*prompt, *expected[:at]]))[-1]))[-2:]
            assert best - second < 1e-4


def test_text_ends_at_stop_strings_and_stop_tokens() -> None:
    engine = make_engine()
    tokens = expected_tokens(PROMPTS[2], GREEDY)
    stop = tokens[5]
    (output,) = engine.generate(PROMPTS[2], SamplingParams(max_tokens=12, stop_token_ids=(stop,), ignore_eos=True))
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    assert output.finish_reason == "stop"
    with_text = Engine(MODEL, PARAMS, engine.config, tokenizer=ByteTokenizer())
    text = bytes(tokens).decode()
    params = SamplingParams(max_tokens=12, stop=(text[4:6],), ignore_eos=True)
    pieces = []
    for event in with_text.stream(PROMPTS[2], params):
        pieces.append(event.text)
    assert event.output is not None
    assert "".join(pieces) == event.output.text == text[: text.index(text[4:6])]
    assert event.output.finish_reason == "stop"
    (whole,) = with_text.generate(PROMPTS[2], GREEDY)
    assert whole.text == text
    assert whole.finish_reason == "length"


def test_a_cancel_leaves_the_other_requests_of_a_batch_alone() -> None:
    """A request is cancelled in the middle of a batch, and the others end as usual."""
    engine = make_engine()
    ids = [engine.submit(Request(prompt, GREEDY)) for prompt in PROMPTS[:4]]
    engine.step()
    engine.cancel(ids[2])
    outputs = {}
    while engine.has_work:
        outputs |= {event.request_id: event.output for event in engine.step() if event.output is not None}
    assert [outputs[i].finish_reason for i in ids] == ["length", "length", "cancelled", "length"]
    assert all(agrees(outputs[i].token_ids, PROMPTS[n], GREEDY) for n, i in enumerate(ids) if n != 2)
