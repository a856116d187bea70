"""The built-in model, which is shipped with the package: about a million parameters, trained on `passkey`."""

from pathlib import Path

TINY = Path(__file__).with_name("tiny")
"""Its checkpoint directory, for `load_checkpoint` and `load_tokenizer`."""
