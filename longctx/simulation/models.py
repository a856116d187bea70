"""The models of the four papers, by name. A simulation lets their sequences be as long as the figures need."""

import dataclasses

from longctx.models.config import LlamaConfig
from longctx.models.quantization_config import RowwiseFp8

MAX_POSITIONS = 2**24
"""Tokens of the longest simulated sequence: the papers go to 10M, by stretching the rotary embedding."""


def _stretched(preset: str, quantization: RowwiseFp8 | None = None) -> LlamaConfig:
    config = LlamaConfig.preset(preset)
    return dataclasses.replace(config, max_positions=MAX_POSITIONS, quantization=quantization)


# Sizes: Llama 2 paper (Touvron et al. 2023) and The Llama 3 herd of models (table 3); the context parallelism paper's
# table 9 has the 405B model's again.
MODELS: dict[str, LlamaConfig] = {
    "llama-3-8b": _stretched("llama-3-8b"),  # Mnemosyne 5, Medha 5.1
    "llama-3-70b": _stretched("llama-3-70b"),  # Mnemosyne 5, Medha 5.1
    "llama-3-405b": _stretched("llama-3.1-405b"),
    # Row-wise FP8 in the feed-forward (context parallelism paper, 4.1), but for the first and the last layer (The Llama
    # 3 herd of models, 6.2).
    "llama-3-405b-fp8": _stretched("llama-3.1-405b", RowwiseFp8.of(126)),
    "llama-2-70b": _stretched("llama-2-70b"),  # Mooncake 5: "LLaMA2-70B architecture"
}
"""The models of the papers, by name: `LlamaConfig`s, for sequences of up to 2^24 tokens.

Source:
  Mnemosyne, 5; Medha, 5.1; Mooncake, 5; Context Parallelism for Scalable Million-Token Inference, 4.1 and table 9.

Examples:
  >>> from longctx.simulation.models import MODELS
  >>> sorted(MODELS)
  ['llama-2-70b', 'llama-3-405b', 'llama-3-405b-fp8', 'llama-3-70b', 'llama-3-8b']
  >>> MODELS["llama-3-8b"].max_positions
  16777216
"""
