"""API keys: who may use a server, and as which tenant."""

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[!-~]{8,512}")  # what a header can hold, without spaces


@dataclass(frozen=True)
class ApiKey:
    """A key, and the name of whom it was given to, which is the tenant of their requests. Only names are printed.

    Raises:
      ValueError: a name or key that is too short or long, or has other characters than it may.
    """

    name: str
    key: str = field(repr=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a key's name must be 1 to 64 letters, digits, '.', '_' or '-', got {self.name!r}")
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"the key of {self.name} must be 8 to 512 visible ASCII characters")

    @property
    def digest(self) -> bytes:
        return _digest(self.key.encode())


def read_keys(lines: Iterable[str], prefix: str) -> tuple[ApiKey, ...]:
    """Read keys from lines `KEY` or `NAME KEY`; empty lines and those with `#` in front are left out.

    Args:
      prefix: of the names of keys without one, which are numbered from 1.

    Raises:
      ValueError: a line is not like that, or two keys have the same name; no message has a key.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ValueError(f"key {number} must be KEY or NAME KEY, and has {len(words)} words")
        name = words[0] if len(words) == 2 else f"{prefix}-{number}"
        keys.append(ApiKey(name, words[-1]))
    names = [key.name for key in keys]
    if len(set(names)) < len(names):
        raise ValueError(f"names of keys must be different, got {', '.join(names)}")
    return tuple(keys)


class KeyRing:
    """Finds the key that a client sent, in a time that doesn't depend on which it is or how much of one it guessed."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(key.digest, key.name) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def name_of(self, sent: bytes) -> str | None:
        """The name of the key; None: there is no such key."""
        digest, found = _digest(sent), None
        for known, name in self._keys:  # all of them, always
            if hmac.compare_digest(known, digest):
                found = name
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
