"""Encoding of texts that clients send: the names of special tokens in them are plain text.

Otherwise a message that spells `<|im_end|>` ends itself, and begins another one in the name of the system.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from longctx.models.text_pieces import PIECE, PieceEncoder, can_cut
from longctx.models.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer, utf8_bytes

if TYPE_CHECKING:
    import tokenizers


def encode_array(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> np.ndarray:
    """Return the token ids of a text, int32 `[T]`, by any tokenizer."""
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.encode_array(text, add_special_tokens)
    return np.array(tokenizer.encode(text, add_special_tokens), np.int32)


class PlainTextEncoder:
    """Encoder of texts and chats by a tokenizer, in which nothing that a client writes becomes a special token.

    Tokenizers of other kinds than `HFTokenizer` encode as they do by themselves.

    Args:
      tokenizer: encodes the texts that name no special token, and of the others all else.

    Examples:
      >>> from longctx.models import ByteTokenizer
      >>> from longctx.models.plain_text import PlainTextEncoder
      >>> PlainTextEncoder(ByteTokenizer()).encode("Hi")
      array([256,  72, 105], dtype=int32)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        special = [token.content for token in self._special.values()]
        self._names = _pattern(special)

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Return the token ids of a text, int32 `[T]`, see `Tokenizer.encode`.

        Raises:
          ValueError: it is not valid Unicode, or has the name of a special token that can't be plain text.
        """
        if not self._names_special(text):
            return encode_array(self.tokenizer, text, add_special_tokens)
        return self._copy.encode(text, add_special_tokens)

    def encode_chat(self, render: Callable[[Any, Any], str], messages: Any, variables: Any) -> np.ndarray:
        """Return the token ids of a chat, int32 `[T]`, whose special tokens are those of the template alone.

        Args:
          render: returns the text of messages and variables by a template. It is given both with other names in the
            place of those of special tokens.
          messages, variables: JSON that a client sent.

        Raises:
          ValueError: see `encode`, or as `render` does.
        """
        if not any(map(self._names_special, _texts([messages, variables]))):
            return encode_array(self.tokenizer, render(messages, variables), False)
        plain = self._copy
        text = render(*plain.hide([messages, variables]))
        return plain.encode(plain.show(plain.mark(text)), add_special_tokens=False)

    @functools.cached_property
    def longest_token(self) -> int | None:
        """Bytes of text that a token stands for, at most; None: there is no such number, or it is not known."""
        if not isinstance(self.tokenizer, HFTokenizer):
            return 1 if isinstance(self.tokenizer, ByteTokenizer) else None
        backend, added = self.tokenizer.backend, self.tokenizer.added_tokens.values()
        is_byte_level = self.tokenizer.is_byte_level
        if type(backend.model).__name__ != "BPE" or not (is_byte_level or backend.model.byte_fallback):
            return None  # there may be one token for any run of unknown characters
        factors = _shrinking(backend.normalizer), _shrinking(backend.pre_tokenizer)
        if None in factors or any(token.lstrip or token.rstrip for token in added):  # which take any number of spaces
            return None
        # Byte-level vocabularies write each byte as a character.
        lengths = (len(name if is_byte_level else name.encode()) for name in backend.get_vocab())
        return (factors[0] or 1) * max(*lengths, *(len(token.content.encode()) for token in added), 1)

    def __getstate__(self) -> dict[str, Any]:
        # The library's pickles forget the copy's setting.
        return {name: value for name, value in self.__dict__.items() if name != "_copy"}

    @property
    def _special(self) -> dict[int, tokenizers.AddedToken]:
        if not isinstance(self.tokenizer, HFTokenizer):
            return {}
        return {id: token for id, token in self.tokenizer.added_tokens.items() if token.special}

    def _names_special(self, text: str) -> bool:
        return self._names is not None and self._names.search(text) is not None

    @functools.cached_property
    def _copy(self) -> _Copy:
        """The copy that texts need which name special tokens; it takes a second for large vocabularies."""
        assert isinstance(self.tokenizer, HFTokenizer)
        return _Copy(self.tokenizer, self._special)


class _Copy:
    """Copy of a tokenizer that takes special tokens for such by secret names alone."""

    def __init__(self, tokenizer: HFTokenizer, special: Mapping[int, tokenizers.AddedToken]) -> None:
        import tokenizers

        self._errors, self._controls = tokenizer.errors, tokenizer.control_names
        nonce = f"x{secrets.token_hex(16)}"
        self._names = [token.content for token in special.values()]
        self._pattern = _pattern(self._names)
        self._marks = {name: f"{nonce}m{number}." for number, name in enumerate(self._names)}
        self._hidden = {name: f"{nonce}h{number}x" for number, name in enumerate(self._names)}
        self._shown = re.compile(rf"{nonce}h(\d+)x")
        self._own: dict[int, int] = {}
        with self._errors():
            self._backend = copy.deepcopy(tokenizer.backend)
            self._backend.encode_special_tokens = True  # as plain text
            for id, token in special.items():
                # It is looked for as the special token is, so that what surrounds it is encoded as beside that.
                mark = tokenizers.AddedToken(
                    self._marks[token.content],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,
                )
                self._backend.add_tokens([mark])
                its_id = self._backend.token_to_id(mark.content)
                assert its_id is not None
                self._own[its_id] = id
            self._pieces = PieceEncoder(self._backend) if can_cut(self._backend) else None

    def encode(self, text: str, add_special_tokens: bool) -> np.ndarray:
        utf8_bytes(text)
        with self._errors():
            if len(text) > 2 * PIECE and self._pieces is not None:
                ids = self._plain(self._pieces.encode(text, False).tolist())
                return self._pieces.with_ends(ids) if add_special_tokens else ids
            encoded = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return self._plain(encoded.ids, encoded.special_tokens_mask)

    def _plain(self, ids: list[int], were_added: Iterable[int] = itertools.repeat(0)) -> np.ndarray:
        for id, was_added in zip(ids, were_added, strict=False):
            if id in self._controls and not was_added:  # by a model that looks words up, as a Unigram one
                raise ValueError(f"text has {self._controls[id]!r}, which this tokenizer can't encode as plain text")
        return np.array([self._own.get(id, id) for id in ids], np.int32)

    def hide(self, value: Any) -> Any:
        """Return JSON with other names in the place of special tokens, which templates leave as they are."""
        if isinstance(value, str):
            return self._replace(value, self._hidden)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(each) for key, each in value.items()}
        return [self.hide(each) for each in value] if isinstance(value, list | tuple) else value

    def show(self, text: str) -> str:
        """Return a text with the names that `hide` has replaced."""
        return self._shown.sub(lambda found: self._names[int(found[1])], text)

    def mark(self, text: str) -> str:
        """Return a text with the secret names of its special tokens."""
        return self._replace(text, self._marks)

    def _replace(self, text: str, names: Mapping[str, str]) -> str:
        return text if self._pattern is None else self._pattern.sub(lambda found: names[found[0]], text)


def _pattern(names: Iterable[str]) -> re.Pattern[str] | None:
    """Return the pattern of any of some names, the longest first."""
    found = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found))) if found else None


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of JSON, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.items():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


# Steps that keep all of a text, and by what factor its bytes may become fewer.
_SHRINKING = {"NFC": 3, "Prepend": 1, "ByteLevel": 1, "Split": 1, "Digits": 1, "Punctuation": 1, "Metaspace": 1}


def _shrinking(step: Any) -> int | None:
    """Return by what factor a normalizer or pre-tokenizer may make a text shorter; None: it is not known."""
    if step is None:
        return 1
    state = json.loads(step.__getstate__())
    factor = 1
    for each in state.get("normalizers") or state.get("pretokenizers") or [state]:
        is_space = each["type"] == "Replace" and each["pattern"] == {"String": " "} and each["content"]
        if each.get("behavior") == "Removed" or not (is_space or each["type"] in _SHRINKING):
            return None
        factor *= _SHRINKING.get(each["type"], 1)
    return factor
