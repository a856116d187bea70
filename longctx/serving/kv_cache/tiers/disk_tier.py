"""Pages on disk: a file for each, which files there are, and what is deleted for room.

`ROOT/writer-*/MODEL-NUMBER-PARENT-KEY.page`: a digest of the model and of the process's part of its pages, the number
of the page in its sequence, the key of the page before it, and its own. A file has the page's checksum (8 bytes,
little-endian), then its bytes. It is written under another name and renamed, so a writer that is killed leaves no part
of a page; what a power failure leaves of the newest files has another size or a wrong checksum.

The index is in memory, rebuilt from names and sizes at start. Methods that touch the index are for one thread at a time
(the caller's lock); `write`, `read` and `delete` touch files only, and need none.

Each process locks a folder of its own. The files of a folder whose writer has ended are moved to the folder of the next
process that starts.
"""

import contextlib
import fcntl
import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.tiers.host_memory import PageChecksum
from longctx.serving.kv_cache.tiers.index import PageName, TierIndex, TierPage

SUFFIX = ".page"
CHECKSUM_BYTES = 8
_FOLDER = "writer-"


class DiskPage(TierPage):
    """Page in a file."""

    __slots__ = ("path",)

    def __init__(self, name: PageName, path: Path, size: int) -> None:
        super().__init__(name, size)
        self.path = path


class DiskTier(TierIndex[DiskPage]):
    """Files of pages below a folder.

    Attributes:
      num_unusable: files found at start that are of another model or version, or not whole.
    """

    def __init__(
        self, root: Path, layout: PageLayout, part: PageSlice, fingerprint: bytes, capacity: int, eviction: str
    ) -> None:
        """Find what is there.

        Raises:
          ValueError: files can't be made below root; the message says why.
        """
        super().__init__("disk", capacity, eviction)
        self._checksum = PageChecksum(fingerprint, part)
        self._file_bytes = CHECKSUM_BYTES + layout.part_bytes(part)
        model = repr((fingerprint, tuple(layout), tuple(part))).encode()
        self._model = hashlib.blake2b(model, digest_size=12, person=b"page files").hexdigest()
        self.num_unusable = 0
        self._others: dict[Path, int] = {}  # files of other models, and their bytes; the first goes first
        self._locks: list[int] = []
        try:
            self._open_folder(root)
            self._find()
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

    def plan(self, name: PageName) -> tuple[DiskPage, list[DiskPage]] | None:
        """Room for a page: its file, and those to delete before; None if there can't be room."""
        evicted = self.make_room(self._file_bytes)
        if not self.has_room(self._file_bytes):
            return None
        key, parent, number = name
        path = self._folder / f"{self._model}-{number}-{parent.hex()}-{key.hex()}{SUFFIX}"
        return DiskPage(name, path, self._file_bytes), evicted

    def write(self, page: DiskPage, payload: memoryview, checksum: int) -> None:
        """Write a planned file whole. OSError: it can't be written; nothing is left of it."""
        temporary = page.path.with_suffix(".tmp")
        buffers = [memoryview(checksum.to_bytes(CHECKSUM_BYTES, "little")), payload]
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
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
        head = bytearray(CHECKSUM_BYTES)
        buffers, done = [memoryview(head), out], 0
        try:
            descriptor = os.open(page.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while buffers and (count := os.preadv(descriptor, buffers, done)):
                    done, buffers = done + count, _after(buffers, count)
            finally:
                os.close(descriptor)
        except OSError:
            return None
        checksum = int.from_bytes(head, "little")
        return checksum if not buffers and self._checksum(page.name.key, out) == checksum else None

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

    def _open_folder(self, root: Path) -> None:
        """Lock a folder, and move the files of writers that have ended there."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = [folder for folder in sorted(root.glob(f"{_FOLDER}*")) if self._lock(folder)]
        if free:
            self._folder = free.pop(0)
        else:  # other processes don't see a new folder before it is locked
            name = uuid.uuid4().hex
            hidden = root / f"new-{name}"
            hidden.mkdir(mode=0o700)
            self._lock(hidden)
            self._folder = hidden.rename(root / f"{_FOLDER}{name}")
        (self._folder / "probe.tmp").write_bytes(b"")
        for folder in free:
            for file, _ in _files(folder):
                with contextlib.suppress(FileNotFoundError):
                    file.rename(self._folder / file.name)
        for folder in (self._folder, *free):
            self._unlink(folder.glob("*.tmp"))  # of a writer that was killed

    def _lock(self, folder: Path) -> bool:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
            name = self._name_of(path.name, status.st_size)
            found.append((name is not None, status.st_mtime_ns, path, name, status.st_size))
        for is_usable, _, path, name, size in sorted(found):
            self.num_unusable += not is_usable
            is_cut = path.name.startswith(f"{self._model}-") and not is_usable
            if not is_cut:
                self.delete(self.make_room(size))
            if is_cut or not self.has_room(size):
                self._unlink([path])
            elif name is not None:
                self.add(DiskPage(name, path, size))
            else:
                self._others[path] = size
                self.used += size

    def _name_of(self, file: str, size: int) -> PageName | None:
        """Return the name of a file's page; None: it is of another model or version, or not whole."""
        model, _, rest = file.removesuffix(SUFFIX).partition("-")
        try:
            number, parent, key = rest.split("-")
            name = PageName(bytes.fromhex(key), bytes.fromhex(parent), int(number))
        except ValueError:
            return None
        return name if model == self._model and size == self._file_bytes else None


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """List what a writer's folder has: pages, and files of older versions, but none that is deleted meanwhile."""
    for name in os.listdir(folder):
        if name != "lock" and not name.endswith(".tmp"):
            with contextlib.suppress(FileNotFoundError):
                yield folder / name, (folder / name).stat()


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers after `count` bytes."""
    rest = list(buffers)
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    return [rest[0][count:], *rest[1:]] if count else rest
