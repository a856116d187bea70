"""Encoding of long texts by pieces that are remembered: prompts of agents and conversations begin as earlier ones."""

from __future__ import annotations

import contextlib
import json
import re
import string
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tokenizers

PIECE = 1024  # characters of a piece, at least
MOST_BYTES = 2**26  # of all pieces that an encoder remembers, with their ids
_LONGEST = 16 * PIECE  # of one that is remembered
_ENTRY_BYTES = 400  # beside text and ids
_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_ACROSS_CUT = re.compile(r"[A-Za-z] ")
# What splits a text by its characters, without a look at what stands before a match, or behind it but spaces.
_SPLITS = {"ByteLevel", "Digits", "Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}
_LOOKS_AROUND = re.compile(r"\\[bBAGKzZ]|\(\?<|(?<!\[)\^|(?<!\\)\$|\(\?=|\(\?!(?!\\S\))")
# Parts of a regular expression: classes, escapes, begins of groups, and single characters.
_PART = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\[pP]\{[^}]*\}|\\.|\(\?[a-z-]*[:!]|.", re.DOTALL)
_ESCAPES = re.compile(r"\\[pP]\{[^}]*\}|\\.")
_RANGE = re.compile(r"(.)-(.)")
_LETTERS = frozenset(string.ascii_letters)

owner: ContextVar[tuple[str, ...]] = ContextVar("owner of texts", default=())


@contextlib.contextmanager
def of_owner(*names: str) -> Iterator[None]:
    """Remember what is encoded meanwhile for the same owner alone: times tell no one what others have sent.

    Args:
      names: such as of a tenant; they come after those of an owner around this one.
    """
    token = owner.set(owner.get() + names)
    try:
        yield
    finally:
        owner.reset(token)


def pieces(text: str) -> Iterator[str]:
    """Cut a text between words, so that texts with the same beginning have the same first pieces."""
    begin = 0
    while found := _CUT.search(text, begin + PIECE):
        yield text[begin : found.start()]
        begin = found.start()
    yield text[begin:]


class PieceEncoder:
    """Encoder of texts by the ids of their pieces, for tokenizers that don't see across a space between two words.

    Such ones encode by byte pairs within words, which a regular expression or the like finds: as all that are made like
    GPT-2's do.

    Args:
      backend: for which `can_cut` is true.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend, self._lock = backend, threading.Lock()
        self._ids = OrderedDict[tuple[tuple[str, ...], str], np.ndarray]()  # the piece used last comes last
        self._num_bytes = 0
        plain, whole = (backend.encode("a", add_special_tokens=added).ids for added in (False, True))
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        self._before, self._after = (np.array(ids, np.int32) for ids in (whole[:at], whole[at + len(plain) :]))

    def encode(self, text: str, add_special_tokens: bool) -> np.ndarray:
        """Return the ids of a text, int32 `[T]`, as the library's `encode` does."""
        ids = np.concatenate([*map(self._ids_of, pieces(text))])
        return self.with_ends(ids) if add_special_tokens else ids

    def with_ends(self, ids: np.ndarray) -> np.ndarray:
        """Add the ids that begin and end a text."""
        return np.concatenate([self._before, ids, self._after])

    def _ids_of(self, piece: str) -> np.ndarray:
        key = owner.get(), piece
        with self._lock:
            found = self._ids.get(key)
            if found is not None:
                self._ids.move_to_end(key)
                return found
        ids = np.array(self._backend.encode(piece, add_special_tokens=False).ids, np.int32)
        if len(piece) > _LONGEST:
            return ids
        with self._lock:
            if key not in self._ids:
                self._num_bytes += _bytes(piece, ids)
            self._ids[key] = ids
            while self._num_bytes > MOST_BYTES:
                (_, oldest), its_ids = self._ids.popitem(last=False)
                self._num_bytes -= _bytes(oldest, its_ids)
        return ids


def _bytes(piece: str, ids: np.ndarray) -> int:
    return sys.getsizeof(piece) + ids.nbytes + _ENTRY_BYTES


def can_cut(backend: tokenizers.Tokenizer) -> bool:
    """Return whether a tokenizer gives the same ids to a text and, one after another, to its `pieces`."""
    model, splitter = backend.model, backend.pre_tokenizer
    if type(model).__name__ != "BPE" or model.dropout or backend.normalizer is not None or splitter is None:
        return False
    for token in backend.get_added_tokens_decoder().values():
        text = token.content
        is_near = token.lstrip or (token.rstrip and text[-1:] in _LETTERS) or (token.single_word and text[:1] == " ")
        if is_near or _ACROSS_CUT.search(text):
            return False
    state = json.loads(splitter.__getstate__())
    if not all(map(_is_local, state.get("pretokenizers", [state]))) or not backend.encode("a").ids:
        return False
    return all(
        _words(splitter, left) + _words(splitter, right) == _words(splitter, left + right)
        for first in string.ascii_letters
        for second in string.ascii_letters
        for left, right in ((first, f" {second}"), (f"-\n{first}a{first}", f" {second}{first}'{second}"))
    )


def _is_local(step: dict[str, Any]) -> bool:
    """Whether no match of a step has a letter before a space."""
    kept = step.get("behavior", "Isolated") == "Isolated" and not step.get("add_prefix_space")
    pattern = step.get("pattern", {})
    if step["type"] not in _SPLITS or not kept or re.search(r"[A-Za-z](.|\s)* ", pattern.get("String", "")):
        return False
    return all(map(_begins_with_spaces, _alternatives(pattern.get("Regex", ""))))


def _alternatives(regex: str) -> Iterator[list[str]]:
    """Yield the parts of each alternative of a regular expression; those of groups count as one after another."""
    depth, parts = 0, list[str]()
    for found in _PART.finditer(regex):
        part = found[0]
        depth += part.startswith("(") - (part == ")")
        if part == "|" and depth == 0:
            yield parts
            parts = []
        else:
            parts.append(part)
    yield parts


def _begins_with_spaces(parts: list[str]) -> bool:
    """Whether an alternative's matches have spaces before letters alone, as far as its parts tell without a doubt."""
    text = "".join(part for part in parts if not part.startswith("["))
    if _LOOKS_AROUND.search(text) or re.search(r"\)[+*{]", text):
        return False
    has_letters = False
    for part in parts:
        letters, spaces = _kinds(part)
        has_letters |= letters
        if has_letters and spaces:
            return False
    return True


def _kinds(part: str) -> tuple[bool, bool]:
    """Whether a part of a regular expression may match an ASCII letter, and a space."""
    if part.startswith("[") and len(part) > 1:
        return _kinds_of_class(part)
    if part.startswith("("):
        return False, False
    if not part.startswith("\\"):
        return part == "." or part in _LETTERS, part in (".", " ")
    if (part[1].isalpha() and part[1] not in "rntfvdswSWp") or part.startswith("\\p{^"):
        return True, True
    letters = part in ("\\S", "\\w") or (part[1] == "p" and part[3:4] not in ("N", "P", "S", "M", "Z"))
    return letters, part in ("\\s", "\\W") or part.startswith("\\p{Z")


def _kinds_of_class(part: str) -> tuple[bool, bool]:
    is_negated = part[1] == "^"
    body = part[1 + is_negated : -1]
    plain = _ESCAPES.sub("", body)
    if "[" in plain or "&&" in plain:
        return True, True
    characters = {chr(i) for a, b in _RANGE.findall(plain) for i in range(ord(a), ord(b) + 1)} | set(plain)
    kinds = [_kinds(escape) for escape in _ESCAPES.findall(body)]
    if is_negated:  # only what certainly holds all letters, or a space, leaves them out
        all_letters = re.search(r"\\p\{L\}|\\w", body) or characters >= _LETTERS
        return not all_letters, not ("\\s" in body or " " in characters)
    return any(k[0] for k in kinds) or bool(characters & _LETTERS), any(k[1] for k in kinds) or " " in characters


def _words(splitter: Any, text: str) -> list[str]:
    return [word for word, _ in splitter.pre_tokenize_str(text)]
