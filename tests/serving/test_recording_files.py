"""Files of logs: torn ends, damage, limits, and directories that are none."""

import json
import logging
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import drive, recorded_engine, replay, summary

from longctx.models.validation import FP8_KV
from longctx.serving import Engine, Output, ParallelPlan
from longctx.serving.recording import writer
from longctx.serving.recording.header import Header
from longctx.serving.recording.reader import RecordedLog, find_run
from longctx.serving.recording.recorder import Recorder, open_recorder
from longctx.serving.recording.records import Snapshot
from longctx.serving.recording.writer import HEADER_BYTES, frame, read_frames
from longctx.simulation.incident.alternative import Alternative
from longctx.simulation.incident.baseline import Baseline
from longctx.simulation.incident.replayer import Replayer


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run."""
    with open_recorder(tmp_path_factory.mktemp("log")) as recorder:
        drive(recorded_engine(recorder), 4)
    return recorder.directory


def frame_ends(path: Path) -> list[int]:
    ends = [0]
    for payload in read_frames(path, []):
        ends.append(ends[-1] + HEADER_BYTES + len(payload))
    return ends


def copy_with(recorded: Path, directory: Path, contents: bytes) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(recorded, directory)
    (directory / "000000.log").write_bytes(contents)
    return directory


def test_an_end_that_is_torn_anywhere_is_cut(recorded: Path, tmp_path: Path) -> None:
    """As a process leaves it that is killed: at every byte of the last four records. The rest replays."""
    path = recorded / "000000.log"
    contents, ends = path.read_bytes(), frame_ends(path)
    assert ends[-1] == len(contents)
    records = list(RecordedLog(recorded).records())
    for size in range(ends[-5], ends[-1]):
        log = RecordedLog(copy_with(recorded, tmp_path / "torn", contents[:size]))
        whole = [end for end in ends if end <= size]
        assert list(log.records()) == records[: len(whole) - 1]
        assert log.torn_bytes == size - whole[-1]
        if size - 1 in whole:  # the same records until the next one
            baseline = replay(log.directory)
            assert baseline.replayer.end == "ends in the midst of things, as where a process is killed"


@settings(max_examples=60, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_flipped_bits_are_noticed(
    recorded: Path, tmp_path_factory: pytest.TempPathFactory, at: float, bit: int
) -> None:
    contents = bytearray((recorded / "000000.log").read_bytes())
    contents[int(at * len(contents))] ^= 1 << bit
    directory = copy_with(recorded, tmp_path_factory.getbasetemp() / "flipped", bytes(contents))
    with pytest.raises(ValueError, match="damaged"):
        list(RecordedLog(directory).records())


def test_records_that_were_moved_are_noticed(recorded: Path, tmp_path: Path) -> None:
    path = recorded / "000000.log"
    contents, ends = path.read_bytes(), frame_ends(path)
    moved = contents[: ends[3]] + contents[ends[4] :]
    with pytest.raises(ValueError, match=f"damaged at byte {ends[3]}"):
        list(RecordedLog(copy_with(recorded, tmp_path / "moved", moved)).records())


def test_records_of_another_version_are_refused(recorded: Path, tmp_path: Path) -> None:
    payload = b"\x92\x63\x01"  # an array whose tag nobody knows
    directory = copy_with(recorded, tmp_path / "other", frame(payload, 0) + payload)
    with pytest.raises(ValueError, match="record 0: a record is not as this version of longctx writes it"):
        list(RecordedLog(directory).records())


def test_what_is_recorded_is_in_the_file_soon(tmp_path: Path) -> None:
    """So that a process that is killed loses little."""
    with open_recorder(tmp_path) as recorder:
        engine = recorded_engine(recorder)
        drive(engine, 1, 50)
        time.sleep(5 * writer.FLUSH_SECONDS)
        assert len(list(RecordedLog(tmp_path).records())) > 50
    assert writer.FLUSH_SECONDS <= 0.2


def test_directories_that_are_no_logs(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory"):
        RecordedLog(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="is no log of an engine"):
        RecordedLog(tmp_path)
    empty = tmp_path / "run"
    empty.mkdir()
    shutil.copy(recorded / "header.json", empty)
    with pytest.raises(FileNotFoundError, match="nothing was recorded"):
        RecordedLog(empty)

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
        {"is_private": 3},
        {"unknown": 1},
        {"weights": []},
    ],
)
def test_headers_that_are_damaged(recorded: Path, tmp_path: Path, change: dict[str, object]) -> None:
    header = json.loads((recorded / "header.json").read_text())
    (tmp_path / "header.json").write_text(json.dumps(header | change))
    with pytest.raises(ValueError, match=r"header.json is not as this version of longctx writes it"):
        RecordedLog(tmp_path)


@pytest.mark.parametrize("kv_dtype", [None, FP8_KV])
def test_headers_say_what_pages_are_and_older_ones_are_read(
    recorded: Path, tmp_path: Path, kv_dtype: str | None
) -> None:
    """A log from before there was `kv_dtype` has none, as its engine had none."""
    header = json.loads((recorded / "header.json").read_text())
    assert header["config"].pop("kv_dtype") is None
    header["config"] |= {} if kv_dtype is None else {"kv_dtype": kv_dtype}
    (tmp_path / "header.json").write_text(json.dumps(header))
    assert Header.read(tmp_path).config.kv_dtype == kv_dtype


def test_a_disk_that_fails_does_not_fail_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(file: int, data: object) -> int:
        raise OSError("No space left on device")

    with caplog.at_level(logging.WARNING), open_recorder(tmp_path) as recorder:
        engine = recorded_engine(recorder)
        monkeypatch.setattr(writer.os, "write", fail)
        drive(engine, 1, 50)
        time.sleep(5 * writer.FLUSH_SECONDS)
        assert drive(engine, 2, 50)
    assert caplog.text.count("is recorded no further: No space left on device") == 1


def test_a_folder_that_is_gone_does_not_fail_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), open_recorder(tmp_path, max_bytes=2**16) as recorder:
        engine = recorded_engine(recorder)
        drive_with_rests(engine, 2)
        shutil.rmtree(recorder.directory)
        drive_with_rests(engine, 24)  # more than a file has room for
    assert caplog.text.count("is recorded no further: no further file can be made") == 1


def test_a_disk_that_does_not_keep_up_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "_MAX_UNWRITTEN", 1000)
    monkeypatch.setattr(writer, "FLUSH_SECONDS", 10.0)
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


def drive_with_rests(engine: Engine, count: int) -> list[Output]:
    """Random requests, with times in which there are none."""
    outputs = []
    for seed in range(count):
        outputs += drive(engine, seed, 30)
    return outputs


@pytest.mark.parametrize("plan", [ParallelPlan(), ParallelPlan(3, rank_tokens=8), ParallelPlan(1, 2, rank_tokens=60)])
@pytest.mark.parametrize("private", [False, True])
def test_the_newest_files_are_kept_and_replay(tmp_path: Path, plan: ParallelPlan, private: bool) -> None:
    """Each begins with what the engine knew: cached pages, batches in flight, what was measured, what tenants got."""
    with open_recorder(tmp_path, private, max_bytes=2**16) as recorder:
        engine = recorded_engine(recorder, plan, 40, chunking="adaptive")
        outputs = drive_with_rests(engine, 24)
    files = sorted(path.name for path in recorder.directory.glob("*.log"))
    assert 3 <= len(files) <= 8
    assert files[0] > "000000.log"
    assert sum(path.stat().st_size for path in recorder.directory.glob("*.log")) <= 2**16 + 100
    records = list(RecordedLog(tmp_path).records())
    snapshots = [record for record in records if isinstance(record, Snapshot)]
    assert isinstance(records[0], Snapshot)
    assert len(snapshots) == len(files)
    if plan.context == 1:  # there, some requests end while their next step is in flight
        assert any(snapshot.in_flight for snapshot in snapshots)
    assert any(idle for snapshot in snapshots for _, idle, _ in snapshot.pages)
    baseline = replay(tmp_path)
    found = list(baseline.outputs.values())
    assert 20 < len(found) < len(outputs)
    assert summary(found) == summary(outputs[-len(found) :])
    other = Alternative(RecordedLog(tmp_path), baseline, engine.config, engine.num_pages + 10)
    other.run()
    assert other.outputs.keys() >= {i for i, x in baseline.outputs.items() if x.finish_reason in ("stop", "length")}
    same = Alternative(RecordedLog(tmp_path), baseline, engine.config, engine.num_pages)
    same.run()
    assert same.difference is None
    assert same.outputs == baseline.outputs


def test_an_engine_that_is_never_idle_is_recorded_as_far_as_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), open_recorder(tmp_path, max_bytes=2**16) as recorder:
        engine = recorded_engine(recorder)
        first = drive(engine, 1, 1500)
        assert caplog.text.count("recording goes on when it is idle") == 1
        log = RecordedLog(tmp_path)
        baseline = Baseline(Replayer(log))
        time.sleep(5 * writer.FLUSH_SECONDS)
        baseline.run()
        assert "65,536 bytes are the limit" in baseline.replayer.end
        assert summary(list(baseline.outputs.values())) == summary(first[: len(baseline.outputs)])
        second = drive(engine, 2, 50)
    assert [path.name for path in recorder.directory.glob("*.log")] == ["000001.log"]
    assert summary(list(replay(tmp_path).outputs.values())) == summary(second)


def test_a_file_that_is_missing_is_noticed(tmp_path: Path) -> None:
    with open_recorder(tmp_path, max_bytes=2**16) as recorder:
        drive_with_rests(recorded_engine(recorder, num_pages=40), 30)
    files = sorted(recorder.directory.glob("*.log"))
    files[1].unlink()
    with pytest.raises(ValueError, match=f"lacks {files[1].name}, and has {files[2].name}"):
        RecordedLog(tmp_path)
