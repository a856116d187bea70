"""Files of pages: whatever happens to them, no wrong page comes out of them."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_pages import LAYOUT, chain, load, make_store, only_on_disk, put, wait_for

from longctx.serving.kv_cache.page_layout import PageSlice

PAGE = LAYOUT.page_bytes
FILE = 8 + PAGE  # bytes
KEYS = chain("a", 5)


def written(directory: Path, keys: list[bytes] = KEYS) -> list[Path]:
    """Files that a store has left of these pages, in their order."""
    store = make_store(directory)
    put(store, keys)
    store.close()
    found = [next(directory.rglob(f"*-{key.hex()}.page")) for key in keys]
    assert sorted(found) == sorted(directory.rglob("*.page"))
    return found


def reopened(directory: Path, keys: list[bytes] = KEYS) -> tuple[int, int]:
    """How many leading pages a new store loads, all right, and how many it calls corrupt."""
    store = make_store(directory)
    try:
        return load(store, keys), store.stats.disk.corrupt
    finally:
        store.close()


def test_files_are_whole_and_their_owners_alone(tmp_path: Path) -> None:
    for path in written(tmp_path):
        assert path.stat().st_size == FILE
        assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("length", [0, 7, 8, FILE - 1, FILE + 1])
def test_a_file_of_another_length_is_a_miss(tmp_path: Path, length: int) -> None:
    path = written(tmp_path)[3]
    whole = path.read_bytes()
    path.write_bytes((whole + b"x")[:length])
    assert reopened(tmp_path) == (3, 1)
    assert not path.exists()  # its room is of use
    path.write_bytes(whole)
    assert reopened(tmp_path) == (5, 0)


def test_a_file_that_is_cut_while_it_is_in_use(tmp_path: Path) -> None:
    path = written(tmp_path)[3]
    store = make_store(tmp_path)
    os.truncate(path, PAGE)
    assert load(store, KEYS) == 3
    assert store.stats.disk.corrupt == 1
    assert store.count(KEYS) == 3  # it is not asked for again
    assert load(store, KEYS[4:]) == 1
    put(store, KEYS)
    assert load(store, KEYS) == 5
    store.close()
    assert reopened(tmp_path) == (5, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, FILE - 1), st.integers(0, 7)), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_flipped_bits_are_never_given_to_anybody(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int, int]]
) -> None:
    directory = tmp_path_factory.mktemp("disk")
    paths = written(directory)
    before = [path.read_bytes() for path in paths]
    for page, place, bit in flips:
        data = bytearray(paths[page].read_bytes())
        data[place] ^= 1 << bit
        paths[page].write_bytes(data)
    wrong = [i for i, path in enumerate(paths) if path.read_bytes() != before[i]]
    # What comes is compared with what is right.
    assert reopened(directory) == ((wrong[0], 1) if wrong else (5, 0))


def test_files_that_change_places_are_misses(tmp_path: Path) -> None:
    """Each has right bytes, under another's key."""
    first, second, *_ = written(tmp_path)
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    assert reopened(tmp_path) == (0, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": b"another model"},
        {"layout": LAYOUT._replace(page_size=8)},
        {"layout": LAYOUT._replace(dtype="float16")},
        {"layout": LAYOUT._replace(num_kv_heads=2, head_dim=4)},  # as many bytes
        {"part": PageSlice((0, 3), (0, 2))},  # a process of another plan
    ],
)
def test_files_of_others_are_never_used(tmp_path: Path, other: dict[str, object]) -> None:
    paths = written(tmp_path)
    store = make_store(tmp_path, **other)
    assert store.count(KEYS) == 0
    assert (store.stats.disk.corrupt, store.stats.disk.num_bytes) == (5, 5 * FILE)
    store.close()
    assert reopened(tmp_path) == (5, 0)  # they are still there for their own
    # They go first when room is needed.
    store = make_store(tmp_path, disk_bytes=5 * FILE, fingerprint=b"another model")
    put(store, chain("b", 2))
    assert sum(path.exists() for path in paths) == 3
    assert store.count(chain("b", 2)) == 2
    store.close()


@pytest.mark.parametrize("name", ["000000000001.pages", "0-1-2.page", "a-b-c-d.page", "é"])
def test_files_that_are_none_of_pages(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path)[0].parent
    (folder / name).write_bytes(os.urandom(FILE))
    (folder / f"folder-{name}").mkdir()
    assert reopened(tmp_path) == (5, 2)


def test_files_that_are_deleted_while_a_store_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's own file, and one of a writer that has ended and whose files are moved."""
    paths = written(tmp_path)
    ended = tmp_path / "writer-of-before"
    ended.mkdir()
    paths[4].rename(ended / paths[4].name)
    listdir = os.listdir

    def delete_one(folder: Path) -> list[str]:
        names = listdir(folder)
        for path in (paths[3], ended / paths[4].name):
            if path.parent == folder:
                path.unlink(missing_ok=True)
        return names

    monkeypatch.setattr(os, "listdir", delete_one)
    assert reopened(tmp_path) == (3, 0)


def test_the_disk_keeps_to_its_bytes(tmp_path: Path) -> None:
    store = make_store(tmp_path, disk_bytes=12 * FILE)
    for name in "abcdef":
        put(store, chain(name, 4))
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.page")) <= 12 * FILE
    assert [store.count_by_tier(chain(name, 4))["disk"] for name in "abcdef"] == [0, 0, 0, 4, 4, 4]
    only_on_disk(store)
    assert load(store, chain("d", 4)) == 4
    put(store, chain("g", 4))
    assert [store.count_by_tier(chain(name, 4))["disk"] for name in "defg"] == [4, 0, 4, 4]
    assert store.stats.disk.evicted == 16
    store.close()
    # A smaller disk after a restart.
    store = make_store(tmp_path, disk_bytes=4 * FILE)
    assert store.stats.disk.pages == len(list(tmp_path.rglob("*.page"))) == 4
    store.close()


def test_a_full_disk_costs_hits_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(tmp_path)
    real, is_full = os.writev, [True]

    def writev(descriptor: int, buffers: list[memoryview]) -> int:
        if is_full[0]:
            real(descriptor, [buffers[0][:100]])
            raise OSError(28, "No space left on device")
        return real(descriptor, [buffers[0][:100]])  # writes come short as well

    monkeypatch.setattr(os, "writev", writev)
    put(store, KEYS)
    assert load(store, KEYS) == 5  # from host memory
    assert (store.stats.disk.failed, store.stats.disk.dropped, store.stats.disk.pages) == (5, 5, 0)
    assert caplog.text.count("No space left") == 1
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".page")]
    is_full[0] = False
    put(store, chain("b", 3))
    assert store.stats.disk.stored == 3
    store.close()
    assert reopened(tmp_path, chain("b", 3)) == (3, 0)


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    for folder in ("/proc/self/cache", "/dev/null/cache"):
        with pytest.raises(ValueError, match=f"disk: pages can't be kept in {folder}: "):
            make_store(Path(folder))


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    first = make_store(tmp_path)
    put(first, KEYS)
    second = make_store(tmp_path)
    put(second, chain("b", 3))
    assert second.count(KEYS) == 0
    assert second.stats.disk.num_bytes == 3 * FILE  # each has its own only
    put(second, chain("c", 2))
    for store in (first, second):
        store.close()
    assert len(list(tmp_path.glob("writer-*"))) == 2
    # The next one has them all.
    last = make_store(tmp_path)
    assert [load(last, KEYS), load(last, chain("c", 2))] == [5, 2]
    last.close()


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tier_pages import chain, make_store, put
store = make_store(Path({folder!r}), pages=64, disk_pages=100_000)
print("ready", flush=True)
for number in range(100_000):
    put(store, chain(str(number), 6), flush=False)
    if number % 10 == 0:
        store.flush(20)
        print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_no_wrong_page(tmp_path: Path) -> None:
    program = textwrap.dedent(WRITER).format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    flushed = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    lines = process.stdout.read().split("\n")
    process.wait(20)
    process.stdout.close()
    flushed = max([flushed, *(int(line) for line in lines[:-1])])
    store = make_store(tmp_path, pages=64, disk_pages=100_000)
    for number in range(flushed + 20):
        assert load(store, chain(str(number), 6)) == 6 or number > flushed  # what was flushed is there
    assert store.stats.disk.corrupt == 0
    assert not list(tmp_path.rglob("*.tmp"))
    store.close()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """A disk that writes when the first event says so; the second one says that it is asked to."""
    gate, is_writing = threading.Event(), threading.Event()
    real = os.writev

    def slow(descriptor: int, buffers: list[memoryview]) -> int:
        is_writing.set()
        assert gate.wait(30)
        return real(descriptor, buffers)

    monkeypatch.setattr(os, "writev", slow)
    return gate, is_writing


def test_a_full_queue_of_a_slow_disk_drops_pages(
    tmp_path: Path, slow_disk: tuple[threading.Event, threading.Event]
) -> None:
    gate, is_writing = slow_disk
    store = make_store(tmp_path, pages=32, queue_bytes=8 * PAGE)
    for name in "abc":
        put(store, chain(name, 4), flush=False)
        wait_for(lambda name=name: store.count(chain(name, 4)) == 4)  # type: ignore[misc]
    assert is_writing.wait(20)
    assert store.stats.disk.dropped == 4
    gate.set()
    assert store.flush(20)
    only_on_disk(store)
    assert [store.tier_of(chain(name, 4)[0]) for name in "abc"] == ["disk", "disk", "host"]
    store.close()
