"""Reads logs: which runs a directory has, and the records of one."""

from collections.abc import Iterator
from pathlib import Path

from longctx.serving.recording.header import NAME, Header
from longctx.serving.recording.records import Record, decode
from longctx.serving.recording.writer import read_frames


def segment_name(number: int) -> str:
    """The name of a file of records."""
    return f"{number:06}.log"


class RecordedLog:
    """A run that was recorded.

    Args:
      directory: of the run, or of several, the last of which is read.

    Attributes:
      header: see `Header`.
      torn_bytes: of unfinished records at the ends of files, which are cut; known when all have been read.

    Raises:
      FileNotFoundError: there is no log.
      ValueError: it is damaged, or of another version.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = find_run(directory)
        self.header = Header.read(self.directory)
        self.torn_bytes = 0
        self._paths = sorted(self.directory.glob("[0-9]*.log"))
        if not self._paths:
            raise FileNotFoundError(f"{self.directory} has no {segment_name(0)}: nothing was recorded")
        first = int(self._paths[0].stem)
        for number, path in enumerate(self._paths, first):
            if path.name != segment_name(number):
                raise ValueError(f"{self.directory} lacks {segment_name(number)}, and has {path.name}")

    def records(self) -> Iterator[Record]:
        """All records, in order. A file that is not the first begins with a `Snapshot`.

        Raises:
          ValueError: the log is damaged.
        """
        self.torn_bytes, is_empty = 0, True
        for path in self._paths:
            torn: list[int] = []
            for number, payload in enumerate(read_frames(path, torn)):
                is_empty = False
                try:
                    yield decode(payload)
                except ValueError as error:
                    raise ValueError(f"{path}, record {number}: {error}") from None
            self.torn_bytes += sum(torn)
        if is_empty:
            raise ValueError(f"{self.directory} has no whole record: nothing was recorded")


def find_run(directory: Path) -> Path:
    """The directory of a run: this one, or the last one in it.

    Raises:
      FileNotFoundError: there is none.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"no such directory: {directory}")
    if (directory / NAME).exists():
        return directory
    runs = sorted(path.parent for path in directory.glob(f"*/{NAME}"))
    if not runs:
        raise FileNotFoundError(f"{directory} is no log of an engine: neither it nor a directory in it has a {NAME}")
    return runs[-1]
