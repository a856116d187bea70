"""One server whose clock jumps, and one that is killed again and again."""

import random
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from host_cluster import ENGINE, check, serve_through, summary
from serve_process import ServeProcess

DAY = 86_400
NUM_KILLS = 5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="cc, which compiles the clock, is not there")
def test_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams do not notice that it is tomorrow, or a year ago."""
    library, shift = tmp_path / "clock.so", tmp_path / "shift"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    shift.write_bytes(bytes(8))
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("CLOCK_SHIFT", str(shift))
        server = ServeProcess(*ENGINE, "--quiet")
        server.__enter__()
    try:
        before = httpx.get(f"{server.url}/server_info").json()["time"]

        def jump(seconds: int) -> Callable[[], object]:
            def step() -> None:
                with shift.open("r+b") as file:
                    file.write(struct.pack("=q", seconds))
                assert abs(httpx.get(f"{server.url}/server_info").json()["time"] - before - seconds) < DAY / 2
                assert httpx.get(f"{server.url}/health").status_code == 200

            return step

        answers = serve_through(server.url, {}, 3, [(2.0, jump(seconds)) for seconds in (DAY, -365 * DAY, 3600, 0)])
        print(f"\nclock: {summary(answers)}")
        check(answers)
    finally:
        server.__exit__()


@pytest.mark.slow
def test_a_server_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """What it finds on its disk after SIGKILL gives no wrong token, and files do not add up."""
    folder, draw = tmp_path / "kv", random.Random(9)
    flags = [*ENGINE, "--quiet", "--kv-host-bytes", "4MiB", "--kv-disk", str(folder), "--kv-disk-bytes", "16MiB"]
    answers = []
    for _ in range(NUM_KILLS):
        with ServeProcess(*flags) as server:
            answers += serve_through(server.url, {}, 3, [(draw.uniform(1.0, 8.0), server.process.kill)])
    with ServeProcess(*flags) as server:
        answers_after = serve_through(server.url, {}, 3, [(8.0, lambda: None)])
        metrics = httpx.get(f"{server.url}/metrics").text
    loaded = float(re.findall(r"^longctx:kv_loaded_pages_total\{.*\} (.*)$", metrics, re.MULTILINE)[0])
    size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    print(f"\n{NUM_KILLS} kills: {summary(answers)}; after them: {summary(answers_after)}; {loaded:.0f} pages loaded")
    assert not [each for each in answers if each.is_wrong]
    check(answers_after)
    assert loaded > 0
    assert size < 2**24 + 2**20
