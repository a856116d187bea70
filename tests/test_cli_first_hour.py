"""What the commands check beforehand, by the flag's own name, and where they print what."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longctx
from longctx.cli import COMMANDS, main
from longctx.models import ByteTokenizer, load_checkpoint, load_tokenizer
from longctx.models.builtin import TINY
from longctx.parallel import choose_ring
from longctx.parallel.cost import H100_RDMA, LLAMA3_405B
from longctx.serving import Engine, EngineConfig, Event, Output, SamplingParams
from longctx.serving.engine import memory
from longctx.serving.request.output import Metrics
from longctx.simulation.record import Record
from longctx.simulation.workloads import read_workload

GENERATE = ["generate", "--model", str(TINY), "--max-tokens", "2", "--prompt"]
BENCH = ["bench", "--requests", "1", "--prompt-tokens", "9", "--output-tokens", "2"]


@pytest.fixture
def loads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where weights are loaded: errors have to come before."""

    def load(*arguments: object) -> None:
        raise AssertionError("weights are loaded")

    for module in ("engine", "profile"):
        monkeypatch.setattr(f"longctx.cli.{module}.load_checkpoint", load)


@pytest.mark.usefixtures("loads_no_weights")
def test_lengths_are_scaled_within_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 5, "output_length": 5}')
    assert main(["bench", "--workload", str(path), "--scale-lengths", "1e308"]) == 2
    assert capsys.readouterr().err == "longctx: --scale-lengths: factor must be finite and 0 to 1e+06, got 1e+308\n"


@pytest.mark.usefixtures("loads_no_weights")
@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"caf\xe9 au lait", "story.txt is not UTF-8: byte 3"),
        (b"", "story.txt is empty"),
        (b" \n", "story.txt is empty"),
        (None, "no such file: "),
    ],
)
def test_files_of_text_are_checked_by_name(
    tmp_path: Path, contents: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "story.txt"
    if contents is not None:
        path.write_bytes(contents)
    for flag, arguments in (
        ("--document", ["demo", "--document", str(path), "--question", "What?"]),
        ("--prompt-file", ["generate", "--model", str(TINY), "--prompt-file", str(path)]),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"longctx: {flag}: ")
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.usefixtures("loads_no_weights")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "caf\xe9", "max_tokens": 1}', "trace.jsonl:1: it is not UTF-8: "),
        (b'{"prompt": "\\ud800", "max_tokens": 1}', "trace.jsonl:1: prompt must be valid Unicode"),
        (b'{"prompt": [1], "max_tokens": 1, "timestamp": 1e300}', "trace.jsonl:1: timestamp must be finite and 0 to"),
        (b'{"prompt": [1, 258], "max_tokens": 1}', "--workload: prompt of request 1 must be of tokens 0 to 257"),
    ],
)
def test_prompts_of_a_workload_are_checked_by_line(
    tmp_path: Path, line: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line + b"\n")
    assert main(["bench", "--workload", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_documented_workloads_are_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs/command_line.md").read_text(encoding="utf-8")
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in text.splitlines() if line.startswith("{")))
    ids, lengths, prompt = read_workload(path)
    assert (lengths.prompt_tokens, lengths.output_tokens, lengths.blocks) == (6955, 52, (46, 47, 48))
    assert (prompt.prompt, prompt.arrival) == ("Once upon a time", 30.535)
    assert (ids.prompt, ids.arrival) == ((256, 84, 104, 101), 0)

    columns = [line.split("`")[1] for line in text.splitlines() if line.startswith(("| `num_", "| `arrived_at"))]
    path = tmp_path / "trace.csv"
    path.write_text(",".join(columns) + "\n3,4,5.5\n")
    (row,) = read_workload(path)
    assert (row.prompt_tokens, row.output_tokens, row.arrival) == (3, 4, 5.5)


def test_lone_surrogates_are_no_text() -> None:
    model, params = load_checkpoint(TINY)
    engine = Engine(model, params, EngineConfig(num_pages=8, max_running=2), tokenizer=load_tokenizer(TINY))
    with pytest.raises(ValueError, match="prompt must be valid Unicode"):
        engine.generate("\ud800")
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt must be valid Unicode"):
        engine.generate(["a", "\ud800"])
    with pytest.raises(ValueError, match="stop must be valid Unicode"):
        SamplingParams(stop=("a", "\ud800"))
    with pytest.raises(ValueError, match="text must be valid Unicode"):
        ByteTokenizer().encode("\ud800")


def test_hardware_is_named_where_it_is_none() -> None:
    with pytest.raises(TypeError, match="hardware must be a Hardware, such as H100_RDMA, got 'h100'"):
        choose_ring(10, 0, 2, LLAMA3_405B, hardware="h100")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model must be a ModelShape, such as LLAMA3_405B, got 'llama'"):
        choose_ring(10, 0, 2, model="llama", hardware=H100_RDMA)  # type: ignore[arg-type]


def test_what_libraries_print_goes_to_standard_error() -> None:
    """Gloo logs its connections to file descriptor 1."""
    program = """
import os, sys
from longctx.cli import terminal
with terminal.stdout_is_ours():
    os.write(1, b"[Gloo] connected\\n")
    print("text")
os.write(1, b"afterwards\\n")
print("and later")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "text\nafterwards\nand later\n"
    assert done.stderr == "[Gloo] connected\n"


def test_a_closed_standard_output_is_no_error() -> None:
    program = """
import sys
from longctx.cli import terminal
with terminal.stdout_is_ours():
    sys.stdout.write("text")
"""
    shell = ["sh", "-c", '"$0" -c "$1" >&-', sys.executable, program]
    done = subprocess.run(shell, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_summaries_of_commands_are_sentences() -> None:
    for summary in COMMANDS.values():
        assert summary[0].isupper()
        assert summary.endswith(".")


def test_a_reader_that_has_left_is_no_error() -> None:
    program = """
import sys
from longctx import cli
cli._run = lambda arguments: print("text " * 100_000) or 0
sys.exit(cli.main())
"""
    shell = ["sh", "-c", '"$0" -c "$1" | head -c 4', sys.executable, program]
    done = subprocess.run(shell, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("text", "")


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"longctx {longctx.__version__}\n"


def test_completions_are_bounded_by_max_running_before_anything_is_submitted() -> None:
    model, params = load_checkpoint(TINY)
    engine = Engine(model, params, EngineConfig(num_pages=8, max_running=2))
    many = SamplingParams(n=3, temperature=1)
    for serve in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match="n must be at most max_running=2, got 3"):
            serve([1, 2, 3], many)
    with pytest.raises(ValueError, match="n must be at most max_running=2, got 3"):
        engine.prepare(longctx.Request([1, 2, 3], many))
    assert not engine.has_work


def test_pages_beyond_the_memory_of_the_host_are_refused() -> None:
    model, params = load_checkpoint(TINY)
    with pytest.raises(ValueError, match=r"lower num_pages or page_size; about [\d,]+ pages fit"):
        Engine(model, params, EngineConfig(num_pages=10**12))


def test_memory_that_runs_out_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (MemoryError("5 GiB"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")):

        def fail(*arguments: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("longctx.cli.engine.load_checkpoint", fail)
        assert main([*GENERATE, "the"]) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("longctx: failed: ")
        assert str(error).splitlines()[0] in last


def test_failed_completions_are_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(engine: Engine, request_id: str, console: object) -> Iterator[list[Event]]:
        output = Output(request_id, 0, [], "", "error", Metrics(0.0, 1), error="it burns")
        yield [Event(request_id, 0, (), "", output=output)]

    for prepare in ("compile", "warm_up"):
        monkeypatch.setattr(Engine, prepare, lambda engine, progress: None)
    for command in ("generate", "demo"):
        monkeypatch.setattr(f"longctx.cli.{command}.steps", fail)
    for arguments in ([*GENERATE, "the"], ["demo", "--tokens", "300", "--questions", "1"]):
        assert main(arguments) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("longctx: failed: 1 of ")
        assert last.endswith(": it burns")

    results = tmp_path / "results.json"

    def replay(engine: Engine, *arguments: object, record: Record, **more: object) -> None:
        record.failed, record.stats = 1, engine.stats()

    monkeypatch.setattr("longctx.cli.bench.replay", replay)
    assert main([*BENCH, "--json", str(results)]) == 1
    out, err = capsys.readouterr()
    assert "failed requests  1\n" in out
    assert err.splitlines()[-1] == "longctx: failed: 1 of 1 requests"
    assert json.loads(results.read_text())["summary"]["failed"] == 1


def test_parameters_and_pages_are_estimated_exactly() -> None:
    model, params = load_checkpoint(TINY)
    config = EngineConfig(num_pages=100, max_running=4, token_budget=64, buckets=(64,))
    engine = Engine(model, params, config)
    assert engine.mesh is not None
    sizes = 100, model.config.max_positions
    loaded = sum(x.nbytes for x in jax.tree.leaves(params))
    for dtype, copies in ((np.float32, 2), (jnp.bfloat16, 1)):
        found = memory.estimate(model, config, engine.mesh, dtype, *sizes)
        assert found.params == loaded * copies
        assert memory.estimate(model, config, engine.mesh, dtype, *sizes, is_loaded=True).params == loaded * (
            copies / 2
        )
    found = memory.estimate(model, config, engine.mesh, np.float32, *sizes)
    cache = engine.executor.runner.state.cache  # type: ignore[attr-defined]
    assert found.pages == cache.k.nbytes + cache.v.nbytes
