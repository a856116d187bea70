"""Files of logs: torn ends, damage, limits, and directories that are none."""

import json
import logging
import shutil
import time
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import drive, recorded_engine, replay, summary

from longctx.serving.kv_cache.secret import make_secret
from longctx.serving.recording import recorder as recorder_module
from longctx.serving.recording.log import RecordedLog, find_run
from longctx.serving.recording.recorder import FLUSH_SECONDS, Recorder, open_recorder
from longctx.serving.recording.records import HEADER_BYTES, Closed, frame, read_frames


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run."""
    with open_recorder(tmp_path_factory.mktemp("log")) as recorder:
        drive(recorded_engine(recorder), 4)
    return recorder.directory


def frame_ends(path: Path) -> list[int]:
    ends = [0]
    for payload in read_frames(path):
        ends.append(ends[-1] + HEADER_BYTES + len(payload))
    return ends


def copy_with(recorded: Path, directory: Path, contents: bytes) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(recorded, directory)
    (directory / "records.log").write_bytes(contents)
    return directory


def test_an_end_that_is_torn_anywhere_is_cut(recorded: Path, tmp_path: Path) -> None:
    """As a process leaves it that is killed: at every byte of the last three records. The rest replays."""
    path = recorded / "records.log"
    contents, ends = path.read_bytes(), frame_ends(path)
    assert ends[-1] == len(contents)
    records = list(RecordedLog(recorded).records())
    for size in range(ends[-4], ends[-1]):
        log = RecordedLog(copy_with(recorded, tmp_path / "torn", contents[:size]))
        whole = [end for end in ends if end <= size]
        assert list(log.records()) == records[: len(whole) - 1]
        assert log.torn_bytes == size - whole[-1]
        if size - 1 in whole:  # the same records until the next one
            baseline = replay(log.directory)
            assert baseline.replayer.end == "ends in the midst of things, as where a process is killed"


@settings(max_examples=30, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_flipped_bits_are_noticed(
    recorded: Path, tmp_path_factory: pytest.TempPathFactory, at: float, bit: int
) -> None:
    contents = bytearray((recorded / "records.log").read_bytes())
    contents[int(at * len(contents))] ^= 1 << bit
    directory = copy_with(recorded, tmp_path_factory.getbasetemp() / "flipped", bytes(contents))
    with pytest.raises(ValueError, match="damaged"):
        list(RecordedLog(directory).records())


def test_records_that_were_moved_are_noticed(recorded: Path, tmp_path: Path) -> None:
    path = recorded / "records.log"
    contents, ends = path.read_bytes(), frame_ends(path)
    moved = contents[: ends[3]] + contents[ends[4] :]
    with pytest.raises(ValueError, match=f"damaged at byte {ends[3]}"):
        list(RecordedLog(copy_with(recorded, tmp_path / "moved", moved)).records())


def test_records_of_another_version_are_refused(recorded: Path, tmp_path: Path) -> None:
    payload = b"\x92\x63\x01"  # an array whose tag nobody knows
    directory = copy_with(recorded, tmp_path / "other", frame(payload, 0))
    with pytest.raises(ValueError, match="record 0: a record is not as this version of longctx writes it"):
        list(RecordedLog(directory).records())


def test_what_is_recorded_is_in_the_file_soon(tmp_path: Path) -> None:
    """So that a process that is killed loses little."""
    with open_recorder(tmp_path) as recorder:
        engine = recorded_engine(recorder)
        drive(engine, 1, 50)
        deadline = time.monotonic() + 30
        while next(tmp_path.glob("*/records.log")).stat().st_size < recorder.size:
            assert time.monotonic() < deadline
            time.sleep(FLUSH_SECONDS)
        assert len(list(RecordedLog(tmp_path).records())) > 50


def test_a_writer_that_is_quick_ends_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded may be in the file before the engine's thread goes on."""
    with open_recorder(tmp_path) as recorder:
        engine = recorded_engine(recorder)
        waiting = TakenAtOnce()
        monkeypatch.setattr(recorder, "_waiting", waiting)
        drive(engine, 1, 50)
    assert recorder.size == waiting.size > 0


class TakenAtOnce(deque[tuple[bytes, int]]):
    """A queue that a writer empties as soon as there is something in it."""

    size = 0

    def append(self, item: tuple[bytes, int]) -> None:
        self.size += HEADER_BYTES + len(item[0])


def test_directories_that_are_no_logs(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory"):
        RecordedLog(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="is no log of an engine"):
        RecordedLog(tmp_path)
    empty = copy_with(recorded, tmp_path / "run", b"")
    with pytest.raises(ValueError, match="nothing was recorded"):
        list(RecordedLog(empty).records())

    header = json.loads((recorded / "header.json").read_text())
    for contents in ("", "{}", "[]", "null", json.dumps(header | {"format": "longctx log 99"}), "\x00" * 100):
        (empty / "header.json").write_text(contents)
        with pytest.raises(ValueError, match=r"header.json is not as this version of longctx writes it"):
            RecordedLog(empty)


@pytest.mark.parametrize(
    "change",
    [
        {"config": {}},
        {"config": None},
        {"plan": {"stage": 0}},
        {"plan": []},
        {"predictor": {"kind": "Other"}},
        {"predictor": {"kind": "CurvePredictor"}},
        {"model": {}},
        {"num_pages": "many"},
        {"num_pages": 0},
        {"max_length": -1},
        {"unknown": 1},
    ],
)
def test_headers_that_are_damaged(recorded: Path, tmp_path: Path, change: dict[str, object]) -> None:
    header = json.loads((recorded / "header.json").read_text())
    (tmp_path / "header.json").write_text(json.dumps(header | change))
    with pytest.raises(ValueError, match=r"header.json is not as this version of longctx writes it"):
        RecordedLog(tmp_path)


def test_a_disk_that_fails_does_not_fail_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(file: int, data: object) -> int:
        raise OSError("No space left on device")

    with caplog.at_level(logging.WARNING), open_recorder(tmp_path) as recorder:
        engine = recorded_engine(recorder)
        monkeypatch.setattr(recorder_module.os, "write", fail)
        drive(engine, 1, 50)
        recorder.close()
        assert drive(engine, 2, 50)
    assert caplog.text.count("is recorded no further: No space left on device") == 1


def test_a_disk_that_does_not_keep_up_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder_module, "_MAX_UNWRITTEN", 1000)
    monkeypatch.setattr(recorder_module, "FLUSH_SECONDS", 10.0)
    with caplog.at_level(logging.WARNING), open_recorder(tmp_path) as recorder:
        drive(recorded_engine(recorder), 1)
    assert caplog.text.count("the disk does not keep up") == 1


def test_the_last_run_is_found(tmp_path: Path) -> None:
    directories = []
    for seed in range(2):
        with open_recorder(tmp_path) as recorder:
            drive(recorded_engine(recorder), seed, 20)
        directories.append(recorder.directory)
    assert find_run(tmp_path) == directories[1]
    assert find_run(directories[0]) == directories[0]


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="max_bytes must be an integer of at least 65536"):
        Recorder(Path("nowhere"), max_bytes=10)


def test_no_more_is_recorded_than_there_is_room_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), open_recorder(tmp_path, max_bytes=2**16) as recorder:
        outputs = drive(recorded_engine(recorder), 1, 900)
    assert caplog.text.count("is recorded no further: 65,536 bytes are the limit") == 1
    assert recorder.size <= 2**16 + 100
    baseline = replay(tmp_path)
    assert baseline.replayer.end == "was closed: 65,536 bytes are the limit"
    found = list(baseline.outputs.values())
    assert 20 < len(found) < len(outputs)
    assert summary(found) == summary(outputs[: len(found)])


def test_an_encrypted_run_replays_with_its_key_alone(tmp_path: Path) -> None:
    for name in ("key", "other"):
        make_secret(tmp_path / name)
    with open_recorder(tmp_path / "log", key_file=tmp_path / "key") as recorder:
        drive(recorded_engine(recorder, tenant_weights={"alice": 2.0}), 4)
    assert list(RecordedLog(tmp_path / "log", tmp_path / "key").records())[-1] == Closed("in order")
    header, records = (recorder.directory / name for name in ("header.json", "records.log"))
    contents = header.read_bytes() + records.read_bytes()
    assert not any(word in contents for word in (b"alice", b"in order", b"token_budget"))
    with pytest.raises(ValueError, match=r"header\.json is encrypted: key_file must be given"):
        RecordedLog(tmp_path / "log")
    with pytest.raises(ValueError, match=r"header\.json is encrypted with another key than that of key_file"):
        RecordedLog(tmp_path / "log", tmp_path / "other")
    # A record that is changed with its checksums, or comes from another place, is noticed.
    first = next(read_frames(records))
    for changed in (frame(first[:-1] + bytes([first[-1] ^ 1]), 0), frame(first, 0) + frame(first, len(first) + 12)):
        directory = copy_with(recorder.directory, tmp_path / "changed", changed)
        with pytest.raises(ValueError, match="it was changed or moved since it was encrypted"):
            list(RecordedLog(directory, tmp_path / "key").records())


def test_a_key_is_no_use_for_a_run_that_is_not_encrypted(recorded: Path, tmp_path: Path) -> None:
    make_secret(tmp_path / "key")
    with pytest.raises(ValueError, match=r"header\.json is not encrypted: key_file must not be given"):
        RecordedLog(recorded, tmp_path / "key")
