"""The secret of page keys, from a file: engines that share a cache share it."""

import hashlib
import os
import stat
from pathlib import Path

LEAST_BYTES = 32
_MOST_BYTES = 4096


def read_kv_secret(path: str | os.PathLike[str]) -> bytes:
    """The key of page hashes (`EngineConfig.hash_key`), 32 bytes, that follows from a file's contents.

    White space around the contents doesn't count, so that a line of text will do, as from `longctx group-secret`. Who
    knows the secret can tell from a key, or from a page that is found, what others have asked.

    Raises:
      ValueError: the file can't be read, others may read it, or its contents could be guessed; the message names it.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            contents = file.read(_MOST_BYTES + 1).strip() if stat.S_ISREG(status.st_mode) else None
    except OSError as error:
        raise ValueError(f"kv_secret_file: {path} can't be read: {error.strerror}") from None
    if contents is None:
        raise ValueError(f"kv_secret_file: {path} is not a regular file")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"kv_secret_file: others than its owner have access to {path}: `chmod 600 {path}`")
    if not LEAST_BYTES <= len(contents) <= _MOST_BYTES:
        raise ValueError(
            f"kv_secret_file: {path} must have {LEAST_BYTES} to {_MOST_BYTES} bytes, got {len(contents)}: make it with "
            "`longctx group-secret > FILE`"
        )
    return hashlib.blake2b(contents, digest_size=32, person=b"kv secret").digest()
