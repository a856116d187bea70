"""`longctx serve` in two processes: the first one serves, the other follows it, to the end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from serve_process import free_port

from longctx.models import load_checkpoint, load_tokenizer
from longctx.models.builtin import TINY
from longctx.serving import Engine, EngineConfig, SamplingParams

PROGRAM = "from longctx.cli import program; program()"
SIZES = ["--max-length", "1024", "--num-pages", "64", "--max-running", "4", "--token-budget", "32", "--buckets", "32"]
PROMPT = list(range(10, 90))


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["--stage", "--tensor"])
def test_the_first_process_serves_and_the_others_follow(axis: str, tmp_path: Path) -> None:
    """The tokens are those of one process; SIGTERM for both lets the request finish, and both exit with 0.

    Each gets it twice, as from Slurm and a script in its job.
    """
    port = free_port()
    arguments = ["serve", "--port", str(port), axis, "2", *SIZES, "--coordinator", f"127.0.0.1:{free_port()}"]
    logs = [tmp_path / f"log-{i}" for i in range(2)]
    processes = []
    for i, log in enumerate(logs):
        command = [sys.executable, "-c", PROGRAM, *arguments, "--num-processes", "2", "--process-id", str(i)]
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, stderr=file))
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 240
        while not _is_ready(url):
            assert all(process.poll() is None for process in processes), [log.read_text() for log in logs]
            assert time.monotonic() < end, [log.read_text() for log in logs]
            time.sleep(0.2)
        fields = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=fields, timeout=60).json()
        assert answer["choices"][0]["token_ids"] == _expected(24)
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True, "seed": 5}
        assert "[DONE]" in httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).text

        with httpx.stream("POST", f"{url}/v1/completions", json=fields | {"max_tokens": 200, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            for process in [*processes, *processes]:
                process.send_signal(signal.SIGTERM)
                time.sleep(0.05)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert [process.wait(30) for process in processes] == [0, 0], [log.read_text() for log in logs]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def _expected(count: int) -> list[int]:
    model, params = load_checkpoint(TINY)
    config = EngineConfig(max_length=1024, num_pages=64, max_running=4, token_budget=32, buckets=(32,))
    engine = Engine(model, params, config, tokenizer=load_tokenizer(TINY))
    return engine.generate(PROMPT, SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids
