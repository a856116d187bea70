"""Presets of published models, and the checks of which layers are sliding."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from longctx.models import Llama, LlamaConfig
from longctx.models.config import PRESETS


# Billions of parameters, as the model cards count them.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.85),
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.213),
        ("llama-2-7b", 6.738),
        ("llama-2-13b", 13.016),
        ("llama-2-70b", 68.977),
        ("llama-3.3-70b", 70.55),
        ("mistral-7b-v0.3", 7.248),
        ("gemma3-270m", 0.268),
        ("gemma3-1b", 1.0),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.191),
        ("qwen3-32b", 32.762),
    ],
)
def test_presets_have_the_published_sizes(name: str, billions: float) -> None:
    leaves = jax.tree.leaves(Llama(LlamaConfig.preset(name)).abstract_params())
    assert sum(int(np.prod(leaf.shape)) for leaf in leaves) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_without_named_layers_all_of_a_model_with_a_window_are_sliding() -> None:
    config = LlamaConfig.preset("qwen3-0.6b")
    assert config.sliding_layers == ()
    config = dataclasses.replace(config, sliding_window=128)
    assert config.sliding_layers == (True,) * config.num_layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be an integer of 1"),
        ({"sliding_window": 4, "sliding_layers": (True,)}, "sliding_layers is of 1 layers, num_layers 28"),
        ({"sliding_window": 4, "sliding_layers": (False,) * 28}, "sliding_layers has no sliding layer"),
        ({"sliding_layers": (True,) * 28}, "sliding_layers has sliding layers, which need a sliding_window"),
        ({"sliding_window": 4, "sliding_layers": (1,) * 28}, "sliding_layers must be True or False"),
        ({"sliding_window": 4, "sliding_layers": [True] * 28}, "sliding_layers must be a tuple"),
    ],
)
def test_sliding_layers_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        dataclasses.replace(LlamaConfig.preset("qwen3-0.6b"), **changes)


def test_every_preset_is_tested_and_unknown_ones_are_refused() -> None:
    assert len(PRESETS) == 17
    with pytest.raises(ValueError, match=r"llama-3\.1-405b"):
        LlamaConfig.preset("llama-4")
