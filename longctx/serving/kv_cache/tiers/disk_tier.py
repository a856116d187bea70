"""Pages on disk: a file for each, which files there are, and what is deleted for room.

`ROOT/writer-*/MODEL-NUMBER-PARENT-KEY.page`: a digest of the model and of the process's part of its pages, the number
of the page in its sequence, the key of the page before it, and its own. A file has the page's checksum (8 bytes,
little-endian), then its bytes. Where a key encrypts files, its id is the last part of the name, and a file has salt and
tag (`SEAL_BYTES`) before that, and opens under its own name only. A file is written under another name and renamed, so
a writer that is killed leaves no part of a page; what a power failure leaves of the newest files has another size or a
wrong checksum.

The index is in memory, rebuilt from names and sizes at start. Methods that touch the index are for one thread at a time
(the caller's lock); `write`, `read`, `delete` and `free_bytes` touch files only, and need none.

Each process locks a folder of its own. The files of a folder whose writer has ended are moved to the folder of the next
process that starts, if they are of the same user.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from longctx.serving.kv_cache.encryption import SEAL_BYTES, FileKey
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.tiers.host_memory import PageChecksum
from longctx.serving.kv_cache.tiers.index import PageName, TierIndex, TierPage
from longctx.serving.kv_cache.tiers.writer import FaultLog

logger = logging.getLogger(__name__)

SUFFIX = ".page"
CHECKSUM_BYTES = 8
_FOLDER = "writer-"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskPage(TierPage):
    """Page in a file."""

    __slots__ = ("path",)

    def __init__(self, name: PageName, path: Path, size: int) -> None:
        super().__init__(name, size)
        self.path = path


class DiskTier(TierIndex[DiskPage]):
    """Files of pages below a folder.

    `capacity` is lowered to what the files have when their volume is full, and grows again with the volume's free
    bytes, up to what the tier was made with.

    Attributes:
      num_unusable: files found at start that are of another model, version or key, or not whole.
    """

    def __init__(
        self,
        root: Path,
        layout: PageLayout,
        part: PageSlice,
        fingerprint: bytes,
        capacity: int,
        eviction: str,
        file_key: FileKey | None = None,
    ) -> None:
        """Find what is there.

        Args:
          file_key: encrypts the files. None: they are not encrypted.

        Raises:
          ValueError: files can't be made below root, or it belongs to another user; the message says why.
        """
        super().__init__("disk", capacity, eviction)
        self._root, self._most_bytes, self._file_key = root, capacity, file_key
        self._checksum = PageChecksum(fingerprint, part)
        self._file_bytes = CHECKSUM_BYTES + layout.part_bytes(part) + SEAL_BYTES * (file_key is not None)
        model = repr((fingerprint, tuple(layout), tuple(part))).encode()
        self._model = hashlib.blake2b(model, digest_size=12, person=b"page files").hexdigest()
        self._full_at = 0  # bytes of pages when the volume was found full
        self._fullness = FaultLog()
        self.num_unusable = 0
        self._others: dict[Path, int] = {}  # files of other models, and their bytes; the first goes first
        self._locks: list[int] = []
        try:
            self._open_folder()
        except OSError as error:
            self.close()
            raise ValueError(f"disk: pages can't be kept in {root}: {error.strerror or error}") from error

    def make_room(self, size: int) -> list[DiskPage]:
        """Remove files of other models, which are deleted, and then pages; which ones."""
        while self._others and not self.has_room(size):
            path = next(iter(self._others))
            self.used -= self._others.pop(path)
            self._unlink([path])
        return super().make_room(size)

    def plan(self, name: PageName, free_bytes: int) -> tuple[DiskPage, list[DiskPage]] | None:
        """Room for a page: its file, and those to delete before; None if there can't be room."""
        self.capacity = max(self.capacity, min(self._most_bytes, self.used + free_bytes))
        evicted = self.make_room(self._file_bytes)
        if not self.has_room(self._file_bytes):
            return None
        key, parent, number = name
        key_id = "" if self._file_key is None else f"-{self._file_key.id}"
        path = self._folder / f"{self._model}-{number}-{parent.hex()}-{key.hex()}{key_id}{SUFFIX}"
        return DiskPage(name, path, self._file_bytes), evicted

    def free_bytes(self) -> int:
        """Return how many bytes the volume has left, if it was full; else 0, without asking."""
        if self.capacity == self._most_bytes:
            return 0
        try:
            volume = os.statvfs(self._folder)
        except OSError:
            return 0
        return volume.f_bavail * volume.f_frsize

    def add(self, page: DiskPage) -> None:
        super().add(page)
        if self.used > self._full_at:
            self._fullness.note(None, f"disk: the volume of {self._root} has room again")

    def recover(self, error: OSError) -> list[DiskPage]:
        """Make a retry of a failed write possible: make room on a full volume, or the folder anew if it was removed.

        Returns:
          Pages whose files are to be deleted before the retry.

        Raises:
          OSError: the error, if a retry is of no use; or another one: the folder can't be made.
        """
        if error.errno in (errno.ENOENT, errno.ENOTDIR) and self.forget_removed():
            self._open_folder()
            return []
        if error.errno not in _FULL or not self.used:
            raise error
        self.capacity = self._full_at = self.used
        self._fullness.note(
            f"disk: the volume of {self._root} is full with {len(self):,} pages, {self.used:,} bytes of at most "
            f"{self._most_bytes:,}: new pages take the place of old ones",
            "",
        )
        others = len(self._others)
        evicted = self.make_room(1)
        if not evicted and len(self._others) == others:
            raise error
        return evicted

    def forget_removed(self) -> bool:
        """Forget all pages if their folder was removed; returns whether it was."""
        if os.path.exists(self._folder):  # False in any case where it can't be told
            return False
        if self._pages:
            logger.warning("disk: %s was removed, and with it %s pages", self._folder, f"{len(self):,}")
        for page in list(self):
            self.remove(page)
        self._others.clear()
        self.used = 0
        return True

    def write(self, page: DiskPage, payload: memoryview, checksum: int) -> None:
        """Write a planned file whole. OSError: it can't be written; nothing is left of it."""
        temporary = page.path.with_name(f"{secrets.token_hex(16)}.tmp")
        buffers = [memoryview(checksum.to_bytes(CHECKSUM_BYTES, "little")), payload]
        if self._file_key is not None:
            buffers = self._file_key.seal(buffers, page.path.name.encode())
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                while buffers := _after(buffers, os.writev(descriptor, buffers)):
                    pass
            finally:
                os.close(descriptor)
            os.rename(temporary, page.path)
        except BaseException:
            self._unlink([temporary])
            raise

    def read(self, page: DiskPage, out: memoryview) -> int | None:
        """Read a page into memory; its checksum, or None if it was not there or not right."""
        head, sealed = bytearray(CHECKSUM_BYTES), memoryview(b"" if self._file_key is None else bytearray(page.size))
        buffers, done = [memoryview(head), out] if self._file_key is None else [sealed], 0
        try:
            descriptor = os.open(page.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                while buffers and (count := os.preadv(descriptor, buffers, done)):
                    done, buffers = done + count, _after(buffers, count)
            finally:
                os.close(descriptor)
        except OSError:
            return None
        if buffers or not (self._file_key is None or self._file_key.open(sealed, [head, out], page.path.name.encode())):
            return None
        checksum = int.from_bytes(head, "little")
        return checksum if self._checksum(page.name.key, out) == checksum else None

    def delete(self, pages: Iterable[DiskPage]) -> None:
        """Delete the files of pages, as far as they are there."""
        self._unlink(page.path for page in pages)

    def _unlink(self, paths: Iterable[Path]) -> None:
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the folder to others."""
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks.clear()

    def _open_folder(self) -> None:
        """Lock a folder, move the files of writers that have ended there, and find what it has."""
        self.close()
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self._root.stat()
        if status.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"disk: {self._root} belongs to the user {status.st_uid}: name a folder of your own")
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise ValueError(f"disk: everybody may write to {self._root}: `chmod o-w {self._root}`")
        free = [folder for folder in sorted(self._root.glob(f"{_FOLDER}*")) if _is_own(folder) and self._lock(folder)]
        if free:
            self._folder = free.pop(0)
        else:  # other processes don't see a new folder before it is locked
            name = uuid.uuid4().hex
            hidden = self._root / f"new-{name}"
            hidden.mkdir(mode=0o700)
            try:
                self._lock(hidden)
                self._folder = hidden.rename(self._root / f"{_FOLDER}{name}")
            except OSError:
                with contextlib.suppress(OSError):
                    (hidden / "lock").unlink(missing_ok=True)
                    hidden.rmdir()
                raise
        try:
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError as error:
            if error.errno not in _FULL:  # else pages make room for each other
                raise
        for folder in free:
            for file, _ in _files(folder):
                with contextlib.suppress(FileNotFoundError):
                    file.rename(self._folder / file.name)
        for folder in (self._folder, *free):
            self._unlink(folder.glob("*.tmp"))  # of a writer that was killed
        self._find()

    def _lock(self, folder: Path) -> bool:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._locks.append(descriptor)
        return True

    def _find(self) -> None:
        """Take in the files of the folder: those of other models first, which go first, then the oldest."""
        found = []
        for path, status in _files(self._folder):
            name, has_key = self._name_of(path.name)
            is_usable = has_key and name is not None and status.st_size == self._file_bytes
            found.append((is_usable, status.st_mtime_ns, path, name, has_key, status.st_size))
        other_keys = 0
        for is_usable, _, path, name, has_key, size in sorted(found, key=lambda file: file[:3]):
            self.num_unusable += not is_usable
            other_keys += not has_key
            is_cut = name is not None and has_key and not is_usable
            if not is_cut:
                self.delete(self.make_room(size))
            if is_cut or not self.has_room(size):
                self._unlink([path])
            elif is_usable and name is not None:
                self.add(DiskPage(name, path, size))
            else:
                self._others[path] = size
                self.used += size
        if other_keys:
            how = "not encrypted with this key" if self._file_key else "encrypted, and no disk_key_file is given"
            logger.warning("disk: %s pages in %s are %s: they are passed over", f"{other_keys:,}", self._root, how)

    def _name_of(self, file: str) -> tuple[PageName | None, bool]:
        """Return the name of a file's page, and whether this process's key opens it; None: of another model."""
        model, _, rest = file.removesuffix(SUFFIX).partition("-")
        try:
            number, parent, key, *key_id = rest.split("-")
            name = PageName(bytes.fromhex(key), bytes.fromhex(parent), int(number))
        except ValueError:
            return None, True
        if model != self._model:
            return None, True
        return name, key_id == ([] if self._file_key is None else [self._file_key.id])


def _is_own(folder: Path) -> bool:
    """Return whether this user alone can change a writer's folder."""
    status = folder.lstat()
    is_own = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not (is_own and stat.S_ISDIR(status.st_mode)):
        logger.warning("disk: %s is passed over: it is no folder that this user alone may write to", folder)
        return False
    return True


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """List what a writer's folder has: pages, and files of older versions, but none that is deleted meanwhile."""
    for name in os.listdir(folder):
        if name != "lock" and not name.endswith(".tmp"):
            with contextlib.suppress(FileNotFoundError):
                yield folder / name, (folder / name).lstat()


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers after `count` bytes."""
    rest = list(buffers)
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    return [rest[0][count:], *rest[1:]] if count else rest
