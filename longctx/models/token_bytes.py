"""The bytes that each token stands for: a character may be spread over several tokens, none of which is text then."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from longctx.models.tokenizer import ByteTokenizer, HFTokenizer

if TYPE_CHECKING:
    from longctx.models.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Finds the bytes of the tokens of a tokenizer. Special tokens have those of their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, token: int) -> bytes:
        """The bytes of a token; of an id that the vocabulary leaves out there are none."""
        tokenizer = self._tokenizer
        if isinstance(tokenizer, ByteTokenizer):
            return bytes([token]) if token < 256 else b""
        if not isinstance(tokenizer, HFTokenizer):
            return tokenizer.decode([token]).encode()
        name, is_added = tokenizer.token(token)
        if name is None or is_added:
            return (name or "").encode()
        if tokenizer.is_byte_level:
            return b"".join(_BYTES[x] if x in _BYTES else x.encode() for x in name)
        byte = _BYTE.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else name.replace("\u2581", " ").encode()


def _byte_characters() -> dict[str, bytes]:
    """The characters that byte-level vocabularies write bytes as: themselves where they can be seen, else from 256."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    characters = {chr(byte): bytes([byte]) for byte in seen}
    return characters | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTES = _byte_characters()
