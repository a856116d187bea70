"""Sampling: which tokens are possible, how often, from which seed, each row with its own parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from longctx.serving import SamplingParams
from longctx.serving.runner.sampler import (
    IN_OUTPUT,
    IN_PROMPT,
    Controls,
    LogitBias,
    _kept,
    _penalise,
    count_tokens,
    sample_tokens,
    token_logprobs,
)

ROWS, VOCAB = 6, 12
PROBABILITIES = np.array([0.1, 0.4, 0.2, 0.3])

jit_sample = jax.jit(sample_tokens, static_argnums=4)
jit_kept, jit_penalise = jax.jit(_kept), jax.jit(_penalise)


def controls_of(params: list[SamplingParams], samples: list[int] | None = None) -> Controls:
    rows = [Controls.row(p, p.seed or 0, i) for p, i in zip(params, samples or [0] * len(params), strict=True)]
    return Controls.unpack(jnp.asarray(np.stack(rows)))


def random_rows(seed: int, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[R, V]`, and how often tokens have been seen, `[R, V]`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    return np.round(logits) if ties else logits, rng.integers(0, 9, (ROWS, VOCAB)).astype(np.uint32)


def random_params(seed: int, **fixed: Any) -> list[SamplingParams]:
    rng = np.random.default_rng(seed)
    return [
        SamplingParams(
            **{
                "temperature": float(rng.uniform(0.3, 2)),
                "top_k": int(rng.integers(1, VOCAB + 3)) if rng.random() < 0.7 else None,
                "top_p": float(rng.uniform(0.05, 1)) if rng.random() < 0.7 else 1.0,
                "min_p": float(rng.uniform(0, 0.5)) if rng.random() < 0.7 else 0.0,
                "repetition_penalty": float(rng.uniform(0.5, 2)),
                "presence_penalty": float(rng.uniform(-2, 2)),
                "frequency_penalty": float(rng.uniform(-2, 2)),
                "seed": int(rng.integers(2**31)),
                **fixed,
            }
        )
        for _ in range(ROWS)
    ]


def kept(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """The rule in plain Python for one row of logits after penalties; ties with the last kept token are kept."""
    logits = logits.astype(float) / params.temperature
    order = np.argsort(-logits, kind="stable")
    count = min(params.top_k or VOCAB, len(logits))
    weights = np.exp(logits[order] - logits.max())[:count]
    weights /= weights.sum()
    total = 0.0
    for i in range(count):
        total += weights[i]
        if total >= params.top_p:
            count = i + 1
            break
    least = logits[order[count - 1]]
    likely = np.exp(logits - logits.max()) >= params.min_p
    return {int(t) for t in np.flatnonzero((logits >= least) & likely)}


def kept_by_us(logits: np.ndarray, params: list[SamplingParams]) -> list[set[int]]:
    controls = controls_of(params)
    scaled = jnp.asarray(logits) / controls.temperature[:, None]
    mask = jit_kept(scaled - scaled.max(-1, keepdims=True), controls)
    return [{int(t) for t in np.flatnonzero(row)} for row in np.asarray(mask)]


@given(st.integers(0, 2**31 - 1))
def test_possible_tokens_follow_the_rule(seed: int) -> None:
    logits, _ = random_rows(seed)
    params = random_params(seed)
    assert kept_by_us(logits, params) == [kept(row, p) for row, p in zip(logits, params, strict=True)]


@given(st.integers(0, 2**31 - 1))
def test_filters_and_penalties_equal_those_of_transformers(seed: int) -> None:
    logits, seen = random_rows(seed)
    params = random_params(seed)
    ours = np.asarray(jit_penalise(logits, seen, controls_of(params)))
    we_keep = kept_by_us(ours, params)
    for i, p in enumerate(params):
        tokens = torch.tensor(np.flatnonzero(seen[i]))[None]
        scores = torch.tensor(logits[i])[None]
        theirs = hf.RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(tokens, scores) if tokens.numel() else scores
        count = torch.tensor((seen[i] // 2).astype(int))  # transformers has no such penalties
        theirs = theirs - p.presence_penalty * (count > 0) - p.frequency_penalty * count
        np.testing.assert_allclose(ours[i], theirs[0].numpy(), rtol=1e-6, atol=1e-6)
        warpers: list[Any] = [hf.TemperatureLogitsWarper(p.temperature)]
        warpers += [hf.TopKLogitsWarper(p.top_k)] if p.top_k else []
        warpers += [hf.TopPLogitsWarper(p.top_p)] if p.top_p < 1 else []
        warpers += [hf.MinPLogitsWarper(p.min_p)] if p.min_p > 0 else []
        for warper in warpers:
            theirs = warper(tokens, theirs)
        assert {int(t) for t in torch.isfinite(theirs[0]).nonzero()[:, 0]} == we_keep[i]


@given(st.integers(0, 2**31 - 1))
@settings(max_examples=10)
def test_ties_with_the_last_token_are_kept(seed: int) -> None:
    logits, _ = random_rows(seed, ties=True)
    params = random_params(seed, top_p=1.0)
    assert kept_by_us(logits, params) == [kept(row, p) for row, p in zip(logits, params, strict=True)]


@pytest.mark.parametrize(
    ("p", "expected"),
    [(1.0, {0, 1, 2, 3}), (0.01, {1}), (0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 2, 3})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(p: float, expected: set[int]) -> None:
    logits = np.log(PROBABILITIES)[None].astype(np.float32)
    assert kept_by_us(logits, [SamplingParams(temperature=1.0, top_p=p)]) == [expected]


@given(st.floats(0.2, 3.0), st.integers(0, 2**31 - 1))
@settings(max_examples=10)
def test_frequencies_follow_the_temperature(temperature: float, seed: int) -> None:
    count = 4000
    params = SamplingParams(temperature=temperature, top_k=3, seed=seed)
    controls = Controls.unpack(jnp.broadcast_to(jnp.asarray(Controls.row(params, seed, 0)), (count, 9)))
    logits = np.broadcast_to(np.log(PROBABILITIES).astype(np.float32), (count, 4))
    seen = np.zeros((count, 4), np.uint32)
    tokens = jit_sample(logits, seen, controls, jnp.arange(count), 0).tokens
    weights = np.where(PROBABILITIES > 0.1, PROBABILITIES, 0) ** (1 / temperature)
    frequencies = np.bincount(tokens, minlength=4) / count
    np.testing.assert_allclose(frequencies, weights / weights.sum(), rtol=0, atol=0.05)
    assert frequencies[0] == 0


def test_a_token_depends_on_seed_completion_and_position_only() -> None:
    def draws(seed: int, sample: int, others: int) -> list[int]:
        logits, seen = random_rows(others)
        logits[2], seen[2] = np.linspace(0, 2, VOCAB), 0
        params = random_params(others)
        params[2] = SamplingParams(temperature=1.0, seed=seed)
        controls = controls_of(params, [0, 0, sample, 0, 0, 0])
        positions = np.arange(20)[:, None] + np.array([5, 9, 0, 1, 1, 3])
        return [int(jit_sample(logits, seen, controls, at, 0).tokens[2]) for at in positions]

    assert draws(1, 0, others=0) == draws(1, 0, others=7)
    assert draws(1, 0, 0) != draws(2, 0, 0)
    assert draws(1, 0, 0) != draws(1, 1, 0)
    assert len(set(draws(1, 0, 0))) > 3


def test_temperature_zero_takes_the_most_probable_token() -> None:
    logits, seen = random_rows(0, ties=True)
    params = [SamplingParams()] * ROWS
    drawn = jit_sample(logits, seen, controls_of(params), np.zeros(ROWS, np.int32), 0)
    np.testing.assert_array_equal(drawn.tokens, logits.argmax(-1))


def test_penalties_change_the_most_probable_token() -> None:
    logits = np.tile(np.array([2.0, 1.9, -1.0, 0.0], np.float32), (3, 1))
    seen = np.zeros((3, 4), np.uint32)
    seen[:, 0] = [IN_PROMPT, IN_PROMPT, IN_OUTPUT]
    params = [
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(presence_penalty=1.0),  # applies to tokens of the output only
        SamplingParams(presence_penalty=1.0),
    ]
    tokens = jit_sample(logits, seen, controls_of(params), np.zeros(3, np.int32), 0).tokens
    assert tokens.tolist() == [1, 0, 1]


def changed_logits(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """One row of logits after biases and penalties, token by token in float64."""
    logits = logits.astype(np.float64)
    for token, value in params.logit_bias:
        logits[token] += value
    for token in set(prompt + output):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= params.presence_penalty
    for token in output:
        logits[token] -= params.frequency_penalty
    return logits


@given(st.data())
def test_greedy_tokens_follow_biases_and_counts(data: st.DataObject) -> None:
    """Against a rule in NumPy, for rows with histories, penalties and biases of their own."""
    tokens = st.integers(0, VOCAB - 1)
    logits, _ = random_rows(data.draw(st.integers(0, 2**31 - 1)))
    params, seen, expected = [], [], []
    for row in logits:
        bias = data.draw(st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=VOCAB))
        penalties = {
            "presence_penalty": data.draw(st.floats(-2, 2, width=32)),
            "frequency_penalty": data.draw(st.floats(-2, 2, width=32)),
            "repetition_penalty": data.draw(st.floats(0.5, 2, width=32)),
        }
        params.append(SamplingParams(logit_bias=tuple(bias.items()), **penalties))
        prompt, output = (data.draw(st.lists(tokens, max_size=30)) for _ in range(2))
        seen.append(count_tokens(np.array(prompt, int), np.array(output, int), VOCAB))
        expected.append(changed_logits(row, prompt, output, params[-1]))
    bias = LogitBias(*map(np.stack, zip(*map(LogitBias.row, params), strict=True)))
    drawn = jit_sample(logits, np.stack(seen), controls_of(params), np.zeros(ROWS, np.int32), 2, bias)
    for token, changed in zip(np.asarray(drawn.tokens), expected, strict=True):
        assert changed[token] >= changed.max() - 1e-4
    # Log probabilities are those of the model.
    np.testing.assert_array_equal(drawn.top_tokens, np.argsort(-logits, -1)[:, :2])


def test_counts_are_exact_beyond_a_million() -> None:
    """A token that came 2**21 + 1 times is one penalty below one that came 2**21 times."""
    params = SamplingParams(frequency_penalty=2**-10)
    logits = np.array([[0.0, 0.0, -4096.0]], np.float32)
    for more in (0, 1):
        output = np.repeat([0, 1], [2**21 + more, 2**21 + 1 - more])
        seen = count_tokens(np.array([2]), output, 3)[None]
        assert seen[0, 2] == IN_PROMPT
        assert seen[0, :2].tolist() == [2 * (2**21 + more), 2 * (2**21 + 1 - more)]
        assert jit_sample(logits, seen, controls_of([params]), np.zeros(1, np.int32), 0).tokens.tolist() == [more]


def test_a_bias_bans_a_token_or_forces_it() -> None:
    logits = np.tile(np.array([3.0, 2.0, 1.0, 0.0], np.float32), (4, 1))
    params = [
        SamplingParams(),
        SamplingParams(logit_bias=((0, -100.0),)),
        SamplingParams(logit_bias=((3, 100.0), (0, 5))),
        SamplingParams(temperature=2.0, logit_bias=((3, 100.0),)),
    ]
    bias = LogitBias(*map(np.stack, zip(*map(LogitBias.row, params), strict=True)))
    seen = np.zeros((4, 4), np.uint32)
    drawn = jit_sample(logits, seen, controls_of(params), np.zeros(4, np.int32), 0, bias)
    assert drawn.tokens.tolist() == [0, 1, 3, 3]


def test_log_probabilities_ignore_filters_and_penalties() -> None:
    logits, seen = random_rows(4)
    drawn = jit_sample(logits, seen, controls_of(random_params(4)), np.zeros(ROWS, np.int32), 3)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(drawn.logprobs, expected[np.arange(ROWS), drawn.tokens], atol=1e-5)
    np.testing.assert_array_equal(drawn.top_tokens, np.argsort(-logits, -1)[:, :3])
    np.testing.assert_allclose(drawn.top_logprobs, -np.sort(-expected, -1)[:, :3], atol=1e-5)
    np.testing.assert_array_equal(drawn.logprobs, token_logprobs(logits, drawn.tokens, 3)[0])
