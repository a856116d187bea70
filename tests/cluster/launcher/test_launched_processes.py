"""Instances as processes: they are started again where they were, and none outlives its launcher."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from longctx.cluster.launcher import supervised
from longctx.cluster.launcher.launcher import Address, Launched, ProcessLauncher
from longctx.cluster.launcher.supervised import BackOff

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent

PARENT = """
import sys, time
sys.path[:0] = [{here!r}]
from test_launched_processes import launched
from longctx.cluster.launcher.launcher import ProcessLauncher
launcher = ProcessLauncher(launched("one", "two"))
urls = [each.url for each in launcher.start()]
while not all(each.pid for each in launcher.processes.values()):
    time.sleep(0.01)
print(*urls, *[each.pid for each in launcher.processes.values()], flush=True)
time.sleep(60)
"""


def command(*more: str) -> Callable[[str, int, Sequence[str]], list[str]]:
    return lambda host, port, hosts: [sys.executable, str(HERE / "stand_in.py"), host, str(port), *hosts, *more]


def launched(*names: str) -> list[Launched]:
    return [Launched(name, "both", command(name), (), ({"CUDA_VISIBLE_DEVICES": name},)) for name in names]


def answer(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=2) as found:
            return str(found.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def wait_until(what: str, condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessLauncher]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = ProcessLauncher(launched("one", "two"))
    yield made
    made.close()


def test_they_are_started_again_at_the_same_port(launcher: ProcessLauncher, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = launcher.start()
    assert (one.name, two.role) == ("one", "both")
    assert one.url != two.url
    for each in (one, two):
        wait_until("it answers", lambda url=each.url: answer(url))
    assert (answer(one.url) or "").endswith("127.0.0.1 one")
    assert (answer(two.url) or "").startswith("two 127.0.0.1")
    process = launcher.processes["one"]
    pid, other = process.pid, launcher.processes["two"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until("it is gone", lambda: answer(one.url) is None)
    wait_until("it is back", lambda: answer(one.url))
    assert process.num_starts == 2
    assert process.pid != pid
    assert launcher.processes["two"].pid == other
    assert launcher.problem is None
    launcher.close()
    assert [each.pid for each in launcher.processes.values()] == [None, None]
    assert answer(one.url) is None
    printed = capsys.readouterr().err
    assert "[one] it listens" in printed
    assert "[one] ended with status -9; it is started again in 1 s" in printed


def test_an_instance_of_several_processes_lives_and_dies_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is told its place. When one is killed the others end too, and all are started again."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(supervised, "_LAST_SECONDS", 0.5)
    members = tuple({"CUDA_VISIBLE_DEVICES": f"{2 * i},{2 * i + 1}"} for i in range(3))
    launcher = ProcessLauncher([Launched("group", "both", command(), environments=members)])
    try:
        [address] = launcher.start()
        wait_until("it answers", lambda: answer(address.url))
        text = answer(address.url) or ""
        assert re.fullmatch(r"0,1 .* --coordinator=127.0.0.1:\d+ --num-processes=3 --process-id=0", text)
        process = launcher.processes["group"]
        before = process.pids
        assert len(before) == 3
        os.kill(before[1], signal.SIGKILL)
        wait_until("the others end too", lambda: not any(map(is_alive, before)))
        wait_until("all are back", lambda: answer(address.url) and len(process.pids) == 3)
        assert answer(address.url) == text
        assert process.num_starts == 2
        left = process.pids
    finally:
        launcher.close()
    assert not any(map(is_alive, left))
    assert "[group.2] follows 4,5" in capsys.readouterr().err


def test_a_command_with_wrong_flags_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    launcher = ProcessLauncher([Launched("bad", "both", command("--wrong"))])
    try:
        launcher.start()
        wait_until("it has failed", lambda: launcher.problem)
        assert launcher.problem == "bad can't be started: longctx: --wrong must not be there"
        assert launcher.processes["bad"].num_starts == 1
    finally:
        launcher.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_none_outlives_its_launcher(number: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", PARENT.format(here=str(HERE))]
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        *urls, one, two = parent.stdout.readline().split()
        for url in urls:
            wait_until("it answers", lambda url=url: answer(url))
        parent.send_signal(number)
        wait_until("they are gone", lambda: not is_alive(int(one)) and not is_alive(int(two)))


def test_pauses_grow_and_begin_anew() -> None:
    back_off = BackOff()
    assert [back_off.after(lived) for lived in (0, 5, 5, 5, 5, 5, 5, 61, 1)] == [1, 2, 4, 8, 16, 30, 30, 1, 2]


def test_somebody_else_starts_static_ones() -> None:
    address = Address("far", "decode", "http://10.0.0.5:8000")
    launcher = ProcessLauncher([], [address])
    assert launcher.start() == [address]
    assert launcher.problem is None
    launcher.close()
