"""A disk tier whose volume is full, whose folder is removed, or whose folder belongs to others."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tier_pages import LAYOUT, chain, load, make_store, only_on_disk, put

from longctx.serving.kv_cache.tiers import disk_tier, writer

FILE = 8 + LAYOUT.page_bytes
KEYS = chain("a", 5)

# In a mount namespace of its own: argv has the folder of the tests, and that which a volume of 1 MiB is mounted on.
FULL_VOLUME = """
import subprocess, sys
from pathlib import Path
folder = Path(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
sys.path.insert(0, sys.argv[1])
from tier_pages import LAYOUT, chain, load, make_store, only_on_disk, put
layout = LAYOUT._replace(head_dim=256)  # 48 KiB a page
def fill(store, name, count):
    for number in range(count):
        put(store, chain(f"{name}{number}", 1))
    only_on_disk(store)
    return [number for number in range(count) if store.count(chain(f"{name}{number}", 1))]
store = make_store(folder, disk_bytes=2**24, layout=layout)
kept, stats = fill(store, "a", 60), store.stats.disk
assert (stats.stored, stats.dropped, stats.failed) == (60, 0, 0), stats
assert kept == list(range(60 - len(kept), 60)), kept
assert len(kept) == stats.pages >= 15
assert stats.num_bytes <= stats.capacity <= 2**20
store.close()
# After a restart, with as many bytes asked for.
store = make_store(folder, disk_bytes=2**24, layout=layout)
assert store.stats.disk.pages == len(kept)
new, stats = fill(store, "b", 30), store.stats.disk
assert (stats.stored, stats.dropped, stats.failed) == (30, 0, 0), stats
assert new == list(range(30 - len(new), 30)), new
assert len(new) >= 15
# The volume grows: the tier grows with it.
subprocess.run(["mount", "-o", "remount,size=4m", folder], check=True)
assert len(fill(store, "c", 60)) == 60
assert store.stats.disk.num_bytes > 2**20
store.close()
"""


def test_a_full_volume_evicts_old_pages_for_new_ones(tmp_path: Path) -> None:
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*namespace, "mount", "-t", "tmpfs", "tmpfs", tmp_path], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to mount a volume in a namespace")
    program = [sys.executable, "-c", FULL_VOLUME, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run([*namespace, *program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2, done.stderr  # one for each process
    for line in lines:
        assert f"the volume of {tmp_path} is full" in line
        assert "of at most 16,777,216: new pages take the place of old ones" in line


def test_a_volume_that_others_fill_takes_pages_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that finds no room costs two others, and not all of them."""
    store = make_store(tmp_path)
    put(store, KEYS)

    def writev(descriptor: int, buffers: list[memoryview]) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", writev)
    put(store, chain("b", 1))
    stats = store.stats.disk
    assert (stats.pages, stats.failed, stats.dropped, stats.is_failing) == (3, 1, 1, True)
    monkeypatch.undo()
    put(store, chain("c", 4))
    stats = store.stats.disk
    assert (stats.pages, stats.failed, stats.is_failing) == (7, 1, False)
    store.close()


def test_a_removed_folder_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache"
    store = make_store(folder)
    put(store, KEYS)
    only_on_disk(store)
    shutil.rmtree(folder)
    put(store, chain("b", 3))
    stats = store.stats.disk
    assert (stats.pages, stats.num_bytes, stats.stored, stats.failed) == (3, 3 * FILE, 8, 0)
    assert len(list(folder.rglob("*.page"))) == 3
    assert caplog.text.count("was removed, and with it 5 pages") == 1
    store.close()
    store = make_store(folder)
    assert load(store, chain("b", 3)) == 3
    store.close()


def test_reading_finds_out_that_a_folder_was_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(tmp_path / "cache")
    put(store, KEYS)
    put(store, chain("b", 3))
    only_on_disk(store)
    shutil.rmtree(tmp_path / "cache")
    assert load(store, KEYS) == 0
    assert (store.stats.disk.pages, store.stats.disk.num_bytes, store.stats.disk.corrupt) == (0, 0, 0)
    put(store, KEYS)
    assert store.stats.disk.pages == 5
    assert caplog.text.count("was removed") == 1
    store.close()


def test_failing_and_recovery_are_one_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_SECONDS_BETWEEN_LINES", 0.0)
    folder = tmp_path / "cache"
    store = make_store(folder)
    put(store, KEYS)
    shutil.rmtree(folder)
    folder.write_text("a file, where the folder was")
    put(store, chain("b", 3))
    stats = store.stats.disk
    assert (stats.pages, stats.failed, stats.dropped, stats.is_failing) == (0, 3, 3, True)
    folder.unlink()
    put(store, chain("c", 2))
    stats = store.stats.disk
    assert (stats.pages, stats.failed, stats.is_failing) == (2, 3, False)
    assert caplog.text.count("a page can't be written: FileExistsError") == 1
    assert caplog.text.count("kv-write: pages are written again") == 1
    store.close()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    make_store(folder).close()
    monkeypatch.setattr(disk_tier.os, "geteuid", lambda: os.getuid() + 1)
    if os.getuid():  # what root owns may be used: volumes that are mounted for a group
        with pytest.raises(ValueError, match=f"disk: {folder} belongs to the user {os.getuid()}: name a folder"):
            make_store(folder)
    else:
        os.chown(folder, 12345, -1)
        with pytest.raises(ValueError, match=f"disk: {folder} belongs to the user 12345: name a folder of your own"):
            make_store(folder)


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=f"everybody may write to {folder}: `chmod o-w {folder}`"):
        make_store(folder)
    folder.chmod(0o1777)  # as /tmp is
    make_store(folder).close()


def test_folders_that_others_may_write_to_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their pages could be anybody's, and what a link leads to too."""
    store = make_store(tmp_path / "one")
    put(store, KEYS)
    store.close()
    (own,) = (tmp_path / "one").glob("writer-*")
    own.chmod(0o770)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "writer-link").symlink_to(own)
    for folder in ("one", "two"):
        store = make_store(tmp_path / folder)
        assert store.count(KEYS) == 0
        store.close()
    assert caplog.text.count("is passed over: it is no folder that this user alone may write to") == 2
    own.chmod(0o700)
    store = make_store(tmp_path / "one")
    assert load(store, KEYS) == 5
    store.close()


def test_no_file_is_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies under the name of a temporary file stays as it is, and a page is no link."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    monkeypatch.setattr(disk_tier.secrets, "token_hex", lambda size: "known")
    store = make_store(tmp_path / "cache")
    put(store, KEYS)
    (folder,) = (tmp_path / "cache").glob("writer-*")
    (folder / "known.tmp").symlink_to(victim)
    put(store, chain("b", 1))
    assert victim.read_bytes() == b"precious"
    assert store.stats.disk.failed == 1
    page = next(folder.glob("*-0-*.page"))
    page.rename(tmp_path / "elsewhere")
    page.symlink_to(tmp_path / "elsewhere")
    only_on_disk(store)
    assert load(store, KEYS) == 0
    assert store.stats.disk.corrupt == 1
    store.close()
