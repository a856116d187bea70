"""The command `longctx replay`."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_checkpoint import MODEL

from longctx.cli import main
from longctx.serving import Engine, EngineConfig, Request, SamplingParams
from longctx.serving.kv_cache.secret import make_secret
from longctx.serving.recording.recorder import open_recorder
from longctx.serving.recording.records import Step, decode, encode, frame, read_frames
from longctx.simulation import VirtualExecutor

CONFIG = EngineConfig(page_size=4, num_pages=64, max_running=4, token_budget=8, max_length=128)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("log"))


def record(folder: Path, key_file: Path | None = None) -> Path:
    """Record a log of an engine in virtual time."""
    executor = VirtualExecutor(lambda batch: 1e-3 * (1 + batch.num_tokens / 8), MODEL.config.vocab_size)
    with open_recorder(folder, key_file=key_file) as recorder:
        engine = Engine(MODEL, None, CONFIG, executor=executor, clock=executor.clock, recorder=recorder)
        rng = np.random.default_rng(0)
        for i in range(24):
            prompt = rng.integers(0, 50, 60 if i % 6 == 0 else 5).tolist()
            engine.submit(Request(prompt, SamplingParams(max_tokens=8, ignore_eos=True), request_id=f"r{i}"))
            engine.step()
        while engine.has_work:
            engine.step()
    return recorder.directory


def test_a_log_is_replayed(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log.parent), "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr()
    assert "24 completions: every decision is the same\n" in printed.out
    assert "was closed: in order" in printed.out
    assert printed.err == ""
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["completions"] == 24
    assert found["steps"] > 50


def test_an_encrypted_log_is_replayed_with_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_secret(tmp_path / "key")
    log = str(record(tmp_path / "log", tmp_path / "key"))
    assert main(["replay", log, "--record-key-file", str(tmp_path / "key")]) == 0
    assert "24 completions: every decision is the same\n" in capsys.readouterr().out
    assert main(["replay", log]) == 2
    assert "header.json is encrypted: --record-key-file must be given" in capsys.readouterr().err
    (tmp_path / "key").chmod(0o644)
    assert main(["replay", log, "--record-key-file", str(tmp_path / "key")]) == 2
    assert "--record-key-file: others than its owner have access to" in capsys.readouterr().err


def test_a_torn_end_is_cut_with_a_word(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "header.json").write_bytes((log / "header.json").read_bytes())
    (tmp_path / "records.log").write_bytes((log / "records.log").read_bytes()[:-5])
    assert main(["replay", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "ends in the midst of things" in printed.out
    assert "bytes of an unfinished record at the end of the log" in printed.err


def test_a_decision_that_differs_is_told(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "header.json").write_bytes((log / "header.json").read_bytes())
    steps, contents = 0, b""
    for payload in read_frames(log / "records.log"):
        record = decode(payload)
        if isinstance(record, Step):
            if steps == 30:
                payload = encode(Step(record.now, bytes(8), record.ended))
            steps += 1
        contents += frame(payload, len(contents))
    (tmp_path / "records.log").write_bytes(contents)
    assert main(["replay", str(tmp_path)]) == 1
    assert f"longctx: {tmp_path}: step 30 differs: the replay plans\n  step " in capsys.readouterr().err


def test_other_settings_are_compared(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    assert (
        main(["replay", str(log), "--policy", "fcfs", "--slo", "tpot=0.01,ttft_least=0.05", "--json", str(path)]) == 0
    )
    printed = capsys.readouterr().out
    assert "the first decision that differs is in step " in printed
    assert "from there on, what steps take is predicted, not measured" in printed
    assert "TTFT p99" in printed
    found = json.loads(path.read_text())
    assert found["comparison"]["completions"] == 24
    assert found["comparison"]["recorded"] != found["comparison"]["otherwise"]
    assert main(["replay", str(log), "--policy", "ilrs"]) == 0  # the recorded one
    assert "differs" not in capsys.readouterr().out
    assert main(["replay", str(log), "--num-pages", "80"]) == 0
    assert "no decision differs" in capsys.readouterr().out


def test_a_wait_is_explained(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log), "--explain", "r9", "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    assert "waits to be admitted; prompts of " in printed
    assert printed.splitlines()[-1].endswith("decodes")
    spans = json.loads((tmp_path / "found.json").read_text())["spans"]
    assert len(spans) == len(printed.splitlines())


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--policy", "best"], "--policy must be one of fcfs"),
        (["--slo", "tpot"], "--slo must be NAME=X"),
        (["--slo", "speed=3"], "--slo must name ttft_factor, ttft_least, tpot, tpot_factor, step_seconds, got 'speed'"),
        (["--slo", "tpot=-1"], "--slo: tpot must be"),
        (["--num-pages", "0"], "--num-pages must be at least 1"),
        (["--num-pages", "3"], "--num-pages is too small for request 'r0'"),
        (["--token-budget", "2"], "--token-budget must have a row for each of --max-running=4"),
        (["--explain", "nobody"], "the log has no step since a request 'nobody' came"),
        (["--explain", "r9", "--policy", "fcfs"], "--policy contradicts --explain"),
    ],
)
def test_flags_are_checked(log: Path, flags: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log), *flags]) == 2
    assert f"longctx: {error}" in capsys.readouterr().err


def test_what_is_no_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert main(["replay", str(tmp_path)]) == 2
    assert "is no log of an engine" in capsys.readouterr().err


def test_a_replay_in_virtual_time_loads_no_jax(log: Path) -> None:
    program = f"""
import sys
from longctx.cli import main
for flags in ([], ["--policy", "fcfs"], ["--explain", "r9"]):
    assert main(["replay", {str(log)!r}, *flags]) == 0
sys.exit("jax" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
