"""The secret of page keys, from a file: engines that share a cache share it."""

import contextlib
import hashlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

LEAST_BYTES = 32
_MOST_BYTES = 4096


def read_secret(path: str | os.PathLike[str], name: str = "kv_secret_file") -> bytes:
    """The contents of a secret's file. White space around them doesn't count, so that a line of text will do.

    Args:
      name: the argument or flag that named the file, for messages.

    Raises:
      ValueError: the file can't be read, others may read it, or its contents could be guessed; the message names it.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            contents = file.read(_MOST_BYTES + 1).strip() if stat.S_ISREG(status.st_mode) else None
    except OSError as error:
        raise ValueError(f"{name}: {path} can't be read: {error.strerror}") from None
    if contents is None:
        raise ValueError(f"{name}: {path} is not a regular file")
    check_private(name, path, status)
    if not LEAST_BYTES <= len(contents) <= _MOST_BYTES:
        raise ValueError(
            f"{name}: {path} must have {LEAST_BYTES} to {_MOST_BYTES} bytes, got {len(contents)}: make it with "
            "`longctx group-secret > FILE`"
        )
    return contents


class SecretFiles:
    """Files of secrets that have no place on a disk: they are gone with this process, however it ends.

    Other processes of its user read them by their paths.

    Examples:
      >>> from longctx.serving.kv_cache.secret import SecretFiles, read_secret
      >>> files = SecretFiles()
      >>> path = files.add(b"a secret of 16 bytes or more")
      >>> read_secret(path)
      b'a secret of 16 bytes or more'
      >>> files.close()
      >>> path.exists()
      False
    """

    def __init__(self) -> None:
        self._open: list[int] = []

    def add(self, contents: bytes) -> Path:
        """Make a file that its owner alone may read; return its path."""
        self._open.append(number := os.memfd_create("longctx"))
        os.fchmod(number, 0o600)
        os.write(number, contents)
        return Path(f"/proc/{os.getpid()}/fd/{number}")

    def close(self) -> None:
        """Forget all of them."""
        while self._open:
            os.close(self._open.pop())


def check_private(name: str, path: str | os.PathLike[str], status: os.stat_result) -> None:
    """Raise ValueError, with the name of the argument, if others than this process's user may read a file.

    A group may read a file that another user gives this process by that group, as Kubernetes mounts root's secrets.
    """
    is_given = status.st_uid != os.geteuid()
    others = stat.S_IRWXO | (stat.S_IWGRP | stat.S_IXGRP if is_given else stat.S_IRWXG)
    if status.st_mode & others:
        raise ValueError(f"{name}: others than its owner have access to {path}: `chmod 600 {path}`")


def read_kv_secret(path: str | os.PathLike[str]) -> bytes:
    """The key of page hashes (`EngineConfig.hash_key`), 32 bytes, that follows from a secret's file.

    Who knows the secret can tell from a key, or from a page that is found, what others have asked.

    Raises:
      ValueError: see `read_secret`.
    """
    return hashlib.blake2b(read_secret(path), digest_size=32, person=b"page keys").digest()


def make_secret(path: Path) -> None:
    """Make a file with a new secret that only its owner can read, in a folder likewise; one that is there is kept.

    The file has its contents from the first: a crash leaves none that is empty, and of several processes that make it
    at once all find the same one. OSError: it can't be made.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        return
    made, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # of mode 600
    try:
        with os.fdopen(made, "w", encoding="ascii") as stream:
            stream.write(secrets.token_hex(32))
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(name, path)
    finally:
        os.unlink(name)
