"""Pages on disk: which files have them, what is deleted for room, and how they are written and read.

The index is in memory, rebuilt from the headers of the files at start. Methods that touch the index are for one thread
at a time (the caller's lock); `write`, `read` and `delete` touch files only, and need none.

Each process that writes locks a folder of its own in the tier's folder. A folder whose writer has ended is
adopted by the next that starts: its files are found, and may be deleted. Files of other live writers are read, as they
were when the reader started; a file of theirs that has gone since is a miss.
"""

import contextlib
import fcntl
import itertools
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.index import TierIndex, TierListener
from longctx.serving.kv_cache.tiers.page_file import (
    SUFFIX,
    FileHeader,
    PageChecksum,
    PageFileError,
    PageRecord,
    read_header,
    read_pages,
    write_page_file,
)
from longctx.serving.kv_cache.tiers.parts import covers, part_shape

_PREFIX = "writer-"


class DiskFolder:
    """Folders of writers below `root`, at one start.

    Attributes:
      own: where this process writes. adopted: folders that are this process's too. shared: those of others.
    """

    def __init__(self, root: Path) -> None:
        """Lock what can be locked.

        Raises:
          ValueError: files can't be made below root; the message says why.
        """
        self._locks: list[int] = []
        self.adopted: list[Path] = []
        self.shared: list[Path] = []
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in sorted(root.glob(f"{_PREFIX}*")):
                (self.adopted if self._lock(folder) else self.shared).append(folder)
            self.own = self.adopted.pop(0) if self.adopted else self._make(root)
            probe = self.own / "probe.tmp"
            probe.write_bytes(b"")
            for folder in (self.own, *self.adopted):
                for rest in folder.glob("*.tmp"):  # of a writer that was killed
                    rest.unlink()
        except OSError as error:
            self.close()
            raise ValueError(f"disk: pages can't be kept in {root}: {error.strerror or error}") from error

    @property
    def files(self) -> list[tuple[Path, bool]]:
        """Files of pages, the oldest first, and whether they are this process's."""
        found = [
            (path, is_own)
            for is_own, folders in ((True, [self.own, *self.adopted]), (False, self.shared))
            for folder in folders
            for path in folder.glob(f"*{SUFFIX}")
        ]
        return sorted(found, key=lambda file: (_modified(file[0]), file[0].name))

    def close(self) -> None:
        """Give the locks back."""
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks.clear()

    def _lock(self, folder: Path) -> bool:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._locks.append(descriptor)
        return True

    def _make(self, root: Path) -> Path:
        """Make a new folder, which other processes don't see before it is locked."""
        name = uuid.uuid4().hex
        hidden = root / f"new-{name}"
        hidden.mkdir(mode=0o700)
        self._lock(hidden)
        return hidden.rename(root / f"{_PREFIX}{name}")


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


_NO_PAGE = PageRecord(b"", b"", 0, 0)


class DiskFile(NamedTuple):
    """A file of pages: where it is, what it says, where its pages begin, its bytes."""

    path: Path
    header: FileHeader
    offset: int
    size: int


class Piece(NamedTuple):
    """A page's part in a file: the `row`th of its pages."""

    file: DiskFile
    row: int

    @property
    def part(self) -> PageSlice:
        return self.file.header.part

    @property
    def record(self) -> PageRecord:
        return self.file.header.records[self.row]

    @property
    def offset(self) -> int:
        return self.file.offset + self.row * self.file.header.page_bytes


class DiskTier:
    """Files of pages below a folder.

    Attributes:
      num_unusable: files found at start that are of another model or format, or torn.
      num_evicted: pages whose files were deleted for room.
      listener: is told of what can be found, if there is one.
    """

    def __init__(
        self,
        root: Path,
        layout: PageLayout,
        part: PageSlice,
        fingerprint: bytes,
        capacity: int,
        eviction: str,
        max_pinned: int | None = None,
    ) -> None:
        """Find what is there.

        Raises:
          ValueError: files can't be made below root.
        """
        self._layout, self.part, self._fingerprint = layout, part, fingerprint
        self._checksum = PageChecksum(fingerprint)
        self.index: TierIndex[Path] = TierIndex(capacity, eviction, max_pinned)
        self.num_unusable = self.num_evicted = 0
        self.listener: TierListener | None = None
        self._files: dict[Path, DiskFile] = {}
        self._pieces: dict[Key, list[Piece]] = {}
        self._complete: set[Key] = set()
        self._folder = DiskFolder(root)
        files = self._folder.files
        numbers = [int(path.stem) for path, _ in files if path.stem.isdecimal()]
        self._numbers = itertools.count(max(numbers, default=0) + 1)
        opened = [(file, is_own) for path, is_own in files if (file := self._open(path, is_own)) is not None]
        for file, is_own in sorted(opened, key=lambda pair: self._is_usable(pair[0])):  # the useless go first
            self._take_in(file, is_own)

    def __contains__(self, key: Key) -> bool:
        """Whether every layer and head of a page's part is there."""
        return key in self._complete

    def __len__(self) -> int:
        return len(self._complete)

    def find(self, key: Key) -> list[Piece]:
        """Pieces that make up a page, held until `release`d; empty if some are missing. The newest come first."""
        if key not in self._complete:
            return []
        pieces = self._choose(key)
        for piece in pieces:
            if piece.file.path in self.index:
                self.index.hold(piece.file.path)
        return pieces

    def release(self, pieces: Iterable[Piece], used: bool = False) -> None:
        """Let the files of pieces go again."""
        for piece in pieces:
            if piece.file.path in self.index:
                if used:
                    self.index.use(piece.file.path)
                self.index.release(piece.file.path)

    def listen(self, listener: TierListener) -> None:
        """Tell a listener of all pages that can be found, and of changes from now on."""
        self.listener = listener
        for key in self._complete:
            listener.stored("disk", key, self._pieces[key][-1].record.parent)

    def forget_piece(self, piece: Piece) -> bool:
        """Forget a piece that could not be read; False: its file is gone, with all its pages, which is no error."""
        if not piece.file.path.exists():
            self._forget_file(piece.file.path)
            return False
        key = piece.record.key
        pieces = self._pieces.get(key, [])
        if piece in pieces:
            pieces.remove(piece)
            self._update(key)
        return True

    def forget(self, key: Key) -> list[Path]:
        """Forget a page and all that its files have; the files to delete, so that a restart doesn't find it."""
        files = {piece.file.path for piece in self._pieces.get(key, [])}
        paths_to_delete = [path for path in sorted(files) if path in self.index]
        for path in files:
            self._forget_file(path)
        return paths_to_delete

    def clear(self) -> list[Path]:
        """Forget all pages; the files to delete."""
        paths_to_delete = [path for path in self._files if path in self.index]
        for path in list(self._files):
            self._forget_file(path)
        return paths_to_delete

    def pin(self, key: Key, until: float) -> bool:
        """Keep the files of a page until a time; False if it isn't there, or too much is pinned."""
        paths = {piece.file.path for piece in self._pieces.get(key, []) if piece.file.path in self.index}
        return key in self._complete and bool(paths) and all(self.index.pin(path, until) for path in paths)

    def unpin(self, keys: Iterable[Key], pinned: Iterable[Key]) -> None:
        """Let the files of pages go when their turn comes, but for those that have other pinned pages."""
        paths, keep = (
            {piece.file.path for key in some for piece in self._pieces.get(key, [])} for some in (keys, pinned)
        )
        for path in paths - keep:
            if path in self.index:
                self.index.unpin(path)

    def plan(self, records: list[PageRecord]) -> tuple[DiskFile, list[Path]] | None:
        """Room for a file of pages: which one, and which to delete before; None if there can't be room."""
        header = FileHeader(self._layout, self._fingerprint, self.part, records)
        offset = len(header.encode())
        size = offset + len(records) * header.page_bytes
        if size > self.index.capacity:
            return None
        paths_to_delete = self._make_room(size)
        if not self.index.has_room(size):
            return None
        path = self._folder.own / f"{next(self._numbers):012d}{SUFFIX}"
        return DiskFile(path, header, offset, size), paths_to_delete

    def write(self, file: DiskFile, payloads: list[memoryview], paths_to_delete: list[Path]) -> None:
        """Write the planned file. OSError: it can't be written."""
        self.delete(paths_to_delete)
        write_page_file(file.path, file.header, payloads)

    def commit(self, file: DiskFile) -> None:
        """Let the pages of a written file be found."""
        self._add_to_index(file, file.header.records[0])
        self._add(file)

    def read(self, piece: Piece, outs: list[memoryview]) -> int:
        """Read a piece, and those after it in its file, into memory; how many leading ones were there and right."""
        header = piece.file.header
        try:
            count = read_pages(piece.file.path, piece.offset, outs) // header.page_bytes
        except OSError:
            return 0
        records = header.records[piece.row : piece.row + count]
        for right, (record, out) in enumerate(zip(records, outs, strict=False)):
            if self._checksum(record.key, header.part, out) != record.checksum:
                return right
        return count

    def read_part(self, piece: Piece, out: np.ndarray) -> bool:
        """Read what a piece has of this process's part into a page of it; whether it was there and right."""
        common = piece.part.intersect(self.part)
        assert common is not None
        data = np.empty(part_shape(self._layout, piece.part), self._layout.bits)
        if not self.read(piece, [data.data.cast("B")]):
            return False
        layers, heads = common.within(self.part)
        from_layers, from_heads = common.within(piece.part)
        out[layers, :, :, heads] = data[from_layers, :, :, from_heads]
        return True

    def delete(self, paths: Iterable[Path]) -> None:
        """Delete files, as far as they are there."""
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the folder to others."""
        self._folder.close()

    def _open(self, path: Path, is_own: bool) -> DiskFile | None:
        """Open a file that was there at start; None if it is none of pages, or torn."""
        try:
            header, offset = read_header(path)
            return DiskFile(path, header, offset, path.stat().st_size)
        except PageFileError:
            if is_own:
                self.delete([path])
        except OSError:
            pass
        self.num_unusable += 1
        return None

    def _is_usable(self, file: DiskFile) -> bool:
        header = file.header
        return header.layout == self._layout and header.fingerprint == self._fingerprint and bool(header.records)

    def _take_in(self, file: DiskFile, is_own: bool) -> None:
        usable = self._is_usable(file)
        self.num_unusable += not usable
        if is_own:
            self.delete(self._make_room(file.size))
            if not self.index.has_room(file.size):
                self.delete([file.path])
                return
            self._add_to_index(file, *(file.header.records[:1] if usable else []))
        if usable:
            self._add(file)

    def _make_room(self, size: int) -> list[Path]:
        paths_to_delete = self.index.make_room(size)
        for path in paths_to_delete:
            self.num_evicted += self._forget_file(path)
        return paths_to_delete

    def _add_to_index(self, file: DiskFile, first: PageRecord = _NO_PAGE) -> None:
        self.index.add(file.path, file.size, first.number, self._file_of(first.parent))

    def _add(self, file: DiskFile) -> None:
        self._files[file.path] = file
        for row, record in enumerate(file.header.records):
            self._pieces.setdefault(record.key, []).append(Piece(file, row))
            self._update(record.key)

    def _forget_file(self, path: Path) -> int:
        """Forget a file, and return how many pages it had."""
        if path in self.index:
            self.index.remove(path)
        file = self._files.pop(path, None)
        records = file.header.records if file is not None else []
        for record in records:
            self._pieces[record.key] = [piece for piece in self._pieces.get(record.key, []) if piece.file is not file]
            self._update(record.key)
        return len(records)

    def _choose(self, key: Key) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in reversed(self._pieces[key]):
            common = piece.part.intersect(self.part)
            if common == self.part:
                return [piece]
            if common is not None and not covers((known.part for known in pieces), common):
                pieces.append(piece)
        return pieces

    def _update(self, key: Key) -> None:
        pieces = self._pieces.get(key, [])
        is_complete = covers((piece.part for piece in pieces), self.part)
        if is_complete != (key in self._complete):
            if is_complete:
                self._complete.add(key)
            else:
                self._complete.remove(key)
            if self.listener is not None:
                if is_complete:
                    self.listener.stored("disk", key, pieces[-1].record.parent)
                else:
                    self.listener.removed("disk", key)
        if not pieces:
            self._pieces.pop(key, None)

    def _file_of(self, key: Key) -> Path | None:
        pieces = self._pieces.get(key)
        return pieces[-1].file.path if pieces and pieces[-1].file.path in self.index else None
