"""Where conversations stopped: the partial page that the next turn of a session begins in."""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.prefix import PageHash


class PartialPage(NamedTuple):
    """A session's last, partial page: its key, its number in the sequence, and how many of its tokens count."""

    key: Key
    number: int
    tokens: int


class _Turn(NamedTuple):
    """Where a session's last turn stopped: the key before its partial page, that page's key, number and tokens."""

    parent: bytes
    key: bytes
    number: int
    tokens: np.ndarray


class Sessions:
    """The last turn of each session, at most `capacity` of them: the oldest is forgotten first."""

    def __init__(self, page_hash: PageHash, capacity: int) -> None:
        self._hash, self._capacity = page_hash, capacity
        self._turns: OrderedDict[tuple[bytes, str], _Turn] = OrderedDict()

    def find(self, root: bytes, session_id: str | None, keys: list[bytes], tokens: np.ndarray) -> PartialPage | None:
        """The page where a session stopped, as far as its next prompt `[T]`, with such keys, goes on like it.

        `root` is the key before its first page: sessions of one name under different roots are different ones.
        """
        turn = self._turns.get((root, session_id)) if session_id is not None else None
        if turn is None or turn.number > len(keys) or turn.parent != _parent(root, keys, turn.number):
            return None
        own = tokens[turn.number * self._hash.page_size :][: len(turn.tokens)]
        differs = np.flatnonzero(own != turn.tokens[: len(own)])
        common = int(differs[0]) if len(differs) else len(own)
        return PartialPage(turn.key, turn.number, common) if common else None

    def note(self, root: bytes, session_id: str, keys: list[bytes], tokens: np.ndarray) -> PartialPage | None:
        """Remember a turn that ends after tokens `[T]`, all computed; the page to keep, if the last one is partial."""
        size = self._hash.page_size
        number = len(tokens) // size
        if number > len(keys) or len(tokens) == number * size:
            return None
        last = tokens[number * size :].copy()
        parent = _parent(root, keys, number)
        key = self._hash.tail(parent, session_id, last)
        self._turns[root, session_id] = _Turn(parent, key, number, last)
        self._turns.move_to_end((root, session_id))
        if len(self._turns) > self._capacity:
            self._turns.popitem(last=False)
        return PartialPage(key, number, len(last))


def _parent(root: bytes, keys: list[bytes], number: int) -> bytes:
    return keys[number - 1] if number else root
