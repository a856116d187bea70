"""Keys of pages, and the partial pages in which the next turns of sessions begin.

A key is a keyed hash of a page's tokens and of the key before it, so that a key stands for a whole prefix.

Source: Mooncake, section 3 and figure 3.
"""

import hashlib
import hmac
import json
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from longctx.serving.kv_cache.page_pool import Key

KEY_BYTES = 16  # 128 bits: two of 2^40 pages collide with a probability of 2^-49


class PageHash:
    """BLAKE2b under a secret key, so that no client can craft a prompt that collides with another's.

    Engines that are to recognise each other's pages share the secret; requests of different tenants, or of one tenant
    with different salts, have different chains.
    """

    def __init__(self, secret: bytes, page_size: int) -> None:
        self._secret = secret
        self.page_size = page_size

    def root(self, tenant: str, salt: str = "") -> bytes:
        """The key before the first page of a tenant's prompts with a salt (`Request.cache_salt`)."""
        root = self._hash(b"tenant", tenant.encode())
        return self._hash(b"salt" + root, salt.encode()) if salt else root

    def root_of_request(self, number: int) -> bytes:
        """The key before the first page of a request that shares pages with no other."""
        return self._hash(b"request", str(number).encode())

    def extend(self, keys: list[bytes], tokens: np.ndarray, root: bytes) -> None:
        """Append the keys of all full pages of tokens `[T]` int32 that `keys` does not have yet."""
        parent, blank = keys[-1] if keys else root, self._blank()
        contents, size = tokens[len(keys) * self.page_size :].tobytes(), self.page_size * tokens.itemsize
        for start in range(0, len(contents) // size * size, size):
            # A copy of one that has read the secret: a third quicker than to make one for each page.
            parent = _digest(blank.copy(), parent + contents[start : start + size])
            keys.append(parent)

    def tail(self, parent: bytes, session_id: str, tokens: np.ndarray) -> bytes:
        """The key of a session's last, partial page, of tokens `[T]` int32. It stands for its contents too."""
        return self._hash(self._hash(parent, b"session " + session_id.encode()), tokens.tobytes())

    def fingerprint(self, text: str) -> bytes:
        """The same for two hashes with one secret and page size, and for the same text."""
        return self._hash(b"fingerprint", f"{self.page_size} {text}".encode())

    def sign(self, *said: object) -> str:
        """The HMAC (SHA-256, hexadecimal) of plain data, by which holders of the secret believe each other."""
        return hmac.new(self._secret, json.dumps(said).encode(), hashlib.sha256).hexdigest()

    def is_signed(self, signature: str, *said: object) -> bool:
        """Return whether a signature is that of this data."""
        return hmac.compare_digest(self.sign(*said).encode(), signature.encode("utf-8", "surrogatepass"))

    def _hash(self, parent: bytes, contents: bytes) -> bytes:
        # The parent's length is fixed but for the root's, whose contents no page can have: 4 bytes a token.
        return _digest(self._blank(), parent + contents)

    def _blank(self) -> "hashlib.blake2b":
        return hashlib.blake2b(key=self._secret, digest_size=KEY_BYTES, person=b"page")


def _digest(blank: "hashlib.blake2b", contents: bytes) -> bytes:
    blank.update(contents)
    return blank.digest()


class PartialPage(NamedTuple):
    """A session's last, partial page: its key, its number in the sequence, and how many of its tokens count."""

    key: Key
    number: int
    tokens: int


class _Turn(NamedTuple):
    """End of a session's last turn: the key before its partial page, that page's key, number and tokens."""

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
