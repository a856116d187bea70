"""A tokenizer for fake devices: texts say which tokens they have. No JAX, since processes that tokenise have none."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

VOCAB, EOS = 50, 7  # of the fake devices
_FIRST = ord("0")


class LetterTokenizer:
    """Each token is a character from "0" on; the end token has none."""

    vocab_size = VOCAB
    bos_id = None
    eos_ids = (EOS,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        text.encode()
        return [(ord(character) - _FIRST) % VOCAB for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(_FIRST + id) for id in ids if id != EOS)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], asks: bool = True, **variables: Any) -> str:
        raise ValueError("there is no chat template")
