"""Files and texts that flags give, checked before anything is loaded, and the folder of what commands keep."""

import io
import os
import tempfile
from pathlib import Path

from longctx.serving.kv_cache.secret import check_private
from longctx.serving.validation import check_text


def read_text(flag: str, path: Path, max_bytes: int | None = None, is_secret: bool = False) -> str:
    """Read a UTF-8 text, of a regular file where `max_bytes` limits it; ValueError names the flag, or a command.

    Args:
      is_secret: refuse a file that other users may read, see `check_private`.
    """
    try:
        check_input(flag, path)
        if max_bytes is not None and not path.is_file():  # a pipe or a device may never end
            raise ValueError(f"{flag}: {path} is not a regular file")
        with path.open("rb") as file:
            if is_secret:
                check_private(flag, path, os.fstat(file.fileno()))
            contents = file.read() if max_bytes is None else file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{flag}: {path} can't be read: {error.strerror}") from None
    if max_bytes is not None and len(contents) > max_bytes:
        raise ValueError(
            f"{flag}: {path} has more than {max_bytes:,} bytes, which are too many for the model's context"
        )
    if b"\0" in contents:
        raise ValueError(f"{flag}: {path} is a binary file")
    try:
        text = io.TextIOWrapper(io.BytesIO(contents), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}: {path} is not UTF-8: byte {error.start} is wrong, {error.reason}") from None
    if not text.strip():
        raise ValueError(f"{flag}: {path} is empty")
    return text


def check_prompt(flag: str, text: str) -> str:
    """Check a text that stands on the command line as `read_text` checks that of a file, and return it."""
    if not check_text(flag, text).strip():
        raise ValueError(f"{flag} is empty")
    return text


def check_input(flag: str, path: Path) -> None:
    """Check that a file is there; ValueError, with the flag and the file, if not."""
    if path.is_dir():
        raise ValueError(f"{flag}: {path} is a directory")
    if not path.exists():
        raise ValueError(f"{flag}: no such file: {path}")


def check_trace(flag: str, path: Path) -> None:
    """Check that a file or a folder of files is there; ValueError, with the flag and the path, if not."""
    if not path.exists():
        raise ValueError(f"{flag}: no such file: {path}")


def check_output(flag: str, path: Path) -> None:
    """Check that results can be written to a file later. It is opened for that; one that is new is removed again."""
    if path.is_dir():
        raise ValueError(f"{flag} must be a file, and {path} is a directory")
    if not path.parent.is_dir():
        raise ValueError(f"{flag}: no such directory: {path.parent}")
    is_new = not path.exists()
    if not is_new and not path.is_file():
        return  # such as a pipe, which an opening would wait for
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666))
    except OSError as error:
        raise ValueError(f"{flag}: {path} can't be written: {error.strerror}") from None
    if is_new:
        path.unlink(missing_ok=True)


def check_folder(flag: str, path: Path, mode: int = 0o777) -> None:
    """Check that a path is a folder that can be written to, which is made if it is not there; ValueError if not."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{flag} must be a folder, and {path} is a file")
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(f"{flag}: no folder can be made or written to at {path}: {error.strerror}") from None


def check_drawing(flag: str, path: Path) -> None:
    """Check that a drawing can be made and its format is known; ValueError, with the flag, if not."""
    from longctx.simulation.reports.plots import check_can_plot  # not needed for `--help`

    try:
        check_can_plot(path)
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from None


CACHE_VARIABLE = "LONGCTX_CACHE"


def cache_root() -> Path:
    """The folder of `LONGCTX_CACHE`, or else the user's cache folder; RuntimeError: the user has no home."""
    import platformdirs

    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else platformdirs.user_cache_path("longctx")
