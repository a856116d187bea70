"""Keys of pages: a keyed hash of a page's tokens and of the key before it, so that a key stands for a whole prefix.

Source: Mooncake, section 3 and figure 3.
"""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

KEY_BYTES = 16  # 128 bits: two of 2^40 pages collide with a probability of 2^-49


def with_followers(keys: Iterable[bytes], parents: Mapping[bytes, bytes]) -> list[bytes]:
    """Keys, and those of all pages that come after one of them; `parents`: of each page, the key of that before it."""
    followers: dict[bytes, list[bytes]] = {}
    for key, parent in parents.items():
        followers.setdefault(parent, []).append(key)
    found = dict.fromkeys(keys)
    pending = list(found)
    while pending:
        new = [key for key in followers.get(pending.pop(), ()) if key not in found]
        found.update(dict.fromkeys(new))
        pending += new
    return list(found)


class PageHash:
    """BLAKE2b under a secret key, so that nobody can craft a prompt that collides with another's.

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
        size = self.page_size
        for page in range(len(keys), len(tokens) // size):
            keys.append(self._hash(keys[-1] if keys else root, tokens[page * size : (page + 1) * size].tobytes()))

    def tail(self, parent: bytes, session_id: str, tokens: np.ndarray) -> bytes:
        """The key of a session's last, partial page, of tokens `[T]` int32. It stands for its contents too."""
        return self._hash(self._hash(parent, b"session " + session_id.encode()), tokens.tobytes())

    def fingerprint(self, text: str) -> bytes:
        """The same for two hashes with one secret and page size, and for the same text."""
        return self._hash(b"fingerprint", f"{self.page_size} {text}".encode())

    def _hash(self, parent: bytes, contents: bytes) -> bytes:
        # The parent's length is fixed but for the root's, whose contents no page can have: 4 bytes a token.
        return hashlib.blake2b(parent + contents, key=self._secret, digest_size=KEY_BYTES, person=b"page").digest()
