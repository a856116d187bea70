"""The built-in model: about a million parameters, trained to find pass keys (`passkey`), shipped with the package."""

from pathlib import Path

TINY = Path(__file__).with_name("tiny")
"""Its checkpoint directory, for `load_checkpoint` and `load_tokenizer`."""
