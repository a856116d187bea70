"""Real processes: the tokens of one device on meshes over them, and the end of all when one of them ends."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from process_threads import free_port

from longctx.models.builtin import TINY
from longctx.models.safetensors_reader import SINGLE_FILE

PROCESS = Path(__file__).with_name("process_main.py")
FAILURE = 6.0  # seconds, in place of 30


class Processes:
    """Processes that run one scenario of `process_main`."""

    def __init__(self, folder: Path, scenario: str, count: int, **options: Any) -> None:
        self.folder, self.port = folder, free_port()
        coordinator = f"127.0.0.1:{self.port}"
        options = {"failure_timeout": FAILURE} | options
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.running = []
        for i in range(count):
            command = [sys.executable, str(PROCESS), scenario, coordinator, str(count), str(i), json.dumps(options)]
            with self._path(i).open("wb") as out:
                self.running.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))

    def _path(self, process: int) -> Path:
        return self.folder / f"process-{process}.txt"

    def output(self, process: int) -> str:
        return self._path(process).read_text(errors="replace")

    def wait_until(self, process: int, text: str, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.output(process):
            assert self.running[process].poll() is None, self.output(process)
            assert time.monotonic() < deadline, f"{text!r} was not printed: {self.output(process)}"
            time.sleep(0.05)

    def statuses(self, timeout: float, without: int | None = None) -> list[int]:
        deadline = time.monotonic() + timeout
        return [
            running.wait(max(0.1, deadline - time.monotonic()))
            for i, running in enumerate(self.running)
            if i != without
        ]


@contextmanager
def processes(folder: Path, scenario: str, count: int, **options: Any) -> Iterator[Processes]:
    started = Processes(folder, scenario, count, **options)
    try:
        yield started
    finally:
        for running in started.running:
            running.kill()
            running.wait()


SIZES = [(2, 2, 1), (1, 4, 1), (2, 1, 2), (4, 2, 1)]
STRATEGIES = [("grow", "kvp"), ("grow", "auto"), ("interleave", "pass_q"), ("interleave", "pass_kv")]
ALL = [
    (count, sizes, strategy, seed)
    for seed, (count, sizes, strategy) in enumerate(
        (count, sizes, strategy)
        for count in (2, 4)
        for sizes in SIZES
        for strategy in (STRATEGIES if sizes[1] > 1 else STRATEGIES[:1])
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        ({"stage": 2}, [[[0, 1], [0, 2]], [[1, 2], [0, 2]]]),
        ({"tensor": 2}, [[[0, 1], [0, 1]], [[0, 1], [1, 2]]]),
        ({"context": 2, "placement": "interleave", "exchange": "pass_kv"}, [[[0, 1], [0, 2]]] * 2),
    ],
    ids=str,
)
def test_pages_come_back_in_every_process(plan: dict[str, Any], parts: list[Any], tmp_path: Path) -> None:
    """Each process keeps and loads its part of them, and all take the same steps."""
    options = {"disk": str(tmp_path / "pages"), "failure_timeout": 120, "join_timeout": 120}
    with processes(tmp_path, "tiers", 2, plan=plan, **options) as group:
        assert group.statuses(500) == [0, 0], "\n".join(map(group.output, range(2)))
        first, second = (json.loads(group.output(i).splitlines()[-1]) for i in range(2))
        assert [first["part"], second["part"]] == parts
        if "context" not in plan:  # there, a process has not all pages, and what the first one finds ends with its own
            assert first["loaded"] > 0
            assert second["hits"] > 0


MOVING = [
    (2, {"stage": 2}),
    (2, {"tensor": 2}),
    (2, {"context": 2, "placement": "interleave", "exchange": "pass_kv"}),
    (3, {"stage": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "plan"), MOVING, ids=str)
def test_requests_move_to_an_engine_of_one_process_and_back(count: int, plan: dict[str, Any], tmp_path: Path) -> None:
    """Every process sends the pages of its own ranks, and fetches those that they want; tokens are the oracle's."""
    with processes(tmp_path, "moves", count, plan=plan, failure_timeout=120, join_timeout=120) as group:
        assert group.statuses(500) == [0] * count, "\n".join(map(group.output, range(count)))
        first, *others = (json.loads(group.output(i).splitlines()[-1]) for i in range(count))
        assert min(first["loaded"]) > 60  # of the 96 tokens of prompts, some of which may come too late
        for each in (first, *others):
            assert min(each["sent"], each["received"]) > 0
            assert {name for name, count in each["ends"].items() if count} == {"complete"}
        assert [(each["leases"], each["held"]) for each in others] == [(0, 0)] * (count - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "sizes", "strategy", "seed"), ALL, ids=str)
def test_tokens_equal_those_of_one_device(
    count: int, sizes: tuple[int, int, int], strategy: tuple[str, str], seed: int, tmp_path: Path
) -> None:
    """Prompts and decodes mixed, sessions, shared prefixes, several completions, cancels."""
    check_tokens(count, sizes, {"placement": strategy[0], "exchange": strategy[1]}, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 1), (1, 1, 2)])
def test_embeddings_equal_those_of_one_device(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    plan = dict(zip(("stage", "context", "tensor"), sizes, strict=True)) | {"rank_tokens": 16}
    with processes(tmp_path, "embeds", 2, plan=plan, failure_timeout=120, join_timeout=120) as group:
        assert group.statuses(500) == [0, 0], "\n".join(map(group.output, range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1)])
def test_masks_are_the_same_in_all_processes(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    plan = dict(zip(("stage", "context", "tensor"), sizes, strict=True)) | {"rank_tokens": 16}
    options = {"plan": plan, "seed": sum(sizes), "failure_timeout": 120, "join_timeout": 120}
    with processes(tmp_path, "masks", 2, **options) as group:
        assert group.statuses(500) == [0, 0], "\n".join(map(group.output, range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 2, 2), (2, 2, 1)])
def test_tokens_equal_those_of_one_device_where_processes_share_a_feed_forward(
    sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    check_tokens(2, sizes, {"exchange": "kvp", "ffn": "all"}, 0, tmp_path)


def check_tokens(count: int, sizes: tuple[int, int, int], options: dict[str, Any], seed: int, tmp_path: Path) -> None:
    stage, context, tensor = sizes
    plan = {"stage": stage, "context": context, "tensor": tensor, "rank_tokens": 16} | options
    options = {"plan": plan, "seed": seed, "events": 40, "failure_timeout": 120, "join_timeout": 120}
    options["cold"] = plan["exchange"] != "kvp"
    with processes(tmp_path, "workload", count, **options) as group:
        assert group.statuses(500) == [0] * count, "\n".join(map(group.output, range(count)))
        steps = [json.loads(group.output(i).splitlines()[-1])["steps"] for i in range(count)]
        assert len(set(steps)) == 1
        assert steps[0] > 20
        parts = re.findall(r"cpu \d+ of process (\d)", group.output(0))
        assert parts == [str(i * count // (stage * context * tensor)) for i in range(stage * context * tensor)]


def test_tokens_equal_those_of_one_device_until_a_process_is_killed(tmp_path: Path) -> None:
    """Two processes of two devices."""
    plan = {"stage": 2, "tensor": 2}
    with processes(tmp_path, "forever", 2, plan=plan, events=8) as group:
        group.wait_until(0, "running")
        for data in (b"", b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", group.port)) as stranger:
                stranger.sendall(data)
        time.sleep(0.3)
        assert [running.poll() for running in group.running] == [None, None], group.output(0)
        group.running[1].kill()
        assert group.statuses(FAILURE, without=1) == [70]
        assert "strangers" in group.output(0)
        assert re.search(r"longctx: process 0 .* ends: process 1 .* is gone", group.output(0))


PIPELINE = {2: {"stage": 2}, 3: {"stage": 3}}
DEATHS = [
    (signal.SIGSTOP, 2, 0, True),
    (signal.SIGKILL, 2, 1, False),
    (signal.SIGKILL, 2, 0, False),
    (signal.SIGKILL, 2, 0, True),
    (signal.SIGKILL, 2, 1, True),
    (signal.SIGSTOP, 2, 1, False),
    (signal.SIGSTOP, 2, 1, True),
    (signal.SIGSTOP, 2, 0, False),
    *((sign, 3, who, idle) for sign in (signal.SIGKILL, signal.SIGSTOP) for who in (0, 2) for idle in (False, True)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "count", "who", "idle"),
    DEATHS,
)
def test_all_processes_end_when_one_is_gone(
    sign: signal.Signals, count: int, who: int, idle: bool, tmp_path: Path
) -> None:
    with processes(tmp_path, "forever", count, plan=PIPELINE[count], idle=idle) as group:
        group.wait_until(0, "running")
        time.sleep(0.5)
        group.running[who].send_signal(sign)
        began = time.monotonic()
        statuses = group.statuses(FAILURE, without=who)
        seconds = time.monotonic() - began
        print(
            f"{sign.name} of process {who} of {count}, {'idle' if idle else 'generating'}: {seconds:.1f} s, {statuses}"
        )
        for process in {*range(count)} - {who}:
            output = group.output(process)
            assert re.search(rf"longctx: process {process} .* ends: .*process {who} .* is gone", output), output
        assert statuses == [70] * (count - 1)
        if sign == signal.SIGSTOP:
            group.running[who].send_signal(signal.SIGCONT)
            assert group.running[who].wait(3 * FAILURE) != 0


@pytest.mark.slow
def test_restarted_processes_serve_again(tmp_path: Path) -> None:
    for _ in range(2):
        with processes(tmp_path, "forever", 2, plan=PIPELINE[2]) as group:
            group.wait_until(0, "running")
            group.running[1].kill()
            assert group.statuses(FAILURE)[0] != 0


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("stand_still", [False, True])
def test_an_error_in_one_process_ends_all(who: int, stand_still: bool, tmp_path: Path) -> None:
    options = {"plan": PIPELINE[2], "who": who, "stand_still": stand_still}
    with processes(tmp_path, "breaks", 2, **options) as group:
        assert all(status != 0 for status in group.statuses(120))
        assert "longctx: process" in group.output(1 - who)
        expected = "has waited for the results of a step" if stand_still else "RuntimeError: the roof is on fire"
        assert expected in group.output(1 - who)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "most"),
    [({"stage": 2}, 0.75), ({"tensor": 2}, 0.55), ({"context": 2}, 1.0), ({"context": 2, "ffn": "all"}, 0.75)],
    ids=str,
)
def test_each_process_reads_only_its_shards(plan: dict[str, Any], most: float, tmp_path: Path) -> None:
    with processes(tmp_path, "reads", 2, plan=plan, failure_timeout=120) as group:
        assert group.statuses(200) == [0, 0], group.output(0) + group.output(1)
        for sizes in (json.loads(group.output(i).splitlines()[-1]) for i in (0, 1)):
            assert sizes["read"] == sizes["here"]
            assert 0.4 < sizes["read"] / sizes["whole"] <= most


@pytest.mark.slow
def test_process_0_may_outlive_the_others(tmp_path: Path) -> None:
    """It goes on for longer than the others wait at their exit."""
    with processes(tmp_path, "reads", 2, plan={"stage": 2}, failure_timeout=20, afterwards=30) as group:
        assert group.statuses(200) == [0, 0], group.output(0) + group.output(1)


@pytest.mark.slow
def test_the_command_line_runs_in_two_processes(tmp_path: Path) -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", "from longctx.cli import program; program()"]
    flags = ["generate", "--model", str(TINY), "--prompt", "The pass key of castle is", "--max-tokens", "8"]

    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    weights = other / SINGLE_FILE
    weights.write_bytes(weights.read_bytes()[:-100_000] + bytes(100_000))

    def run(process: int, *more: str) -> subprocess.Popen[str]:
        where = ["--coordinator", coordinator, "--num-processes", "2", "--process-id", str(process)] if more else []
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*command, *flags, *where, *more], text=True, **pipes)  # type: ignore[call-overload]

    alone, *both = run(0), run(0, "--stage", "2"), run(1, "--stage", "2")
    texts = [each.communicate(timeout=200) for each in (alone, *both)]
    assert [each.returncode for each in (alone, *both)] == [0, 0, 0], texts
    # The text alone, though Gloo logs its connections to file descriptor 1.
    assert texts[1][0] == texts[0][0]
    assert texts[2][0] == ""
    assert "[Gloo]" in texts[1][1]
    assert "cpu 0 of process 0" in texts[1][1]
    for flag, value, error in (
        ("--dtype", "bfloat16", "same engine, and differ in dtype: 'float32' in process 0, 'bfloat16' in process 1"),
        (
            "--kv-dtype",
            "float8_e4m3fn",
            "same engine, and differ in kv_dtype: None in process 0, 'float8_e4m3fn' in process 1",
        ),
        ("--model", str(other), f"same checkpoint, and differ in {SINGLE_FILE}"),
    ):
        for each in [run(0, "--stage", "2"), run(1, "--stage", "2", flag, value)]:
            assert f"longctx: processes must have the {error}" in each.communicate(timeout=100)[1]
            assert each.returncode == 2


@pytest.mark.slow
def test_different_configurations_are_refused(tmp_path: Path) -> None:
    more = [{}, {"max_running": 5}]
    with processes(tmp_path, "contradicts", 2, plan=PIPELINE[2], more=more) as group:
        assert group.statuses(100) == [1, 1]
        assert all("ValueError: processes must have the same engine" in group.output(i) for i in (0, 1))
        assert all("max_running: 6 in process 0, 5 in process 1" in group.output(i) for i in (0, 1))
