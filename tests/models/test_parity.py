"""Against Hugging Face transformers, on random checkpoints that it wrote."""

import itertools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_reference import ROPES, Case, greedy, logits
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longctx.models import load_checkpoint
from longctx.models.rope_config import rope_from_hf

# Every pair of values of any two columns of Llama and Qwen2 occurs; Llama 2 is the first, Llama 3.3 the fifth.
PAIRWISE = [
    Case("llama", kv_heads=8, tied=False, rope="none"),
    Case("qwen2", kv_heads=8, tied=True, rope="llama3"),
    Case("llama", kv_heads=8, tied=True, rope="yarn"),
    Case("qwen2", kv_heads=2, tied=False, rope="none"),
    Case("llama", kv_heads=2, tied=False, rope="llama3"),
    Case("qwen2", kv_heads=2, tied=True, rope="yarn"),
    Case("llama", kv_heads=1, tied=True, rope="none"),
    Case("qwen2", kv_heads=1, tied=True, rope="llama3"),
    Case("llama", kv_heads=1, tied=False, rope="yarn"),
    Case("qwen3", kv_heads=2, tied=True, rope="none", head_dim=16),
    Case("qwen3", kv_heads=8, tied=False, rope="yarn", head_dim=8),
    Case("mistral", kv_heads=2, tied=False, rope="none"),
    Case("mistral", kv_heads=1, tied=False, rope="llama3", head_dim=16),
]
# Sequences are longer than the windows.
WINDOWS = [
    Case("mistral", own=(("sliding_window", 24),)),
    Case("qwen2", own=(("use_sliding_window", True), ("sliding_window", 24), ("max_window_layers", 2))),
    Case("qwen3", own=(("use_sliding_window", True), ("sliding_window", 17), ("max_window_layers", 1)), head_dim=16),
    Case("gemma3", tied=True, own=(("sliding_window", 24), ("query_pre_attn_scalar", 64)), layers=7, head_dim=16),
    Case("gemma3", kv_heads=1, rope="linear", own=(("sliding_window", 5), ("sliding_window_pattern", 2)), head_dim=8),
    Case("llama", own=(("attention_bias", True),)),
]
FEW = [PAIRWISE[i] for i in (0, 1, 5, 8, 9, 12)]  # every value of any column
GRID = [
    Case(*values)
    for values in itertools.product(["llama", "qwen2"], [8, 2, 1], [False, True], ["none", "llama3", "yarn"])
]
REST = [pytest.param(case, marks=pytest.mark.slow) for case in dict.fromkeys(PAIRWISE + GRID) if case not in FEW]


@pytest.mark.parametrize("case", [*FEW, *WINDOWS, *REST], ids=lambda case: str(case))
def test_float32_logits_and_greedy_tokens(case: Case, tmp_path: Path) -> None:
    reference = case.write(tmp_path)
    model, params = load_checkpoint(tmp_path)
    prompt = np.random.default_rng(0).integers(case.vocab_size, size=(2, 32))
    expected = greedy(reference, prompt, 64)
    assert all(len(set(row)) > 8 for row in expected), "the reference must vary to show anything"

    # Given the reference's tokens, predicting each next one is the same as generating them.
    sequence = np.concatenate([prompt, expected], axis=1)
    ours, theirs = np.asarray(model(params, sequence)), logits(reference, sequence)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert_tokens_agree(ours[:, 31:-1].argmax(-1), expected, theirs[:, 31:-1])


def assert_tokens_agree(tokens: np.ndarray, expected: np.ndarray, reference_logits: np.ndarray) -> None:
    """Equal, unless at the first difference the reference itself all but hesitates."""
    for row, expected_row, row_logits in zip(tokens, expected, reference_logits, strict=True):
        different = np.flatnonzero(row != expected_row)
        if different.size:
            second, first = np.sort(row_logits[different[0]])[-2:]
            assert first - second < 1e-4


@pytest.mark.parametrize("case", [*PAIRWISE[4:10:5], WINDOWS[3]], ids=lambda case: str(case))
def test_bfloat16_is_as_good_as_transformers(case: Case, tmp_path: Path) -> None:
    half = case.build().to(torch.bfloat16)
    half.save_pretrained(tmp_path)
    exact = type(half).from_pretrained(tmp_path, dtype=torch.float32)
    model, params = load_checkpoint(tmp_path)
    assert params["embed"].dtype == jnp.bfloat16

    tokens = np.random.default_rng(0).integers(case.vocab_size, size=(2, 64))
    truth = logits(exact, tokens)
    our_error = np.abs(np.asarray(model(params, tokens)) - truth)
    their_error = np.abs(logits(half, tokens) - truth)
    assert our_error.max() <= 2.5 * their_error.max() + 2e-3
    assert our_error.mean() <= 2.5 * their_error.mean() + 2e-3


@pytest.mark.parametrize(
    "rope",
    [
        {**ROPES["llama3"], "rope_theta": 5e5, "original_max_position_embeddings": 8192},
        {**ROPES["yarn"], "rope_theta": 1e6, "original_max_position_embeddings": 32768},
        {**ROPES["yarn"], "rope_theta": 150000.0, "factor": 32.0, "truncate": False},
        {**ROPES["yarn"], "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.7},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    ],
)
def test_scaled_frequencies(rope: dict[str, float]) -> None:
    lengths = {"head_dim": 128, "max_position_embeddings": 131072}
    config = transformers.LlamaConfig(**lengths, rope_parameters=dict(rope))
    expected, expected_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    ours = rope_from_hf(config.to_dict())
    np.testing.assert_allclose(ours.inverse_frequencies(128), expected.numpy(), rtol=2e-6)
    assert ours.attention_factor == pytest.approx(expected_factor, rel=1e-12)
