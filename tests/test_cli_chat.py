"""`longctx chat`: what a turn reads, what Ctrl-C stops, what is refused, and both ways to enter messages."""

import dataclasses
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from longctx.cli import main
from longctx.cli.chat import ChatLoop, LineReader, complete
from longctx.cli.conversation import Conversation
from longctx.cli.terminal import Console
from longctx.models import ByteTokenizer, Llama, LlamaConfig, save_checkpoint
from longctx.serving import Engine, EngineConfig, Request, SamplingParams

MODEL = Llama(LlamaConfig(258, 16, 24, 1, 2, 1, 8, max_positions=512, bos_id=256, eos_ids=(257,)))
PARAMS = MODEL.init(jax.random.key(0), initializer_range=1.0)
PARAMS["lm_head"] = PARAMS["lm_head"].at[:, 257].set(0.0)  # it ends no answer itself
SECONDS = 60  # until a test gives up
SAMPLING = SamplingParams(max_tokens=20)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def shared() -> Engine:
    config = EngineConfig(
        page_size=16,
        num_pages=16,
        max_running=1,
        max_length=256,
        token_budget=16,
        buckets=(1, 16),
        max_logprobs=0,
    )
    return Engine(MODEL, PARAMS, config, tokenizer=ByteTokenizer())


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    assert not shared.has_work
    with shared.lend_executor():  # forgets the cache
        pass


@pytest.fixture
def asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that were made."""
    requests: list[Request] = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: requests.append(request) or submit(request))
    return requests


class Lines(LineReader):
    """Messages of a test; an exception among them is raised."""

    def __init__(self, *lines: str | BaseException, is_terminal: bool = False) -> None:
        self.is_terminal, self._lines = is_terminal, iter(lines)

    def read(self) -> str | None:
        line = next(self._lines, None)
        if isinstance(line, BaseException):
            raise line
        return line


def make_loop(engine: Engine, *lines: str, quiet: bool = False) -> ChatLoop:
    return ChatLoop(engine, Conversation(ByteTokenizer(), frozenset((257,))), SAMPLING, Console(quiet), Lines(*lines))


def figures(printed: str) -> list[tuple[int, int]]:
    """Tokens found in the cache and of the prompt, for each line that says so."""
    found = re.findall(r"([\d,]+) of ([\d,]+) tokens from the cache, TTFT [\d.]+ s", printed)
    return [(int(a.replace(",", "")), int(b.replace(",", ""))) for a, b in found]


def test_a_turn_reads_only_what_is_new(
    engine: Engine, asked: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    """The answers are those of a request that reads all of it, as another tenant's does."""
    loop = make_loop(engine, "hello", "how are you?", "", "well?")
    assert loop.run() == 0
    out, err = capsys.readouterr()
    known, texts = 0, []
    for request, (cached, length) in zip(list(asked), figures(err), strict=True):
        assert length == len(request.prompt)
        assert cached == known
        sampling = SamplingParams(max_tokens=20, stop=("\nQ:",))
        (fresh,) = engine.generate([Request(request.prompt, sampling, tenant="another")])
        engine.core.pool.clear()
        assert fresh.metrics.cached_tokens == 0
        texts.append(fresh.text)
        known = length + len(fresh.token_ids) - 1  # of the last token no key was computed
        assert len(set(fresh.token_ids)) > 3, "the answers show something"
    assert out == "".join(text + "\n" for text in texts)
    assert len(asked) == 3


def test_quiet_prints_answers_alone(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_loop(engine, "hello", "/new", "hello", quiet=True).run() == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, second = out[: len(out) // 2], out[len(out) // 2 :]
    assert first == second != ""


def interrupting(engine: Engine, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Send SIGINT in the midst of a step; twice, as some programs do for one Ctrl-C."""
    end, count = engine.core.end, 0

    def count_steps(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count == after:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return end(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.core, "end", count_steps)


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(
    engine: Engine, asked: list[Request], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupting(engine, monkeypatch, after=6)
    assert make_loop(engine, "hello", "go on").run() == 0
    out, err = capsys.readouterr()
    assert err.count("stopped") == 1
    (_, length), (cached, _) = figures(err)
    text = out.splitlines()[0]
    assert 1 <= len(text) < 20, "the answer was cut off"
    assert cached > length
    assert ByteTokenizer().decode(asked[1].prompt).startswith(f"\nQ: hello\nA: {text}")


def test_ctrl_c_before_the_first_token_forgets_the_message(
    engine: Engine, asked: list[Request], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupting(engine, monkeypatch, after=1)
    assert make_loop(engine, "hello " * 20, "hello").run() == 0
    assert "the message is forgotten" in capsys.readouterr().err
    assert ByteTokenizer().decode(asked[1].prompt) == "\nQ: hello\nA: "


def test_ctrl_c_outside_of_an_answer_ends_a_pipe_and_no_terminal(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop(is_terminal: bool) -> ChatLoop:
        reader = Lines(KeyboardInterrupt(), "hello", is_terminal=is_terminal)
        return ChatLoop(engine, Conversation(ByteTokenizer(), frozenset()), SAMPLING, Console(False), reader)

    with pytest.raises(KeyboardInterrupt):
        loop(is_terminal=False).run()
    assert loop(is_terminal=True).run() == 0
    out, err = capsys.readouterr()
    assert "/exit or Ctrl-D leaves" in err
    assert not set(map(ord, out)) & {*range(10), *range(11, 32), *range(127, 160)}, "a terminal obeys such characters"


def test_a_file_is_read_once(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a story.txt"
    path.write_text("The miller crossed the bridge.\r\nThe old road was quiet.\n\n")
    assert make_loop(engine, f"/file '{path}'", "why?", "and?", "/exit", "not read").run() == 0
    _, err = capsys.readouterr()
    first, second = figures(err)
    assert first == (0, 55 + len("\nQ: why?\nA: "))
    assert second[0] >= first[1]
    assert "a story.txt comes before the next message" in err


def test_what_is_refused_is_one_sentence(
    engine: Engine, asked: list[Request], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"binary": b"\x7fELF\0\0", "latin": b"caf\xe9", "empty": b" \n", "long": b"a" * 300, "huge": b"a" * 20_000}
    for name, contents in files.items():
        (tmp_path / name).write_bytes(contents)
    os.mkfifo(tmp_path / "pipe")
    expected = {
        "/file": "/file needs the path of a file",
        "/file ''": "/file needs the path of a file",
        '/file " "': "/file needs the path of a file",
        "/file '": "/file: no such file: '",
        "/file /nowhere/a.txt": "/file: no such file: /nowhere/a.txt",
        f"/file {tmp_path}": f"/file: {tmp_path} is a directory",
        f"/file {tmp_path}/pipe": f"/file: {tmp_path}/pipe is not a regular file",
        f"/file {tmp_path}/binary": f"/file: {tmp_path}/binary is a binary file",
        f"/file {tmp_path}/latin": f"/file: {tmp_path}/latin is not UTF-8: byte 3 is wrong, unexpected end of data",
        f"/file {tmp_path}/empty": f"/file: {tmp_path}/empty is empty",
        f"/file {tmp_path}/long": f"/file: with {tmp_path}/long the conversation would have 309 tokens, and the "
        "context of 256 leaves room for 192 before a question",
        f"/file {tmp_path}/huge": f"/file: {tmp_path}/huge has more than 16,384 bytes, which are too many for",
        f"/file {'a' * 5000}": "File name too long",
        "/file a\0b": "/file: no such file: a",
        "/file ~nobodyofthatname/a": "home directory",
        "/file caf\udce9": "/file must be valid Unicode",
        "/fil": "no such command: /fil (/help lists them)",
        "/": "no such command: / (/help lists them)",
        "caf\udce9": "the message must be valid Unicode",
        "a" * 250: "this message has 259 tokens, and the context 256: shorten it, or raise --max-length",
    }
    assert make_loop(engine, *expected, "hello", quiet=True).run() == 0
    out, err = capsys.readouterr()
    for line, message in zip(err.splitlines(), expected.values(), strict=True):
        assert line.startswith("longctx: ")
        assert message in line
    assert len(asked) == 1, "the session goes on"
    assert out


def test_a_full_context_is_told_beforehand(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["a" * 90, "b" * 90, "c" * 90, "/new", "hello"]
    assert make_loop(engine, *lines).run() == 0
    out, err = capsys.readouterr()
    events = re.findall(r"tokens of the context are left|/new begins a new conversation$|TTFT|a new conv", err, re.M)
    assert events[0] == events[1] == "TTFT" or "left" in events[1]
    assert "longctx: the conversation and this message have" in err
    assert err.index("/new begins a new conversation") < err.index("(a new conversation)")
    assert len(figures(err)) == 3
    assert figures(err)[-1][0] == 0
    assert out.count("\n") >= 3


def test_answers_use_what_is_left_of_the_context(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_loop(engine, "a" * 240).run() == 0
    err = capsys.readouterr().err
    assert "(7 tokens of the context are left: /new begins a new conversation)" in err
    assert re.search(r", 7 tokens at .*, the context is full\]", err)
    assert "--max-tokens" not in err
    assert make_loop(engine, "a" * 227).run() == 0  # which leaves room for just as many as an answer may have
    assert re.search(r", 20 tokens at .*, cut off at --max-tokens\]", capsys.readouterr().err)


def test_a_failed_answer_is_exit_status_1(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    broken = jax.tree.map(lambda x: x * float("nan"), PARAMS)
    failing = Engine(MODEL, broken, engine.config, tokenizer=ByteTokenizer())
    assert make_loop(failing, "hello", "again").run() == 1
    assert capsys.readouterr().err.count("longctx: failed: ") == 2


def test_commands_and_paths_are_completed(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("text")
    (tmp_path / "stage").mkdir()
    assert [complete("/f", number) for number in (0, 1)] == ["/file", None]
    found = [complete(f"/file {tmp_path}/st", number) for number in (0, 1, 2)]
    assert found == [f"/file {tmp_path}/stage", f"/file {tmp_path}/story.txt", None]
    assert complete("What is sto", 0) is None
    assert complete("", 0) is None


# The command.


def test_the_built_in_model_answers_about_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "story.txt"
    path.write_text("The miller crossed the bridge. The pass key of lemon is 48213. The old road was quiet.")
    lines = f"/file {path}\nWhat is the pass key of lemon?\nWhat is the pass key of lemon?\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", "--chunk-size", "1", "--max-length", "1024"]) == 0
    out, err = capsys.readouterr()
    assert out == "48213\n48213\n"
    assert "no chat template" in err
    first, second = figures(err)
    assert first[0] == 0
    assert second[0] == first[1] + 5


def test_a_template_that_refuses_the_system_message_is_named_beforehand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path, MODEL, PARAMS)
    vocab = {chr(i): i for i in range(97, 123)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ 'a' }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert main(["chat", "--model", str(tmp_path), "--system", "Be brief."]) == 2
    assert "no system role" in capsys.readouterr().err.splitlines()[-1]


# The command, as a terminal starts it.
PROGRAM = """
import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored
from longctx.cli import program
program()
"""


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_stops_answer_after_answer(tmp_path: Path) -> None:
    """Each time again, long after the last; Ctrl-D ends it."""
    save_checkpoint(tmp_path, Llama(dataclasses.replace(MODEL.config, max_positions=32768)), PARAMS)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "longctx.ByteTokenizer"}')
    command = [sys.executable, "-c", PROGRAM, "chat", "--model", str(tmp_path), "--max-tokens", "30000"]
    ours, theirs = pty.openpty()
    pipes = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    process = subprocess.Popen([*command, "--chunk-size", "1"], **pipes, env=environment, start_new_session=True)
    os.close(theirs)
    terminal = Terminal(ours)
    try:
        terminal.wait_for("/help lists")
        for _ in range(3):
            terminal.wait_for(">")
            os.write(ours, b"hello\r")
            # The line editor has given the terminal back, and the answer has begun.
            terminal.wait_for(r"hello\s*(\x1b\[\?2004l)?\s*[^\s\x1b]")
            time.sleep(0.7)  # longer than two signals of one Ctrl-C are apart
            os.write(ours, b"\x03")
            terminal.wait_for("stopped]")
        terminal.wait_for(">")
        os.write(ours, b"\x04")
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        os.close(ours)
    assert "Traceback" not in terminal.shown
    assert (tmp_path / "longctx" / "chat_history").read_text() == "hello\n", "no message twice in a row"


class Terminal:
    """What a program shows on a terminal."""

    def __init__(self, descriptor: int) -> None:
        self.shown = ""
        self._descriptor, self._read = descriptor, 0

    def wait_for(self, pattern: str) -> None:
        """Wait until the program shows such a text after the one that was waited for before."""
        end = time.monotonic() + SECONDS
        while (found := re.compile(pattern).search(self.shown, self._read)) is None:
            assert time.monotonic() < end, self.shown[-2000:]
            if select.select([self._descriptor], [], [], 1.0)[0]:
                self.shown += os.read(self._descriptor, 2**16).decode(errors="replace")
        self._read = found.end()
