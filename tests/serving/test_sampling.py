"""Sampling: which tokens are possible, how often, from which seed, each row with its own parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers.generation import logits_process as hf

from longctx.serving import SamplingParams
from longctx.serving.request.sampling_params import SamplingLevel
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
GREEDY, TEMPERATURE, MASKS, FILTERS, LOGPROBS = SamplingLevel

NO_PENALTIES: dict[str, float] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

jit_sample = jax.jit(sample_tokens, static_argnums=1)
jit_kept, jit_penalise = jax.jit(_kept, static_argnums=2), jax.jit(_penalise)


def controls_of(params: list[SamplingParams], samples: list[int] | None = None) -> Controls:
    made: dict[tuple[int, int], Any] = {}
    for p, i in (keys := list(zip(params, samples or [0] * len(params), strict=True))):
        if (id(p), i) not in made:  # thousands of rows may have the same parameters
            made[id(p), i] = Controls.row(p, p.seed or 0, i)
    return Controls.unpack(jnp.asarray(np.stack([made[id(p), i] for p, i in keys])))


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
    """The rule in NumPy for one row of logits after penalties; ties with the last kept token are kept."""
    logits = logits.astype(float) / params.temperature
    least = np.sort(logits)[::-1][min(params.top_k or len(logits), len(logits)) - 1]
    weights = np.exp(logits - logits.max())
    of_top_k = np.where(logits >= least, weights, 0)
    before = np.array([of_top_k[logits > x].sum() for x in logits])
    in_top_p = (before < params.top_p * of_top_k.sum()) | (params.top_p == 1)
    return {int(t) for t in np.flatnonzero((logits >= least) & in_top_p & (weights >= params.min_p))}


def kept_by_us(logits: np.ndarray, params: list[SamplingParams]) -> list[set[int]]:
    controls = controls_of(params)
    scaled = jnp.asarray(logits) / controls.temperature[:, None]
    mask = jit_kept(scaled - scaled.max(-1, keepdims=True), controls, FILTERS)
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
    params = random_params(seed)
    assert kept_by_us(logits, params) == [kept(row, p) for row, p in zip(logits, params, strict=True)]


@pytest.mark.parametrize(
    ("p", "expected"),
    [(1.0, {0, 1, 2, 3}), (0.01, {1}), (0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 2, 3})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(p: float, expected: set[int]) -> None:
    logits = np.log(PROBABILITIES)[None].astype(np.float32)
    assert kept_by_us(logits, [SamplingParams(temperature=1.0, top_p=p)]) == [expected]


DRAWS = 3_000
EXTREME = np.array([3e38, -3e38, 0, 3e38, -np.inf, 1e30], np.float32)
CASES: dict[str, tuple[np.ndarray, SamplingParams]] = {
    "temperature": (np.log(PROBABILITIES), SamplingParams(temperature=1.0)),
    "cold": (np.log(PROBABILITIES), SamplingParams(temperature=0.3)),
    "many tokens": (np.linspace(-3, 3, 100), SamplingParams(temperature=1.5)),
    "rare tokens": (np.array([0.0, -7.0, -7.5, -8.0, -30.0]), SamplingParams(temperature=1.0)),
    "equal": (np.zeros(97), SamplingParams(temperature=0.01)),
    "masked": (np.array([-np.inf, 0.0, 1.0, -np.inf, 0.5]), SamplingParams(temperature=1.0)),
    "extreme": (EXTREME, SamplingParams(temperature=1e-6)),
    "min_p": (np.linspace(-4, 0, 20), SamplingParams(temperature=1.0, min_p=0.3)),
    "top_k": (np.linspace(-4, 0, 20), SamplingParams(temperature=2.0, top_k=7)),
    "top_k with ties": (np.repeat([0.0, -1.0, -2.0], 5), SamplingParams(temperature=1.0, top_k=7)),
    "top_p": (np.linspace(-4, 0, 20), SamplingParams(temperature=1.0, top_p=0.8)),
    "top_p with ties": (np.repeat([0.0, -1.0, -2.0], 5), SamplingParams(temperature=1.0, top_p=0.85)),
    "top_p, masked": (np.array([-np.inf, 0.0, 1.0, -np.inf, 0.5]), SamplingParams(temperature=1.0, top_p=0.99)),
    "all": (np.linspace(-6, 0, 100), SamplingParams(temperature=1.3, top_k=70, top_p=0.9, min_p=0.02)),
    "penalties and biases": (
        np.linspace(-2, 2, 9),
        SamplingParams(
            temperature=0.8,
            top_k=6,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.2,
            logit_bias=((0, 4.0), (8, -1.0)),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_the_probabilities(name: str) -> None:
    """A chi-square test against the definition in float64; the draws are fixed, so the outcome is always the same."""
    given_logits, params = CASES[name]
    given_logits = np.pad(given_logits, (0, 100 - len(given_logits)), constant_values=-np.inf)  # one program
    size, prompt, output = len(given_logits), [1, 2], [2, 2, 3]
    has_history = params.has_penalties
    seen = count_tokens(np.array(prompt * has_history, int), np.array(output * has_history, int), size)
    logits = changed_logits(given_logits.astype(np.float32), prompt * has_history, output * has_history, params)
    possible = sorted(kept(logits, params))
    weights = np.zeros(size)
    weights[possible] = np.exp((logits[possible] - logits.max()) / params.temperature)
    expected = weights / weights.sum()

    controls = controls_of([params] * DRAWS)._replace(seed=jnp.full(DRAWS, 5, jnp.int32))
    bias = LogitBias(*(np.tile(x, (DRAWS, 1)) for x in LogitBias.row(params)))
    rows, positions = np.tile(given_logits.astype(np.float32), (DRAWS, 1)), np.arange(DRAWS, dtype=np.int32)
    tokens = np.asarray(jit_sample(rows, FILTERS, controls, positions, np.tile(seen, (DRAWS, 1)), bias))
    counts = np.bincount(tokens, minlength=size)
    assert set(np.flatnonzero(counts)) <= set(possible)
    if (alone := expected > 5 / DRAWS).sum() > 1:  # rarer tokens count together
        rest = [x[~alone].sum() for x in (counts, expected * DRAWS)]
        found, wanted = (
            [*x[alone], *([y] if rest[1] else [])] for x, y in zip((counts, expected * DRAWS), rest, strict=True)
        )
        assert stats.chisquare(found, np.array(wanted) / np.sum(wanted) * np.sum(found)).pvalue > 1e-3
    if params.level == TEMPERATURE:
        np.testing.assert_array_equal(jit_sample(rows, TEMPERATURE, controls, positions), tokens)


def test_draws_of_rows_are_independent() -> None:
    """Neighbours in position, completion and seed: pairs of their tokens are as frequent as the product says."""
    count, size = 10_000, 4
    number = np.arange(count, dtype=np.int32)
    logits = np.zeros((count, size), np.float32)
    controls = controls_of([SamplingParams(temperature=1.0)] * count)
    first = np.asarray(jit_sample(logits, TEMPERATURE, controls._replace(seed=number), np.zeros(count, np.int32)))
    for changed in (
        {"seed": number + 1},
        {"seed": number, "completion": np.ones(count, np.int32)},
        {"seed": number, "completion": np.zeros(count, np.int32), "positions": np.ones(count, np.int32)},
    ):
        positions = changed.pop("positions", np.zeros(count, np.int32))
        second = np.asarray(jit_sample(logits, TEMPERATURE, controls._replace(**changed), positions))
        pairs = np.bincount(first * size + second, minlength=size**2)
        assert stats.chisquare(pairs).pvalue > 1e-3


@given(st.integers(0, 2**31 - 1), st.booleans())
def test_no_token_is_drawn_that_is_not_kept(seed: int, ties: bool) -> None:
    """And where -inf masks tokens, as guided decoding does, none of those."""
    logits, _ = random_rows(seed, ties)
    rng = np.random.default_rng(seed)
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[np.arange(ROWS), rng.integers(0, VOCAB, ROWS)] = 0.0
    params = random_params(seed, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    seen, positions = np.zeros(logits.shape, np.uint32), rng.integers(0, 2**31 - 1, ROWS).astype(np.int32)
    tokens = np.asarray(jit_sample(logits, FILTERS, controls_of(params), positions, seen))
    for row, token, p in zip(logits, tokens, params, strict=True):
        assert np.isfinite(row[token])
        assert token in kept(row, p)


@given(st.integers(0, 2**31 - 1))
@settings(max_examples=20)
def test_a_row_has_the_same_token_at_every_level(seed: int) -> None:
    """A batch is sampled at the highest level of its rows."""
    logits, _ = random_rows(seed)
    none: Any = {"top_k": None, "top_p": 1.0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    params = [*random_params(seed, **none)[1:], SamplingParams()]
    assert [p.level for p in params] == [TEMPERATURE] * (ROWS - 1) + [GREEDY]
    seen, positions = np.zeros(logits.shape, np.uint32), np.arange(ROWS, dtype=np.int32)
    tokens = [np.asarray(jit_sample(logits, x, controls_of(params), positions, seen)) for x in SamplingLevel]
    np.testing.assert_array_equal(tokens[TEMPERATURE], tokens[FILTERS])
    np.testing.assert_array_equal(tokens[TEMPERATURE], tokens[MASKS])
    np.testing.assert_array_equal(tokens[TEMPERATURE], tokens[LOGPROBS])
    assert tokens[GREEDY][-1] == tokens[TEMPERATURE][-1] == logits[-1].argmax()


@pytest.mark.parametrize("level", SamplingLevel)
@pytest.mark.parametrize("row", [[0.0, np.nan, 1.0], [np.inf, 0.0, np.nan], [0.0, np.inf, 1.0], [-np.inf] * 3], ids=str)
def test_a_row_without_a_distribution_has_no_token(level: SamplingLevel, row: list[float]) -> None:
    params = SamplingParams() if level == GREEDY else SamplingParams(temperature=1.0, min_p=0.1)
    logits, seen = np.array([row, [0.0, 9.0, 1.0]], np.float32), np.zeros((2, 3), np.uint32)
    tokens = jit_sample(logits, level, controls_of([params, SamplingParams()]), np.zeros(2, np.int32), seen)
    assert tokens.tolist() == [-1, 1]


@pytest.mark.parametrize(
    ("params", "level"),
    [
        ({}, GREEDY),
        ({"temperature": 1.0, "min_p": 0.1, "seed": 3, "n": 2}, TEMPERATURE),
        ({"temperature": 1.0, "top_k": 5}, FILTERS),
        ({"temperature": 1.0, "top_p": 0.9}, FILTERS),
        ({"presence_penalty": 1.0}, FILTERS),
        ({"logit_bias": ((1, 2.0),)}, FILTERS),
        ({"grammar": "start: /a+/"}, MASKS),
        ({"allowed_token_ids": (1, 2), "temperature": 1.0}, MASKS),
        ({"bad_words": ("no",)}, MASKS),
        ({"min_tokens": 3}, MASKS),
        ({"logprobs": 0, "min_tokens": 3}, LOGPROBS),
        ({"logprobs": 0}, LOGPROBS),
        ({"prompt_logprobs": 1}, GREEDY),
    ],
    ids=str,
)
def test_the_level_is_the_lowest_that_computes_what_is_asked_for(params: dict, level: SamplingLevel) -> None:
    assert SamplingParams(**params).level == level


@given(st.integers(0, 2**31 - 1))
@settings(max_examples=20)
def test_masked_tokens_are_those_of_logits_without_the_others(seed: int) -> None:
    logits, seen = random_rows(seed)
    params, positions = random_params(seed), np.arange(ROWS, dtype=np.int32)
    is_allowed = np.random.default_rng(seed).random(logits.shape) < 0.5
    is_allowed[:, 3] = True
    bits = np.zeros((ROWS, 32), bool)
    bits[:, :VOCAB] = is_allowed
    mask = np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)
    controls = controls_of(params)
    expected = jit_sample(
        np.where(is_allowed, _penalised(logits, seen, params), -np.inf),
        FILTERS,
        controls_of([dataclasses.replace(p, **NO_PENALTIES) for p in params]),
        positions,
        seen,
    )
    for level in (FILTERS, LOGPROBS):
        tokens = jit_sample(logits, level, controls, positions, seen, None, mask)
        np.testing.assert_array_equal(tokens, expected)
        assert is_allowed[np.arange(ROWS), tokens].all()
    empty = np.zeros_like(mask)
    assert jit_sample(logits, MASKS, controls, positions, seen, None, empty).tolist() == [-1] * ROWS
    plain = controls_of([SamplingParams(temperature=1.0, seed=number) for number in range(ROWS)])
    np.testing.assert_array_equal(
        jit_sample(logits, MASKS, plain, positions, seen, None, mask),
        jit_sample(logits, FILTERS, plain, positions, np.zeros_like(seen), None, mask),
    )
    np.testing.assert_array_equal(
        jit_sample(logits, FILTERS, controls, positions, seen),
        jit_sample(logits, FILTERS, controls, positions, seen, None, np.full_like(mask, -1)),
    )


def _penalised(logits: np.ndarray, seen: np.ndarray, params: list[SamplingParams]) -> np.ndarray:
    """Logits with penalties."""
    return np.asarray(jit_penalise(logits, seen, controls_of(params)))


def test_a_token_depends_on_seed_completion_and_position_only() -> None:
    def draws(seed: int, sample: int, others: int) -> list[int]:
        logits, seen = random_rows(others)
        logits[2], seen[2] = np.linspace(0, 2, VOCAB), 0
        params = random_params(others)
        params[2] = SamplingParams(temperature=1.0, seed=seed)
        controls = controls_of(params, [0, 0, sample, 0, 0, 0])
        positions = np.arange(20)[:, None] + np.array([5, 9, 0, 1, 1, 3])
        return [int(jit_sample(logits, FILTERS, controls, at, seen)[2]) for at in positions]

    assert draws(1, 0, others=0) == draws(1, 0, others=7)
    assert draws(1, 0, 0) != draws(2, 0, 0)
    assert draws(1, 0, 0) != draws(1, 1, 0)
    assert len(set(draws(1, 0, 0))) > 3


def test_temperature_zero_takes_the_most_probable_token() -> None:
    logits, seen = random_rows(0, ties=True)
    params = [SamplingParams()] * ROWS
    for level in SamplingLevel:
        tokens = jit_sample(logits, level, controls_of(params), np.zeros(ROWS, np.int32), seen)
        np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_penalties_change_the_most_probable_token() -> None:
    logits = np.tile(np.array([2.0, 1.9, -1.0, 0.0], np.float32), (3, 1))
    seen = np.zeros((3, 4), np.uint32)
    seen[:, 0] = [IN_PROMPT, IN_PROMPT, IN_OUTPUT]
    params = [
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(presence_penalty=1.0),  # applies to tokens of the output only
        SamplingParams(presence_penalty=1.0),
    ]
    tokens = jit_sample(logits, FILTERS, controls_of(params), np.zeros(3, np.int32), seen)
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
    drawn = jit_sample(logits, FILTERS, controls_of(params), np.zeros(ROWS, np.int32), np.stack(seen), bias)
    for token, changed in zip(np.asarray(drawn), expected, strict=True):
        assert changed[token] >= changed.max() - 1e-4


def test_counts_are_exact_beyond_a_million() -> None:
    """A token that came 2**21 + 1 times is one penalty below one that came 2**21 times."""
    params = SamplingParams(frequency_penalty=2**-10)
    logits = np.array([[0.0, 0.0, -4096.0]], np.float32)
    for more in (0, 1):
        output = np.repeat([0, 1], [2**21 + more, 2**21 + 1 - more])
        seen = count_tokens(np.array([2]), output, 3)[None]
        assert seen[0, 2] == IN_PROMPT
        assert seen[0, :2].tolist() == [2 * (2**21 + more), 2 * (2**21 + 1 - more)]
        tokens = jit_sample(logits, FILTERS, controls_of([params]), np.zeros(1, np.int32), seen)
        assert tokens.tolist() == [more]


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
    drawn = jit_sample(logits, FILTERS, controls_of(params), np.zeros(4, np.int32), seen, bias)
    assert drawn.tolist() == [0, 1, 3, 3]


def test_log_probabilities_are_those_of_the_logits() -> None:
    logits, _ = random_rows(4)
    tokens = np.arange(ROWS, dtype=np.int32)
    logprobs, top_tokens, top_logprobs = token_logprobs(logits, tokens, 3)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, expected[tokens, tokens], atol=1e-5)
    np.testing.assert_array_equal(top_tokens, np.argsort(-logits, -1)[:, :3])
    np.testing.assert_allclose(top_logprobs, -np.sort(-expected, -1)[:, :3], atol=1e-5)
