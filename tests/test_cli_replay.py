"""The command `longctx replay`."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_checkpoint import MODEL, save_small_checkpoint

from longctx.cli import main
from longctx.models import checkpoint_fingerprint, load_checkpoint
from longctx.serving import Engine, EngineConfig, Request, SamplingParams
from longctx.serving.recording.recorder import open_recorder
from longctx.serving.recording.records import Step, decode, encode
from longctx.serving.recording.writer import frame, read_frames
from longctx.simulation import VirtualExecutor

CONFIG = EngineConfig(page_size=4, num_pages=64, max_running=4, token_budget=8, max_length=128)


def record(directory: Path, private: bool = False) -> Path:
    """A log of an engine in virtual time."""
    executor = VirtualExecutor(lambda batch: 1e-3 * (1 + batch.num_tokens / 8), MODEL.config.vocab_size)
    with open_recorder(directory, private, model_name="small") as recorder:
        engine = Engine(MODEL, None, CONFIG, executor=executor, clock=executor.clock, recorder=recorder)
        rng = np.random.default_rng(0)
        for i in range(24):
            prompt = rng.integers(0, 50, 60 if i % 6 == 0 else 5).tolist()
            engine.submit(Request(prompt, SamplingParams(max_tokens=8, ignore_eos=True), request_id=f"r{i}"))
            engine.step()
        while engine.has_work:
            engine.step()
    return recorder.directory


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("log"))


def test_a_log_is_replayed(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log.parent), "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr()
    assert "24 completions: every decision is the same\n" in printed.out
    assert "was closed: in order" in printed.out
    assert printed.err == ""
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["completions"] == 24
    assert found["steps"] > 50


def test_an_incident_is_simulated(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log), "--accuracy", "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    assert "simulated from the first step on: 24 completions" in printed
    assert {line.split("  ")[0] for line in printed.splitlines()} >= {"TTFT mean", "TTFT p90", "TPOT correlation"}
    found = json.loads((tmp_path / "found.json").read_text())["accuracy"]["ttft"]
    assert found["measured"]["mean"] == pytest.approx(found["recorded"]["mean"], rel=1e-6)
    assert main(["replay", str(log), "--accuracy", "--policy", "fcfs"]) == 2
    assert "--accuracy and --policy can't be given together" in capsys.readouterr().err


def test_a_torn_end_is_cut_with_a_word(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "header.json").write_bytes((log / "header.json").read_bytes())
    (tmp_path / "000000.log").write_bytes((log / "000000.log").read_bytes()[:-5])
    assert main(["replay", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "ends in the midst of things" in printed.out
    assert "bytes of an unfinished record at the end of the log" in printed.err


def test_a_decision_that_differs_is_told(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "header.json").write_bytes((log / "header.json").read_bytes())
    steps, contents = 0, b""
    for payload in read_frames(log / "000000.log", []):
        record = decode(payload)
        if isinstance(record, Step):
            if steps == 30:
                payload = encode(Step(record.now, bytes(8), record.ended))
            steps += 1
        contents += frame(payload, len(contents)) + payload
    (tmp_path / "000000.log").write_bytes(contents)
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


def test_a_state_is_shown(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log), "--until", "20"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "step 20 at ",
        "rank 0: ",
        "slots    0 free",
        "running  4\n",
        "waiting  ",
        "first token due in",
        "batch    ",
    ):
        assert part in printed


def test_a_wait_is_explained(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log), "--explain", "r9", "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    assert "no free slot: 4 sequences run, of at most 4" in printed
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
        (["--until", "-1"], "--until must be an integer of at least 0"),
        (["--until", "100000"], "--until must be below"),
        (["--until", "3", "--policy", "fcfs"], "--until and --policy can't be given together"),
        (["--explain", "nobody"], "the log has no step since completion 0 of a request 'nobody'"),
        (["--stage", "2"], "--stage needs --model"),
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


def test_a_private_log_is_not_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = record(tmp_path, private=True)
    assert main(["replay", str(directory)]) == 0
    assert main(["replay", str(directory), "--model", "anything"]) == 2
    assert "is private: it has no tokens" in capsys.readouterr().err


def test_a_replay_in_virtual_time_loads_no_jax(log: Path) -> None:
    program = f"""
import sys
from longctx.cli import main
for flags in ([], ["--policy", "fcfs"], ["--explain", "r9"], ["--until", "20"]):
    assert main(["replay", {str(log)!r}, *flags]) == 0
sys.exit("jax" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.slow
def test_tokens_are_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save_small_checkpoint(tmp_path / "model")
    model, params = load_checkpoint(checkpoint)
    directory = tmp_path / "log"
    with open_recorder(directory, model_name="small", weights=checkpoint_fingerprint(checkpoint)) as recorder:
        engine = Engine(model, params, CONFIG, recorder=recorder)
        rng = np.random.default_rng(0)
        for i in range(12):
            sampling = SamplingParams(
                max_tokens=int(rng.integers(1, 12)),
                temperature=float(i % 2),
                n=1 + (i % 4 == 1),
            )
            engine.submit(Request(rng.integers(0, 50, rng.integers(1, 40)).tolist(), sampling, request_id=f"r{i}"))
            engine.step()
            if i == 7:
                engine.cancel("r7")
        while engine.has_work:
            engine.step()
    replay = ["replay", str(directory), "--model", str(checkpoint)]
    assert main(replay) == 0
    assert "every decision and every token is the same" in capsys.readouterr().out
    assert main([*replay, "--context", "2"]) == 0
    assert "--stage 1 --context 2 --tensor 1: all tokens are the same" in capsys.readouterr().out

    other = save_small_checkpoint(tmp_path / "other", seed=1)
    assert main(["replay", str(directory), "--model", str(other)]) == 1
    printed = capsys.readouterr().err
    assert "are not those of the recorded model, small" in printed
    assert "its output token 0 is" in printed
    assert "their logits are" in printed
    assert main(["replay", str(directory), "--model", str(other), "--context", "2"]) == 1
    assert "was recorded" in capsys.readouterr().err
