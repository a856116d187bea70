"""The training of the built-in model: its batches, its initial heads, and how it resumes."""

import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

from longctx.models import load_checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(importlib.import_module("tiny_batches"), "TOKENS_PER_BATCH", 768)


@pytest.mark.parametrize("step", [0, 400, 1000])
def test_documents_contain_the_answers_to_their_questions(step: int) -> None:
    import tiny_batches

    batch = tiny_batches.make_batch(step)
    assert all(np.array_equal(a, b) for a, b in zip(batch, tiny_batches.make_batch(step), strict=True))
    for row in range(len(batch.tokens)):
        tokens, segments = batch.tokens[row], batch.segments[row]
        document = bytes(tokens[1 : np.sum(segments == 0)].astype(np.uint8)).decode()
        assert tokens[0] == tiny_batches.BOS
        assert segments.max() >= 1
        for number in range(1, segments.max() + 1):
            *text, end = tokens[segments == number]
            name, key = bytes(text).decode().split("?\nA: ")
            assert f"{name.split()[-1]} is {key}. " in document
            assert end == tiny_batches.EOS
            # Every question directly follows the document.
            assert batch.positions[row][segments == number][0] == batch.positions[row][segments == 1][0]
        answers = batch.weights[row] >= 1
        digits = tiny_batches.Difficulty.at(step).key_digits
        assert answers.sum() == (digits + 1) * segments.max()
        assert set(batch.targets[row][answers]) <= {*b"0123456789", tiny_batches.EOS}


@pytest.mark.slow
def test_resumed_training_gives_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import train_tiny

    monkeypatch.setattr(train_tiny, "exact_match", lambda *args: 0.0)
    for out, steps in [("whole", 3), ("parts", 2), ("parts", 3)]:
        train_tiny.train(tmp_path / out, tmp_path / f"{out}.training", steps, save_every=100)
    (model, whole), (_, parts) = (load_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert model.config == train_tiny.CONFIG
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    start = train_tiny.init_params(model)
    assert not np.array_equal(whole["layers"]["wq"], start["layers"]["wq"])
