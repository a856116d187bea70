"""SHA-256 sums that a checkpoint directory has of its files, and whether they are right."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from longctx.models.json_file import is_file, read_text

_LISTS = ("SHA256SUMS", "SHA256SUMS.txt", "sha256sums.txt", "*.sha256")
_LINE = re.compile(r"([0-9a-fA-F]{64})(?: [ *](.+))?")
_SUM = re.compile(r"[0-9a-f]{64}")


def checksum_problems(directory: Path) -> Iterator[str]:
    """Compare each file with its sum, and yield what differs.

    Sums are read from lists as `sha256sum` writes them (`SHA256SUMS`, `sha256sums.txt`, `*.sha256`), and from what the
    Hugging Face hub's client leaves: `.cache/huggingface/download/*.metadata`, or links to blobs that are named by sum.
    """
    try:
        for source, name, expected in _expected(directory):
            problem = f"{source}: {name}" if expected is None else _difference(directory, source, name, expected)
            if problem is not None:
                yield problem
    except OSError as error:
        yield f"{directory} cannot be searched for SHA-256 sums: {error}"


def _difference(directory: Path, source: Path, name: str, expected: str) -> str | None:
    path = directory / name
    try:
        if not is_file(path):
            return f"{source} has a sum of {name!r}, which is not in {directory}"
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path} cannot be read: {error}"
    except ValueError as error:
        return str(error)
    return None if found == expected else f"{path}: its SHA-256 is {found}, that in {source} is {expected}"


def _expected(directory: Path) -> Iterator[tuple[Path, str, str | None]]:
    """Source, file name and sum; or source, what is wrong with it, and None."""
    for path in sorted({path for pattern in _LISTS for path in directory.glob(pattern)}):
        try:
            lines = [line for line in read_text(path).splitlines() if line.strip()]
        except (FileNotFoundError, ValueError) as error:
            yield path, str(error), None
            continue
        for line in lines:
            found = _LINE.fullmatch(line)
            name = PurePosixPath((found and found[2]) or path.stem)
            if found is None or name.is_absolute() or ".." in name.parts:
                yield path, f"{line[:80]!r} is not a SHA-256 sum and the name of a file in this directory", None
            else:
                yield path, str(name), found[1].lower()
    for path in sorted(directory.glob(".cache/huggingface/download/*.metadata")):
        if (directory / path.stem).is_file() and path.is_file():
            lines = path.read_bytes()[:1000].decode(errors="replace").splitlines()
            if len(lines) > 1 and _SUM.fullmatch(lines[1]):
                yield path, path.stem, lines[1]
    for path in sorted(directory.iterdir()):
        if path.is_symlink() and path.is_file() and _SUM.fullmatch(path.resolve().name):
            yield path.resolve(), path.name, path.resolve().name
