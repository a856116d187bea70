"""Files of pages: their format, how they are written whole, and how a page of them is read and checked.

A file begins with `magic, version, bytes of the header, XXH3 of the header` (`8s I I Q`, little-endian), then the
header: JSON with the layout, the fingerprint, the part (layers and KV heads) and for each page its key, the key before
it, its number and its checksum. The pages follow, from the next multiple of 4096 bytes on, one after another.

Checksums cover a page's bytes, its key and its part. XXH3 finds accidents, at the speed of memory. It is no signature:
the processes that may write to a cache are trusted.
"""

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.parts import part_shape


def checksum(data: bytes | memoryview) -> int:
    """XXH3, 64 bits, of contiguous memory."""
    return xxhash.xxh3_64_intdigest(data)


class PageChecksum:
    """Checksums of pages of one model: right bytes under another page's key, or as another part, are wrong."""

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint

    def __call__(self, key: Key, part: PageSlice, data: bytes | memoryview) -> int:
        """Return the checksum of the contiguous payload of a page's part."""
        seed = xxhash.xxh3_64_intdigest(b"%d %b %b %r" % (len(key), key, self._fingerprint, tuple(part)))
        return xxhash.xxh3_64_intdigest(data, seed=seed)


VERSION = 1
SUFFIX = ".pages"
_MAGIC = b"lctxpage"
_PREFIX = struct.Struct("<8sIIQ")
_ALIGNMENT = 4096
_MOST_HEADER_BYTES = 64 * 2**20
_MOST_BUFFERS = 512  # of one call; Linux allows 1024


class PageFileError(ValueError):
    """A file is none of pages, or was not written whole."""


class PageRecord(NamedTuple):
    """A page of a file.

    Attributes:
      key, parent: of the page and of the one before it (empty: none, or not known).
      number: which page of its sequence it is. checksum: `PageChecksum` of its payload.
    """

    key: Key
    parent: Key
    number: int
    checksum: int


class FileHeader(NamedTuple):
    """Header of a file of pages.

    Attributes:
      layout, fingerprint: of the model whose pages they are. part: layers and heads that are in the file.
      records: of its pages, in order.
    """

    layout: PageLayout
    fingerprint: bytes
    part: PageSlice
    records: list[PageRecord]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's part."""
        layers, pair, tokens, heads, size = part_shape(self.layout, self.part)
        return layers * pair * tokens * heads * size * self.layout.bits.itemsize

    def encode(self) -> bytes:
        """The bytes before the first page."""
        pages = [[record.key.hex(), record.parent.hex(), record.number, record.checksum] for record in self.records]
        contents = {
            "layout": self.layout._asdict(),
            "fingerprint": self.fingerprint.hex(),
            "part": self.part,
            "pages": pages,
        }
        text = json.dumps(contents).encode()
        whole = _PREFIX.pack(_MAGIC, VERSION, len(text), checksum(text)) + text
        return whole + bytes(-len(whole) % _ALIGNMENT)


def write_page_file(path: Path, header: FileHeader, payloads: Sequence[memoryview]) -> int:
    """Write a file whole: under another name, synced, then renamed. Returns its bytes.

    Raises:
      OSError: it can't be written; nothing is left of it.
    """
    assert len(payloads) == len(header.records)
    temporary = path.with_suffix(".tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            buffers = [memoryview(header.encode()), *(payload.cast("B") for payload in payloads)]
            size = sum(map(len, buffers))
            _write_all(descriptor, buffers)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
        _sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size


def read_header(path: Path) -> tuple[FileHeader, int]:
    """Read what a file says of its pages, and at which byte they begin.

    Raises:
      PageFileError: it is none of pages, of another version, torn, or its header is wrong.
      OSError: it can't be read.
    """
    with path.open("rb") as file:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            raise PageFileError(f"{path} is cut: it has {len(prefix)} bytes")
        magic, version, length, expected = _PREFIX.unpack(prefix)
        if magic != _MAGIC or version != VERSION:
            raise PageFileError(f"{path} is no file of pages of version {VERSION}")
        text = file.read(length) if length <= _MOST_HEADER_BYTES else b""
        if len(text) != length or checksum(text) != expected:
            raise PageFileError(f"{path} has a header that is cut or wrong")
        header = _decode(path, text)
        size = os.fstat(file.fileno()).st_size
    offset = -(-(_PREFIX.size + length) // _ALIGNMENT) * _ALIGNMENT
    whole = offset + len(header.records) * header.page_bytes
    if size != whole:
        raise PageFileError(f"{path} has {size} bytes instead of {whole}")
    return header, offset


def read_pages(path: Path, offset: int, outs: Sequence[memoryview]) -> int:
    """Read consecutive bytes into buffers; how many came. Whether they are right, checksums tell.

    Raises:
      OSError: it can't be read.
    """
    rest, total = [out.cast("B") for out in outs], 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while rest and (count := os.preadv(descriptor, rest[:_MOST_BUFFERS], offset + total)):
            total += count
            rest = _after(rest, count)
    finally:
        os.close(descriptor)
    return total


def _decode(path: Path, text: bytes) -> FileHeader:
    try:
        contents = json.loads(text)
        layout = PageLayout(**contents["layout"])
        part = PageSlice(*((int(first), int(stop)) for first, stop in contents["part"]))
        layout.check_part(part)
        records = [
            PageRecord(bytes.fromhex(key), bytes.fromhex(parent), int(number), int(check))
            for key, parent, number, check in contents["pages"]
        ]
        header = FileHeader(layout, bytes.fromhex(contents["fingerprint"]), part, records)
        if header.page_bytes < 1:
            raise ValueError("pages have no bytes")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise PageFileError(f"{path} has a header that can't be read: {error}") from error
    return header


def _write_all(descriptor: int, buffers: list[memoryview]) -> None:
    while buffers:
        buffers = _after(buffers, os.writev(descriptor, buffers[:_MOST_BUFFERS]))


def _after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers after `count` bytes."""
    rest = list(buffers)
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    return [rest[0][count:], *rest[1:]] if count else rest


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
