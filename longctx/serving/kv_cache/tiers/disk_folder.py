"""The folder of a disk tier: each process that writes has a folder of its own in it, which it locks.

A folder whose writer has ended is adopted by the next that starts: its files are found, and may be deleted. Files of
writers that are alive are read, as they were when the reader started; that one of them goes is a miss.
"""

import fcntl
import os
import uuid
from pathlib import Path

from longctx.serving.kv_cache.tiers.page_file import SUFFIX

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
        """A new folder, which nobody sees before it is locked."""
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
