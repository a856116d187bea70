"""Files of pages: whatever happens to them, no wrong page comes out of them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_pages import FINGERPRINT, LAYOUT, chain, contents, load, make_store, put

from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.kv_cache.tiers import disk_tier
from longctx.serving.kv_cache.tiers.page_file import (
    FileHeader,
    PageChecksum,
    PageFileError,
    PageRecord,
    read_header,
    read_pages,
    write_page_file,
)

PAGE = LAYOUT.page_bytes
KEYS = chain("a", 5)


def written(directory: Path, keys: list[bytes] = KEYS, **options: object) -> Path:
    """A folder in which a store has left these pages in one file; that file."""
    store = make_store(directory, **options)
    put(store, keys)
    store.close()
    (path,) = directory.rglob("*.pages")
    return path


def reopened(directory: Path, keys: list[bytes] = KEYS) -> tuple[int, int]:
    """How many leading pages a new store loads, all right, and how many it calls corrupt."""
    store = make_store(directory)
    try:
        return load(store, keys), store.stats.disk.corrupt
    finally:
        store.close()


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    part, checksum = PageSlice((1, 3), (0, 2)), PageChecksum(b"m")
    pages = [np.ascontiguousarray(contents(key)[1:3, :, :, 0:2]) for key in KEYS]
    records = [
        PageRecord(key, KEYS[i - 1] if i else b"", i, checksum(key, part, pages[i].data)) for i, key in enumerate(KEYS)
    ]
    header = FileHeader(LAYOUT, b"m", part, records)
    path = tmp_path / "some.pages"
    size = write_page_file(path, header, [page.data for page in pages])
    assert path.stat().st_size == size == 4096 + 5 * header.page_bytes
    found, offset = read_header(path)
    assert (found, offset) == (header, 4096)
    outs = np.zeros((2, *pages[0].shape), np.uint16)
    assert read_pages(path, offset + 2 * header.page_bytes, [outs[0].data, outs[1].data]) == 2 * header.page_bytes
    np.testing.assert_array_equal(outs, pages[2:4])
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert [path.name for path in tmp_path.iterdir()] == ["some.pages"]


def test_many_pages_go_into_one_file(tmp_path: Path) -> None:
    keys = chain("many", 1500)  # more than one call may read or write
    written(tmp_path, keys, pages=1500, disk_pages=1500)
    assert reopened(tmp_path, keys) == (1500, 0)


def test_a_file_cut_at_every_length_is_a_miss(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for length in [*range(0, 1200, 7), *range(1200, len(whole), 101), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(PageFileError):
            read_header(path)
    for length in (0, 10, 500, 4096, 4097, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert reopened(tmp_path) == (0, 1)
        assert not path.exists()  # its room is of use
    path.write_bytes(whole)
    assert reopened(tmp_path) == (5, 0)


def test_a_file_that_is_cut_while_it_is_in_use(tmp_path: Path) -> None:
    path = written(tmp_path)
    store = make_store(tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - PAGE - 3)
    assert load(store, KEYS) == 3
    assert store.stats.disk.corrupt == 1
    assert store.count(KEYS) == 3  # it is not asked for again, but for the other page
    assert load(store, KEYS[4:]) == 0
    put(store, KEYS)
    assert load(store, KEYS) == 5
    store.close()
    assert reopened(tmp_path) == (0, 1)
    assert reopened(tmp_path, KEYS[3:]) == (2, 0)


@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_flipped_bits_are_never_given_to_anybody(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[float, int]]
) -> None:
    directory = tmp_path_factory.mktemp("disk")
    path = written(directory)
    data = bytearray(path.read_bytes())
    for place, bits in flips:
        data[int(place * len(data))] ^= bits
    path.write_bytes(data)
    count, corrupt = reopened(directory)  # which compares what comes with what is right
    assert count <= 5
    assert count == 5 or corrupt


def test_each_flipped_bit_of_a_page_is_found(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = path.read_bytes()
    for place in (4096 + 2 * PAGE, 4096 + 3 * PAGE - 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert reopened(tmp_path) == (2, 1)


def test_pages_that_change_places_are_found(tmp_path: Path) -> None:
    """Each has right bytes, under another's key."""
    path = written(tmp_path)
    data = path.read_bytes()
    first, second, rest = data[4096 : 4096 + PAGE], data[4096 + PAGE : 4096 + 2 * PAGE], data[4096 + 2 * PAGE :]
    path.write_bytes(data[:4096] + second + first + rest)
    assert reopened(tmp_path) == (0, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": b"another model"},
        {"layout": LAYOUT._replace(page_size=8)},
        {"layout": LAYOUT._replace(dtype="float16")},
        {"layout": LAYOUT._replace(dtype="float8_e4m3fn")},
        {"layout": LAYOUT._replace(num_kv_heads=2, head_dim=4)},  # as many bytes
    ],
)
def test_files_of_another_model_are_never_used(tmp_path: Path, other: dict[str, object]) -> None:
    path = written(tmp_path)
    store = make_store(tmp_path, **other)
    assert store.count(KEYS) == 0
    assert store.stats.disk.corrupt == 1
    assert store.stats.disk.num_bytes == path.stat().st_size
    store.close()
    assert reopened(tmp_path) == (5, 0)  # they are still there for their own
    # They go first when room is needed.
    store = make_store(tmp_path, disk_bytes=4096 + 5 * PAGE, fingerprint=b"another model")
    put(store, chain("b", 2))
    assert not path.exists()
    assert store.count(chain("b", 2)) == 2
    store.close()


def test_a_file_that_is_none_of_pages(tmp_path: Path) -> None:
    path = written(tmp_path)
    for contents_ in (b"", b"lctxpage", b"GGUF" + bytes(9000), os.urandom(5000), b"lctxpage" + b"\xff" * 9000):
        path.write_bytes(contents_)
        assert reopened(tmp_path) == (0, 1)
    path.mkdir()
    assert reopened(tmp_path) == (0, 1)


def test_the_disk_keeps_to_its_bytes(tmp_path: Path) -> None:
    store = make_store(tmp_path, disk_bytes=3 * (4096 + 4 * PAGE))
    for name in "abcdef":
        put(store, chain(name, 4))
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.pages")) <= 3 * (4096 + 4 * PAGE)
    store._host.clear()
    assert [store.count(chain(name, 4)) for name in "abcdef"] == [0, 0, 0, 4, 4, 4]
    assert load(store, chain("d", 4)) == 4
    put(store, chain("g", 4))
    store._host.clear()
    assert [store.count(chain(name, 4)) for name in "defg"] == [4, 0, 4, 4]
    assert store.stats.disk.evicted == 16
    store.close()
    # A smaller disk after a restart.
    store = make_store(tmp_path, disk_bytes=4096 + 4 * PAGE)
    assert sum(store.count(chain(name, 4)) for name in "defg") == 4
    assert len(list(tmp_path.rglob("*.pages"))) == 1
    store.close()


def test_a_full_disk_costs_hits_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    real, is_full = os.writev, [True]

    def writev(descriptor: int, buffers: list[memoryview]) -> int:
        if is_full[0]:
            real(descriptor, [buffers[0][:100]])
            raise OSError(28, "No space left on device")
        return real(descriptor, buffers)

    monkeypatch.setattr(os, "writev", writev)
    put(store, KEYS)
    assert load(store, KEYS) == 5  # from host memory
    assert (store.stats.disk.failed, store.stats.disk.dropped, store.stats.disk.pages) == (1, 5, 0)
    assert "No space left" in store.stats.last_error
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".pages")]
    is_full[0] = False
    put(store, chain("b", 3))
    assert store.stats.disk.stored == 3
    store.close()
    assert reopened(tmp_path, chain("b", 3)) == (3, 0)


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    for folder in ("/proc/self/cache", "/dev/null/cache"):
        with pytest.raises(ValueError, match=f"disk: pages can't be kept in {folder}: "):
            make_store(Path(folder))
    # One that goes away while it is in use.
    store = make_store(tmp_path / "cache")
    put(store, KEYS)
    for path in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    store._host.clear()
    assert load(store, KEYS) == 0
    put(store, KEYS)
    assert load(store, KEYS) == 5
    assert store.stats.disk.failed > 0
    assert store.stats.disk.corrupt == 0
    store.close()


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    first = make_store(tmp_path)
    put(first, KEYS)
    second = make_store(tmp_path)
    put(second, chain("b", 3))
    assert load(second, KEYS) == 5  # what the first had written before the second came
    assert second.stats.disk.num_bytes == first.stats.disk.num_bytes - 2 * PAGE  # each has its own only
    second.clear()
    assert load(first, KEYS) == 5
    # A file that its owner deletes is a miss of the other.
    third = make_store(tmp_path)
    assert third.count(KEYS) == 5
    first.clear()
    assert load(third, KEYS) == 0
    assert third.stats.disk.corrupt == 0
    put(third, KEYS)
    for store in (first, second, third):
        store.close()
    assert len(list(tmp_path.glob("writer-*"))) == 3
    # The next one has them all.
    assert reopened(tmp_path) == (5, 0)
    last = make_store(tmp_path)
    last.clear()
    assert not list(tmp_path.rglob("*.pages"))
    last.close()


WHOLE = LAYOUT.whole
QUARTERS = [PageSlice(layers, heads) for layers in ((0, 2), (2, 3)) for heads in ((0, 1), (1, 4))]


def test_a_cache_that_is_written_in_parts_serves_others(tmp_path: Path) -> None:
    """As by processes of one plan, and read by those of another one."""
    for part in QUARTERS:
        store = make_store(tmp_path, part=part)
        put(store, KEYS)
        assert load(store, KEYS) == 5
        store.close()
        if part != QUARTERS[-1]:
            whole = make_store(tmp_path)
            assert whole.count(KEYS) == 0  # some part is missing
            whole.close()
    for part in (WHOLE, *QUARTERS, PageSlice((1, 3), (0, 4)), PageSlice((0, 3), (2, 3))):
        store = make_store(tmp_path, part=part)
        assert store.count(KEYS) == 5
        assert load(store, KEYS) == 5
        assert load(store, KEYS) == 5  # from host memory
        assert store.stats.host.corrupt == store.stats.disk.corrupt == 0
        store.close()
    # A wrong bit in any part is a miss of all who need it.
    paths = sorted(tmp_path.rglob("*.pages"))
    data = bytearray(paths[0].read_bytes())
    data[-1] ^= 1
    paths[0].write_bytes(data)
    assert reopened(tmp_path) == (4, 1)


def test_parts_that_overlap(tmp_path: Path) -> None:
    for part in (PageSlice((0, 2), (0, 4)), PageSlice((0, 2), (0, 4)), PageSlice((1, 3), (0, 4)), QUARTERS[0]):
        store = make_store(tmp_path, part=part)
        store._disk._complete.clear()  # type: ignore[union-attr]
        put(store, KEYS)
        store.close()
    assert reopened(tmp_path) == (5, 0)


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from longctx.serving.kv_cache.tiers import writer
writer.FILE_BYTES = 6 * 384
from tier_pages import chain, make_store, put
store = make_store(Path({folder!r}), pages=64, disk_pages=100_000)
print("ready", flush=True)
for number in range(100_000):
    put(store, chain(str(number), 6), flush=False)
    if number % 10 == 0:
        store.flush(20)
        print(number, flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.08])
def test_a_writer_that_is_killed_leaves_no_wrong_page(tmp_path: Path, delay: float) -> None:
    program = textwrap.dedent(WRITER).format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    flushed = int(process.stdout.readline())
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    lines = process.stdout.read().split("\n")
    process.wait(20)
    process.stdout.close()
    flushed = max([flushed, *(int(line) for line in lines[:-1])])
    store = make_store(tmp_path, pages=64, disk_pages=100_000)
    for number in range(flushed + 1):  # what was flushed is there
        assert load(store, chain(str(number), 6)) == 6
    for number in range(flushed + 1, flushed + 20):
        load(store, chain(str(number), 6))
    assert store.stats.disk.corrupt == 0
    assert not list(tmp_path.rglob("*.tmp"))
    store.close()


def test_the_queue_drops_the_coldest_and_never_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    gate, is_writing = threading.Event(), threading.Event()
    real = disk_tier.write_page_file

    def slow(path: Path, header: FileHeader, payloads: list[memoryview]) -> int:
        is_writing.set()
        assert gate.wait(30)
        return real(path, header, payloads)

    monkeypatch.setattr(disk_tier, "write_page_file", slow)
    store = make_store(tmp_path, pages=32, queue_bytes=8 * PAGE)
    put(store, chain("first", 1), flush=False)
    assert is_writing.wait(20)
    for name in "abc":
        put(store, chain(name, 4), flush=False)
        while store.count(chain(name, 4)) < 4:
            time.sleep(0.001)
    assert store.stats.disk.dropped == 4
    gate.set()
    assert store.flush(20)
    store._host.clear()
    assert [store.count(chain(name, 4)) for name in "abc"] == [0, 4, 4]
    assert store.count(chain("first", 1)) == 1
    store.close()


def test_fingerprints_are_part_of_checksums() -> None:
    data = bytes(100)
    sums = {
        PageChecksum(fingerprint)(key, part, data)
        for fingerprint in (FINGERPRINT, b"other")
        for key in KEYS
        for part in QUARTERS
    }
    assert len(sums) == 2 * 5 * 4
