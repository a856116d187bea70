"""Stands in for the contents of prompts and outputs, which a replay of decisions does without.

Decisions follow from contents by the keys of pages alone, and these were recorded. So the first token of a sequence
is its number here, and by that number keys are looked up instead of hashed. All other tokens are zeros.
"""

import hashlib
from collections import deque

import numpy as np

from longctx.serving.kv_cache.prefix import KEY_BYTES, PageHash, PartialPage, Sessions


class Contents:
    """The keys of all sequences' pages, by the sequences' numbers (`Sequence.order`).

    Attributes:
      keys: of the full pages of each, as far as they are known.
      found: the page where the session stopped that a sequence goes on with.
      left: the page where a sequence's session stopped.
      new_keys, new_left: recorded of the step that is replayed next, for the sequences that come to need them.
    """

    def __init__(self) -> None:
        self.keys: dict[int, list[bytes]] = {}
        self.found: dict[int, PartialPage | None] = {}
        self.left: dict[int, PartialPage | None] = {}
        self.new_keys: deque[bytes] = deque()
        self.new_left: deque[PartialPage | None] = deque()

    def key(self, order: int, page: int) -> bytes:
        """The key of a sequence's page; one that nobody else has if its contents never came to be."""
        keys = self.keys[order]
        if page == len(keys):
            made_up = hashlib.blake2b(f"{order} {page}".encode(), digest_size=KEY_BYTES, person=b"made up")
            keys.append(self.new_keys.popleft() if self.new_keys else made_up.digest())
        return keys[page]


class RecordedHash(PageHash):
    """Looks up keys instead of hashing tokens."""

    def __init__(self, contents: Contents, page_size: int) -> None:
        super().__init__(b"no secret", page_size)
        self._contents = contents

    def extend(self, keys: list[bytes], tokens: np.ndarray, root: bytes) -> None:
        order = int(tokens[0])
        for page in range(len(keys), len(tokens) // self.page_size):
            keys.append(self._contents.key(order, page))


class RecordedSessions(Sessions):
    """Looks up where conversations stopped."""

    def __init__(self, contents: Contents, page_size: int) -> None:
        self._contents, self._page_size = contents, page_size

    def find(self, root: bytes, session_id: str | None, keys: list[bytes], tokens: np.ndarray) -> PartialPage | None:
        return self._contents.found.get(int(tokens[0]))

    def note(self, root: bytes, session_id: str, keys: list[bytes], tokens: np.ndarray) -> PartialPage | None:
        new = self._contents.new_left
        if not len(tokens):  # it has computed nothing, so nothing is left
            if new:
                new.popleft()
            return None
        order = int(tokens[0])
        if new:
            self._contents.left[order] = new.popleft()
        page = self._contents.left.get(order)
        # It may stop elsewhere than recorded; then nobody knows that page's key.
        ends_there = page is not None and divmod(len(tokens), self._page_size) == (page.number, page.tokens)
        return page if ends_there else None
