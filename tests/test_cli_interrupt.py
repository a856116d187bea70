"""Ctrl-C during a command: exit status 130, one line on standard error, and what was measured is kept."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_checkpoint import save_small_checkpoint

from longctx.models.builtin import TINY

SECONDS = 100  # until a test gives up
# A command, which says "now" on standard error when it comes to a function, after `skip` calls of it.
PROGRAM = """
import importlib, signal, sys, time
from longctx.cli import program

signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored

module, owner, name, skip = {module!r}, {owner!r}, {name!r}, {skip}
holder = importlib.import_module(module)
holder = getattr(holder, owner) if owner else holder
function = getattr(holder, name)

def tell(*arguments, **more):
    global skip
    if skip == 0:
        print("now", file=sys.stderr, flush=True)
        time.sleep({seconds})
    skip -= 1
    return function(*arguments, **more)

setattr(holder, name, tell)
program()
"""
LOADING = {"module": "longctx.cli.engine", "owner": "", "name": "load_checkpoint", "seconds": SECONDS, "skip": 0}
COMPILING = {"module": "longctx.serving", "owner": "Engine", "name": "compile", "seconds": 0, "skip": 0}
SERVING = {"module": "longctx.simulation.replay", "owner": "Served", "name": "of", "seconds": 0, "skip": 1}
WRITING = {
    "module": "longctx.models.quantize_checkpoint",
    "owner": "",
    "name": "_quantized",
    "seconds": SECONDS,
    "skip": 0,
}
IMPORTING = {"module": "importlib", "owner": "", "name": "import_module", "seconds": SECONDS, "skip": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_checkpoint(tmp_path_factory.mktemp("model"))


def interrupt(where: dict, *arguments: str) -> tuple[int, str, str]:
    """Send SIGINT to a command when it has come to a function; (exit status, standard output, standard error)."""
    command = [sys.executable, "-c", PROGRAM.format(**where), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        before = []
        for line in process.stderr:
            before.append(line)
            if line == "now\n":
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
        return process.returncode, out, "".join(before) + err


@pytest.mark.parametrize(
    ("where", "arguments"),
    [
        (IMPORTING, ["generate", "--model", str(TINY), "--prompt", "the"]),
        (LOADING, ["generate", "--model", str(TINY), "--prompt", "the"]),
        (COMPILING, ["demo", "--tokens", "300", "--questions", "1", "--chunk-size", "8"]),
    ],
)
def test_an_interrupt_is_one_line_and_exit_status_130(where: dict, arguments: list[str]) -> None:
    status, _, err = interrupt(where, *arguments)
    assert status == 130, err
    assert err.splitlines()[-1] == "longctx: interrupted"
    assert "Traceback" not in err


def test_an_interrupted_bench_keeps_what_it_has_measured(checkpoint: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    sizes = ["--page-size", "4", "--max-running", "4", "--token-budget", "8", "--buckets", "8", "--num-pages", "128"]
    mix = ["--requests", "50", "--prompt-tokens", "9", "--output-tokens", "2", "--rate", "2", "--json", str(results)]
    status, out, err = interrupt(SERVING, "bench", "--model", str(checkpoint), *sizes, *mix)
    assert status == 130, err
    assert err.splitlines()[-1] == "longctx: interrupted"
    assert "Traceback" not in err
    assert out == ""
    contents = json.loads(results.read_text())
    assert contents["summary"]["interrupted"] is True
    assert 1 <= len(contents["requests"]) < 50
    assert contents["summary"]["requests"] == len(contents["requests"])
    assert contents["summary"]["output_tokens_per_second"] > 0
    assert len(contents["timeline"]["seconds"]) > 0


def test_an_interrupted_quantize_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    status, _, err = interrupt(WRITING, "quantize", str(checkpoint), str(tmp_path / "out"), "--modules", "all")
    assert status == 130, err
    assert err.splitlines()[-1] == "longctx: interrupted"
    assert "Traceback" not in err
    assert not [*tmp_path.glob("out/*")]


def test_a_second_interrupt_ends_a_process_that_does_not_act_on_the_first() -> None:
    """As one doesn't that is in the midst of a long compilation."""
    program = """
import signal, time
from longctx.cli.terminal import interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupts.watch()
interrupts.leave_to_python()
while True:
    try:
        print("now", flush=True)
        time.sleep(100)
    except KeyboardInterrupt:
        pass
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "now\n"
        time.sleep(0.6)  # longer than two signals of one Ctrl-C are apart
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert process.stderr.read() == "longctx: interrupted\n"
