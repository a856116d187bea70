"""The built-in model, which is shipped with the package: about a million parameters, trained on `passkey`."""

from pathlib import Path

TINY = Path(__file__).with_name("tiny")
"""Its checkpoint directory, for `load_checkpoint`, `load_tokenizer`, and `transformers.AutoTokenizer`.

Examples:
  >>> from longctx.models import load_checkpoint
  >>> from longctx.models.builtin import TINY
  >>> model, params = load_checkpoint(TINY)
  >>> model.config.num_layers
  4
"""
