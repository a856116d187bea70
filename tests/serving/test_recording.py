"""Logs of engines: a replay in virtual time decides as the engine did, whatever was asked of it."""

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_device import VOCAB, FakeExecutor
from hypothesis import given, settings
from hypothesis import strategies as st
from process_threads import run_processes
from recorded import drive, recorded_engine, replay, summary

from longctx.serving import EngineConfig, ParallelPlan, Request, SamplingParams
from longctx.serving.distributed import ProcessGroup
from longctx.serving.engine.thread import EngineThread
from longctx.serving.executor.interface import Results
from longctx.serving.recording.recorder import open_recorder
from longctx.simulation.incident.replayer import Differs

PLANS = [ParallelPlan(), ParallelPlan(3, rank_tokens=8), ParallelPlan(2, 2, exchange="kvp", rank_tokens=12)]


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    plan=st.sampled_from(PLANS),
    num_pages=st.integers(24, 60),
    admission=st.sampled_from(["reserve", "optimistic"]),
    policy=st.sampled_from(["fcfs", "ilrs", "lrs", "lrs_relative", "srpf", "edf"]),
    chunking=st.sampled_from(["static", "adaptive"]),
    prefix_cache=st.booleans(),
    run_ahead=st.integers(1, 3),
    window=st.sampled_from([None, 6, 20]),
)
def test_every_decision_is_replayed(tmp_path_factory: pytest.TempPathFactory, seed: int, **options: Any) -> None:
    directory = tmp_path_factory.mktemp("log")
    with open_recorder(directory) as recorder:
        engine = recorded_engine(recorder, **options)
        outputs = drive(engine, seed)
    baseline = replay(directory)
    assert summary(list(baseline.outputs.values())) == summary(outputs)
    assert baseline.replayer.engine.core.stats() == engine.stats()
    assert baseline.replayer.end == "was closed: in order"


def test_all_kinds_of_ends_and_waits_are_among_those() -> None:
    """Else the test above would say little."""
    engine = recorded_engine(None, num_pages=24, admission="optimistic")
    outputs = [output for seed in range(4) for output in drive(engine, seed)]
    assert {output.finish_reason for output in outputs} == {"stop", "length", "cancelled"}
    assert any(output.token_ids and output.token_ids[-1] == 5 for output in outputs)
    assert engine.stats().preemptions > 0
    assert engine.stats().cached_tokens > 0
    assert any(output.index > 0 for output in outputs)


def test_several_threads_and_a_server(tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:
        engine = recorded_engine(recorder, num_pages=40)
        outputs: list[Any] = []

        def ask(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for number in range(10):
                prompt = rng.integers(0, VOCAB, rng.integers(1, 40)).tolist()
                request = Request(prompt, SamplingParams(max_tokens=12), request_id=f"{seed}-{number}")
                thread.submit(engine.prepare(request), lambda events: outputs.extend(e.output for e in events))
                if number % 4 == 3:
                    thread.cancel(f"{seed}-{number}")

        with EngineThread(engine) as thread:
            clients = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            assert thread.wait_idle(30)
    baseline = replay(tmp_path)
    assert summary(list(baseline.outputs.values())) == summary([x for x in outputs if x is not None])


def test_the_first_process_of_a_group_records(tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:

        def act(group: ProcessGroup) -> Any:
            engine = recorded_engine(recorder if group.is_first else None, group=group)
            if group.is_first:
                return summary(drive(engine, 3))
            engine.follow()
            return None

        outputs, _ = run_processes(2, act)
    assert summary(list(replay(tmp_path).outputs.values())) == outputs


def test_followers_record_nothing(tmp_path: Path, no_exit: list[int]) -> None:
    def act(group: ProcessGroup) -> Any:
        return recorded_engine(None if group.is_first else open_recorder(tmp_path), group=group)

    _, error = run_processes(2, act, join=3)
    assert isinstance(error, ValueError)
    assert "first process" in str(error)


class Unreliable(FakeExecutor):
    """Gives tokens that are not finite now and then, and fails in the end."""

    def __init__(self, config: EngineConfig, last: int) -> None:
        super().__init__(config, ParallelPlan(), 24)
        self._left = last

    def wait(self, pending: Any) -> Results:
        results = super().wait(pending)
        self._left -= 1
        if not self._left:
            raise OSError("the device is gone")
        tokens = [-1 if token == 11 else token for token in results.tokens]
        return results._replace(tokens=tokens)


def test_failures_are_replayed(tmp_path: Path) -> None:
    config = EngineConfig(page_size=4, num_pages=24, max_running=6, token_budget=16)
    recorder = open_recorder(tmp_path)
    engine = recorded_engine(recorder, executor=Unreliable(config, 60))
    with pytest.raises(OSError, match="the device is gone"):
        drive(engine, 5, acts=1000)
    recorder.close()
    baseline = replay(tmp_path)
    assert "the device is gone" in baseline.replayer.end
    assert any(output.finish_reason == "error" for output in baseline.outputs.values())
    assert len(baseline.durations) == 59


def test_a_warm_up_between_requests_is_replayed(tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:
        engine = recorded_engine(recorder)
        first = drive(engine, 1)
        with pytest.raises(RuntimeError, match="not while it is recorded"), engine.lend_executor():
            pass
        engine.warm_up()
        second = drive(engine, 1)
    baseline = replay(tmp_path)
    outputs = list(baseline.outputs.values())
    assert summary(outputs[: len(first)]) == summary(first)
    assert summary(outputs[len(first) :]) == summary(second)


def test_a_replay_on_another_engine_differs(tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:
        drive(recorded_engine(recorder), 2)
    (header,) = tmp_path.glob("*/header.json")
    header.write_text(header.read_text().replace('"token_budget": 16', '"token_budget": 12'))
    with pytest.raises(Differs, match=r"step \d+ differs: the replay plans\n  step \d+ computes slot"):
        replay(tmp_path)


def test_logs_hold_no_contents(tmp_path: Path) -> None:
    prompt = np.random.default_rng(0).integers(0, VOCAB, 60).tolist()
    with open_recorder(tmp_path) as recorder:
        engine = recorded_engine(recorder)
        sampling = SamplingParams(max_tokens=20, stop=("a secret",), ignore_eos=True)
        (output,) = engine.generate([Request(prompt, sampling, session_id="whose", tenant="of whom")])
    assert summary(list(replay(tmp_path).outputs.values())) == summary([output])
    logged = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

    def traces(tokens: list[int]) -> list[bytes]:
        """Four tokens in a row, as integers of any size, and as text."""
        each = [tokens[i : i + 4] for i in range(len(tokens) - 3)]
        return [np.array(run, kind).tobytes() for run in each for kind in ("<i4", ">i4", "<i2", ">i2", "u1")]

    for text in (b"a secret", b"whose", *traces(prompt), *traces(output.token_ids)):
        assert text not in logged
    assert b'hash_key": null' in logged


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    with open_recorder(tmp_path / "new") as recorder:
        drive(recorded_engine(recorder), 2, 20)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in recorder.directory.iterdir()}
    assert modes == {"header.json": 0o600, "records.log": 0o600}
    assert stat.S_IMODE(recorder.directory.stat().st_mode) == 0o700


def test_a_recorder_is_for_one_engine(tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:
        recorded_engine(recorder)
        with pytest.raises(ValueError, match="records another engine"):
            recorded_engine(recorder)


def test_an_engine_with_a_policy_of_its_own_is_not_recorded(tmp_path: Path) -> None:
    class Latest:
        """The sequence that came last."""

        def urgency(self, sequence: Any, now: float) -> float:
            return -sequence.arrival

        def share(self, sequence: Any, now: float) -> float:
            return 0.0

    with open_recorder(tmp_path) as recorder, pytest.raises(ValueError, match="a custom policy or predictor"):
        recorded_engine(recorder, policy=Latest())


ENDLESS = """
import sys
from recorded import drive, recorded_engine
from longctx.serving.recording.recorder import open_recorder

with open_recorder(sys.argv[1]) as recorder:
    engine = recorded_engine(recorder)
    print("begun", flush=True)
    drive(engine, 1, 10**9)
"""


def test_the_log_of_a_process_that_is_killed_replays(tmp_path: Path) -> None:
    """By SIGKILL, in the midst of everything."""
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}:{here.parent.parent}", "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path)], env=environment, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        deadline = time.monotonic() + 30
        while sum(path.stat().st_size for path in tmp_path.glob("*/*.log")) < 30_000:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
    baseline = replay(tmp_path)
    assert baseline.replayer.end == "ends in the midst of things, as where a process is killed"
    assert len(baseline.outputs) > 20
