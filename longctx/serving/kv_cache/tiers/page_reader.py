"""Reading pages from a tier into host memory, and comparing their checksums. No index, no lock."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.disk_tier import DiskTier, Piece
from longctx.serving.kv_cache.tiers.host_memory import HostMemory, HostPage
from longctx.serving.kv_cache.tiers.page_file import PageChecksum
from longctx.serving.kv_cache.tiers.remote import CHECKSUM_BYTES, RemoteStore, remote_name


class DiskRead(NamedTuple):
    """Result of reading pages on disk.

    Attributes:
      sums: checksums of the leading pages that are right, as this process's part.
      wrong: pieces of the page after those which were gone or wrong.
    """

    sums: list[int]
    wrong: list[Piece]


class RemoteRead(NamedTuple):
    """Result of reading pages of a remote store.

    Attributes:
      payloads: bytes of the leading pages that are right. sums: their checksums.
      is_corrupt: whether the next one is there, and wrong.
    """

    payloads: list[np.ndarray]
    sums: list[int]
    is_corrupt: bool


class PageReader:
    """Reads pages of one model, as the part that this process has."""

    def __init__(self, part: PageSlice, fingerprint: bytes, memory: HostMemory, disk: DiskTier | None) -> None:
        self._part, self._fingerprint, self._memory, self._disk = part, fingerprint, memory, disk
        self._checksum = PageChecksum(fingerprint)

    def check(self, pages: Sequence[HostPage]) -> int:
        """Return how many leading pages of host memory are what was written there."""
        for right, page in enumerate(pages):
            if self._checksum(page.name.key, self._part, self._memory.buffer(page.slot)) != page.checksum:
                return right
        return len(pages)

    def read_disk(self, chunk: Sequence[list[Piece]], outs: Sequence[np.ndarray]) -> DiskRead:
        """Read pages, each made up of pieces, into arrays of this process's part."""
        assert self._disk is not None
        sums: list[int] = []
        while len(sums) < len(chunk):
            done = len(sums)
            run = self._run(chunk[done:])
            if run:
                buffers = [out.data.cast("B") for out in outs[done : done + run]]
                right = self._disk.read(chunk[done][0], buffers)
                sums += [piece.record.checksum for (piece,) in chunk[done : done + right]]
                if right < run:
                    return DiskRead(sums, chunk[done + right])
            else:
                wrong = [piece for piece in chunk[done] if not self._disk.read_part(piece, outs[done])]
                if wrong:
                    return DiskRead(sums, wrong)
                key, data = chunk[done][0].record.key, outs[done].data.cast("B")
                sums.append(self._checksum(key, self._part, data))
        return DiskRead(sums, [])

    def read_remote(self, remote: RemoteStore, keys: Sequence[Key]) -> RemoteRead:
        """Read the leading pages that a remote store has."""
        names = [remote_name(self._fingerprint, key, self._part) for key in keys]
        count = min(remote.exists(names), len(names))
        values = np.zeros((count, CHECKSUM_BYTES + self._memory.page_bytes), np.uint8)
        count = min(remote.get(names[:count], values), count) if count else 0
        payloads: list[np.ndarray] = []
        sums: list[int] = []
        for key, value in zip(keys, values[:count], strict=False):
            payload, expected = value[CHECKSUM_BYTES:], int.from_bytes(value[:CHECKSUM_BYTES].tobytes(), "little")
            if self._checksum(key, self._part, payload.data) != expected:
                return RemoteRead(payloads, sums, is_corrupt=True)
            payloads.append(payload)
            sums.append(expected)
        return RemoteRead(payloads, sums, is_corrupt=False)

    def _run(self, chunk: Sequence[list[Piece]]) -> int:
        """Count the leading pages that lie one after another in one file, as this process's part."""
        first = chunk[0][0]
        if len(chunk[0]) > 1 or first.part != self._part:
            return 0
        run = 1
        while run < len(chunk) and len(chunk[run]) == 1:
            (piece,) = chunk[run]
            if piece.file is not first.file or piece.row != first.row + run:
                break
            run += 1
        return run
