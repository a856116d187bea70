"""Pages on disk: a file for each, which files there are, and what is deleted for room.

`ROOT/writer-*/MODEL-NUMBER-PARENT-KEY.page`: a digest of the model and of the process's part of its pages, the number
of the page in its sequence, the key of the page before it, and its own. A file has the page's checksum (8 bytes,
little-endian), then its bytes. It is written under another name and renamed, so a writer that is killed leaves no part
of a page; what a power failure leaves of the newest files has another size or a wrong checksum.

The index is in memory, rebuilt from names and sizes at start. Methods that touch the index are for one thread at a time
(the caller's lock); `write`, `read` and `delete` touch files only, and need none.

Each process that writes locks a folder of its own. The files of a folder whose writer has ended are moved to the folder
of the next process that starts. Files of other live writers are read, as they were when the reader started; a file of
theirs that has gone since is a miss.
"""

import contextlib
import fcntl
import hashlib
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.host_memory import PageChecksum, PageName
from longctx.serving.kv_cache.tiers.index import TierIndex, TierListener

SUFFIX = ".page"
CHECKSUM_BYTES = 8
_FOLDER = "writer-"


class DiskPage(NamedTuple):
    """A file: which page it has, where, its bytes, whether it is in this process's folder."""

    name: PageName
    path: Path
    size: int
    is_own: bool


class DiskTier:
    """Files of pages below a folder.

    Attributes:
      num_unusable: files found at start that are of another model or version, or not whole.
      listener: is told of what can be found, if there is one.
    """

    def __init__(
        self, root: Path, layout: PageLayout, part: PageSlice, fingerprint: bytes, capacity: int, eviction: str
    ) -> None:
        """Find what is there.

        Raises:
          ValueError: files can't be made below root; the message says why.
        """
        self._checksum = PageChecksum(fingerprint, part)
        self._file_bytes = CHECKSUM_BYTES + layout.part_bytes(part)
        model = repr((fingerprint, tuple(layout), tuple(part))).encode()
        self._model = hashlib.blake2b(model, digest_size=12, person=b"page files").hexdigest()
        self.index: TierIndex[Key] = TierIndex(capacity, eviction)
        self.num_unusable = 0
        self.listener: TierListener | None = None
        self._own: dict[Key, DiskPage] = {}  # also those of other models, under their files' names
        self._shared: dict[Key, DiskPage] = {}
        self._locks: list[int] = []
        try:
            shared = self._open_folder(root)
            self._find([self._folder], is_own=True)
            self._find(shared, is_own=False)
        except OSError as error:
            self.close()
            raise ValueError(f"disk: pages can't be kept in {root}: {error.strerror or error}") from error

    def __contains__(self, key: Key) -> bool:
        return key in self._own or key in self._shared

    def __len__(self) -> int:
        return len(self.names)

    @property
    def names(self) -> dict[Key, PageName]:
        """Names of all pages that can be found, by key."""
        pages = self._shared | self._own
        return {key: page.name for key, page in pages.items() if page.name.key == key}

    def find(self, key: Key) -> DiskPage | None:
        """The file of a page, which is used."""
        if (page := self._own.get(key)) is not None:
            self.index.use(key)
            return page
        return self._shared.get(key)

    def listen(self, listener: TierListener) -> None:
        """Tell a listener of all pages that can be found, and of changes from now on."""
        self.listener = listener
        for name in self.names.values():
            listener.stored("disk", name.key, name.parent)

    def forget(self, key: Key) -> list[Path]:
        """Forget a page; the files to delete, so that a restart doesn't find it."""
        self._hide(key)
        return [self._remove(key)] if key in self._own else []

    def forget_wrong(self, page: DiskPage) -> None:
        """Forget a file that is wrong."""
        key = page.name.key
        if page.is_own and self._own.get(key) is page:
            self.delete([self._remove(key)])
        elif self._shared.get(key) is page:
            self._hide(key)

    def forget_gone(self, keys: Iterable[Key]) -> None:
        """Forget those of some pages whose files are gone, which is no error: their writer has deleted them."""
        for key in keys:
            for page in (self._own.get(key), self._shared.get(key)):
                if page is not None and not page.path.exists():
                    self.forget_wrong(page)

    def clear(self) -> list[Path]:
        """Forget all pages; the files to delete."""
        for key in list(self._shared):
            self._hide(key)
        return [self._remove(key) for key in list(self._own)]

    def pin(self, key: Key) -> bool:
        """Keep a page until it is unpinned; False if it isn't there, or too much is pinned."""
        return key in self._own and self.index.pin(key)

    def unpin(self, key: Key) -> None:
        """Let a page go when its turn comes."""
        if key in self._own:
            self.index.unpin(key)

    def plan(self, name: PageName) -> tuple[DiskPage, list[Path]] | None:
        """Room for a page: its file, and those to delete before; None if there can't be room."""
        paths_to_delete = self._make_room(self._file_bytes)
        if not self.index.has_room(self._file_bytes):
            return None
        key, parent, number = name
        path = self._folder / f"{self._model}-{number}-{parent.hex()}-{key.hex()}{SUFFIX}"
        return DiskPage(name, path, self._file_bytes, True), paths_to_delete

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
            self.delete([temporary])
            raise

    def commit(self, page: DiskPage) -> None:
        """Let a written page be found."""
        key, parent, number = page.name
        is_new = key not in self
        self._own[key] = page
        self.index.add(key, page.size, number, parent or None)
        if is_new and self.listener is not None:
            self.listener.stored("disk", key, parent)

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

    def delete(self, paths: Iterable[Path]) -> None:
        """Delete files, as far as they are there."""
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the folder to others."""
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks.clear()

    def _open_folder(self, root: Path) -> list[Path]:
        """Lock a folder, and move the files of writers that have ended there; returns the folders of the others."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        free, shared = list[Path](), list[Path]()
        for folder in sorted(root.glob(f"{_FOLDER}*")):
            (free if self._lock(folder) else shared).append(folder)
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
            for file in _files(folder):
                os.rename(file.path, self._folder / file.name)
        for folder in (self._folder, *free):
            self.delete(folder.glob("*.tmp"))  # of a writer that was killed
        return shared

    def _lock(self, folder: Path) -> bool:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._locks.append(descriptor)
        return True

    def _find(self, folders: Iterable[Path], is_own: bool) -> None:
        """Take in the files of folders: those of other models first, which go first, then the oldest."""
        found = []
        for file in (file for folder in folders for file in _files(folder)):
            with contextlib.suppress(FileNotFoundError):  # deleted by its writer meanwhile
                status = file.stat()
                name = self._name_of(file.name, status.st_size)
                found.append((name is not None, status.st_mtime_ns, file.path, name, status.st_size))
        for is_usable, _, place, name, size in sorted(found):
            path = Path(place)
            self.num_unusable += not is_usable
            if not is_own:
                if name is not None:
                    self._shared[name.key] = DiskPage(name, path, size, False)
            elif path.name.startswith(f"{self._model}-") and not is_usable:  # not whole
                self.delete([path])
            else:
                self.delete(self._make_room(size))
                if not self.index.has_room(size):
                    self.delete([path])
                elif name is not None:
                    self.commit(DiskPage(name, path, size, True))
                else:
                    other = path.name.encode()
                    self._own[other] = DiskPage(PageName(b""), path, size, True)
                    self.index.add(other, size)

    def _name_of(self, file: str, size: int) -> PageName | None:
        """Return the name of a file's page; None: it is of another model or version, or not whole."""
        model, _, rest = file.removesuffix(SUFFIX).partition("-")
        try:
            number, parent, key = rest.split("-")
            name = PageName(bytes.fromhex(key), bytes.fromhex(parent), int(number))
        except ValueError:
            return None
        return name if model == self._model and size == self._file_bytes else None

    def _make_room(self, size: int) -> list[Path]:
        return [self._pop(key) for key in self.index.make_room(size)]

    def _remove(self, key: Key) -> Path:
        """Forget an own file; its path."""
        self.index.remove(key)
        return self._pop(key)

    def _pop(self, key: Key) -> Path:
        page = self._own.pop(key)
        if page.name.key == key:
            self._tell_removed(key)
        return page.path

    def _hide(self, key: Key) -> None:
        """Forget a file of another writer, if there is one."""
        if self._shared.pop(key, None) is not None:
            self._tell_removed(key)

    def _tell_removed(self, key: Key) -> None:
        if self.listener is not None and key not in self:
            self.listener.removed("disk", key)


def _files(folder: Path) -> list[os.DirEntry[str]]:
    """List what a writer's folder has: pages, and what else there may be, such as files of older versions."""
    with os.scandir(folder) as found:
        return [file for file in found if file.name != "lock" and not file.name.endswith(".tmp")]


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers after `count` bytes."""
    rest = list(buffers)
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    return [rest[0][count:], *rest[1:]] if count else rest
