"""Encryption of files at rest: AES-256-GCM by `cryptography`, under a secret from a file."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

from longctx import extras
from longctx.serving.kv_cache.secret import read_secret

_SALT_BYTES = _TAG_BYTES = 16
SEAL_BYTES = _SALT_BYTES + _TAG_BYTES
"""Bytes that sealed data has beside the data itself."""


def disk_key(path: str | os.PathLike[str], name: str = "disk_key_file") -> "FileKey":
    """Return the key that a secret's file gives for pages on disk; arguments and errors as of `FileKey`."""
    return FileKey(path, name, b"pages at rest")


class FileKey:
    """Key of files of one purpose, which follows from a secret's file.

    Each piece of data is encrypted with a key of its own, derived from 16 random bytes that are stored beside it. So
    the number of pieces that one secret encrypts has no limit in practice, and no counter has to survive a restart.

    Args:
      path: the secret's file, see `read_secret`.
      name: the argument or flag that named it, for messages.
      purpose: up to 16 bytes; keys of different purposes have nothing in common.

    Attributes:
      id: 16 hexadecimal digits that say which key it is, and nothing about it.

    Raises:
      ValueError: the file can't be read or used; or, as MissingExtra, `cryptography` is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], name: str, purpose: bytes) -> None:
        with extras.needed("encryption", name):
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        self._make_cipher: Any = lambda key, tag: Cipher(algorithms.AES(key), modes.GCM(bytes(12), tag))
        self._invalid_tag = InvalidTag
        self._root = hashlib.blake2b(read_secret(path, name), digest_size=32, person=purpose).digest()
        self.id = hashlib.blake2b(b"id", digest_size=8, key=self._root).hexdigest()

    def seal(self, parts: Sequence[bytes | memoryview], context: bytes) -> list[memoryview]:
        """Encrypt bytes, which open in the same context only.

        Args:
          parts: what is encrypted, one after the other.
          context: is authenticated with them, and not stored.

        Returns:
          Salt and tag, and the encrypted bytes of each part: `SEAL_BYTES` more than the parts have.
        """
        salt = os.urandom(_SALT_BYTES)
        encryptor = self._cipher(salt, None).encryptor()
        encryptor.authenticate_additional_data(context)
        sealed = [bytearray(len(part)) for part in parts]
        for part, out in zip(parts, sealed, strict=True):
            encryptor.update_into(part, out)
        encryptor.finalize()
        return [memoryview(salt + encryptor.tag), *(memoryview(part) for part in sealed)]

    def open(self, sealed: memoryview, outs: Sequence[bytearray | memoryview], context: bytes) -> bool:
        """Decrypt into buffers that are together as long as the data was.

        Returns:
          Whether it is what was sealed, with this key and in this context; if not, nothing in `outs` is of use.
        """
        decryptor = self._cipher(sealed[:_SALT_BYTES], bytes(sealed[_SALT_BYTES:SEAL_BYTES])).decryptor()
        decryptor.authenticate_additional_data(context)
        place = SEAL_BYTES
        for out in outs:
            decryptor.update_into(sealed[place : place + len(out)], out)
            place += len(out)
        try:
            decryptor.finalize()
        except self._invalid_tag:
            return False
        return True

    def _cipher(self, salt: bytes | memoryview, tag: bytes | None) -> Any:
        """Return a cipher of a key that is used once, so that its nonce may be zero."""
        return self._make_cipher(hashlib.blake2b(salt, digest_size=32, key=self._root).digest(), tag)
