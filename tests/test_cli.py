"""Commands as a user runs them first: what they print, where, and with which exit status."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import longctx
from longctx.cli import main
from longctx.cli.terminal import Console
from longctx.models import Llama, LlamaConfig, passkey, save_checkpoint
from longctx.models.builtin import TINY
from longctx.serving import Engine, Event, Output
from longctx.serving.request.output import Metrics
from longctx.simulation.record import Record
from longctx.simulation.workloads import read_workload

GENERATE = ["generate", "--model", str(TINY), "--max-tokens", "2", "--prompt"]
BENCH = ["bench", "--requests", "1", "--prompt-tokens", "9", "--output-tokens", "2"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over a vocabulary of a few words."""
    directory = tmp_path_factory.mktemp("model")
    words = ["<unk>", "the", "a", "cat", "dog", "sat", "ran", "on", "mat", "rug", "far"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    model = Llama(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=24,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            max_positions=64,
        )
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), model.abstract_params())
    save_checkpoint(directory, model, params)
    return directory


def test_generate_continues_standard_input(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the cat sat on the mat")
    arguments = ["generate", "--model", str(checkpoint), "--max-tokens", "5", "--quiet", "--prompt-file"]
    assert main([*arguments, str(prompt)]) == 0
    expected = capfd.readouterr().out
    with prompt.open() as file, os.fdopen(os.dup(0)) as before:
        os.dup2(file.fileno(), 0)
        try:
            assert main([*arguments, "-"]) == 0
        finally:
            os.dup2(before.fileno(), 0)
    assert capfd.readouterr().out == expected


def test_generate_continues_a_file(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the cat sat on the mat")
    arguments = ["generate", "--model", str(checkpoint), "--prompt-file", str(prompt), "--chunk-size", "4"]
    arguments += ["--max-tokens", "5"]

    def text(*more: str) -> str:
        assert main([*arguments, *more]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    assert main(arguments) == 0
    printed = capsys.readouterr()
    greedy = printed.out.removesuffix("\n")
    assert len(greedy.split()) == 5, "standard output is the text alone"
    for figure in ("compiled in", "prompt   6 tokens", "memory", "TTFT", "prefill", "decode"):
        assert figure in printed.err
    assert "kernels  xla on cpu: mosaic_gpu needs an NVIDIA GPU of the Hopper generation" in printed.err
    assert "6/6" not in printed.err, "a progress bar is no use off a terminal"
    assert main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr() == printed._replace(err="")

    sampled = [text("--temperature", "2", "--seed", seed) for seed in ("1", "1", "2")]
    assert sampled[0] == sampled[1] != sampled[2]
    words = greedy.split()
    stop = next(i for i in range(1, 5) if words[i] not in words[:i])
    assert text("--stop", "far away", "--stop", words[stop]).split() == words[:stop]
    assert text("--temperature", "2", "--top-k", "1") == text("--temperature", "2", "--min-p", "1") == greedy


@pytest.mark.slow
def test_generate_prints_several_completions(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", str(checkpoint), "--prompt", "the dog", "--temperature", "2", "--n", "2"]
    assert main([*arguments, "--max-tokens", "7", "--chunk-size", "2"]) == 0
    first, second = capsys.readouterr().out.split("\n--- 2\n")
    assert len(first.split()) == len(second.split()) == 7
    assert first != second


def test_demo_finds_its_pass_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """It answers questions about a note while it prefills the document."""
    assert main(["demo", "--tokens", "2048", "--questions", "2", "--chunk-size", "8"]) == 0
    out = capsys.readouterr().out
    assert "hides 2 pass keys" in out
    assert "right    6 of 6" in out
    rows = [line for line in out.splitlines() if "What is" in line]
    assert "  note " in rows[0]
    assert int(rows[0].split("%")[0].split()[-1]) < 100
    cached = [row.split()[-1] for row in rows if "  document  " in row]
    assert sorted(cached) == ["0", "2,048"]


def test_demo_prints_the_expected_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make = passkey.make_document

    def lie(*arguments: int) -> passkey.Document:
        document = make(*arguments)
        return dataclasses.replace(document, facts=dict.fromkeys(document.facts, "00000"))

    monkeypatch.setattr(passkey, "make_document", lie)
    assert main(["demo", "--tokens", "300", "--questions", "1", "--chunk-size", "8"]) == 1
    out = capsys.readouterr().out
    assert "wrong: it is 00000" in out
    assert "right    0 of 5" in out


def test_every_secret_is_another_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert [main(["group-secret"]) for _ in range(2)] == [0, 0]
    first, second = capsys.readouterr().out.split()
    assert first != second
    assert min(len(first), len(second)) >= 32


def test_logs_get_lines_of_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A log in which minutes pass in silence looks like that of a program that hangs."""
    seconds = iter((0.0, 1.0, 31.0, 40.0, 99.0))
    monkeypatch.setattr("longctx.cli.terminal.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    with Console(False).progress("compiling", "program") as show:
        for done in range(1, 5):
            show(done, 4)
    assert capsys.readouterr().err == "compiling: 2 of 4 programs\n"


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"longctx {longctx.__version__}\n"


PRINTING = """
import os, sys
from longctx import cli
cli._run = lambda arguments: {0} or print({1}) or 0
cli.program()
"""
LIBRARY = PRINTING.format("os.write(1, b'[Gloo] connected\\n') and 0", "'text'")


@pytest.mark.parametrize(
    ("shell", "program", "out", "err"),
    [
        ('"$0" -c "$1"', LIBRARY, "text\n", "[Gloo] connected\n"),
        ('"$0" -c "$1" >&-', PRINTING.format(0, "'text'"), "", ""),
        ('"$0" -c "$1" | head -c 4', PRINTING.format(0, "'text ' * 100_000"), "text", ""),
    ],
    ids=["what a library prints", "closed", "the reader leaves"],
)
def test_standard_output_has_the_text_alone(shell: str, program: str, out: str, err: str) -> None:
    """Gloo logs its connections to file descriptor 1; a closed output and a reader that has left are no errors."""
    command = ["sh", "-c", shell, sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (out, err)


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
