"""`longctx serve`: its flags, its file of flags, and the process."""

import argparse
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from certificates import make_ca, make_certificate

from longctx import cli
from longctx.cli import command_flags, command_parser
from longctx.cli.config_file import config_arguments
from longctx.cli.flags import parse_weight, read
from longctx.serving.config import AdmissionLimits
from longctx.serving.server.settings import ObserverSettings, ServerSettings

PROGRAM = "from longctx.cli import program; program()"
# The built-in model with few programs to compile.
SMALL = ["--max-length", "4096", "--num-pages", "128", "--max-running", "8", "--token-budget", "32", "--buckets", "32"]
BODY = {"prompt": "ABCD", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def parser() -> argparse.ArgumentParser:
    return command_parser("serve")


def test_defaults_are_those_of_the_settings() -> None:
    options = parser().parse_args([])
    assert read(ServerSettings, options) == ServerSettings()
    assert read(AdmissionLimits, options) == AdmissionLimits()
    assert read(ObserverSettings, options) == ObserverSettings()
    assert (options.host, options.port) == ("127.0.0.1", 8000)


def test_help_begins_with_the_flags_that_servers_need() -> None:
    help = parser().format_help()
    first = re.findall(r"^  (--[a-z-]+)", help.partition("\n\nmodel:")[0], re.MULTILINE)
    assert first == [
        f"--{name}" for name in ["model", "config", "host", "port", "api-key-file", "max-length", "context", "tensor"]
    ]


def parse(tmp_path: Path, text: str, *arguments: str) -> argparse.Namespace:
    file = tmp_path / "serve.toml"
    file.write_text(text, encoding="utf-8")
    return cli.parse(["serve", "--config", str(file), *arguments])[1]


def test_every_flag_may_stand_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, with dashes or underscores, with a value of its type."""
    lines, expected = [], {}
    for number, action in enumerate(command_flags("serve")):
        name = action.option_strings[-1].removeprefix("--")
        if name in ("help", "config"):  # alone
            continue
        value: object = number + 1
        if action.nargs == 0:
            value = True
        elif action.choices:
            value = list(action.choices)[-1]
        elif action.type is parse_weight:
            value = f"tenant-{number}={number}.0"
        elif action.type in (None, str, Path):
            value = f"text-{number}"
        elif action.type is float:
            value = number + 0.5
        shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
        lines.append(f"{name if number % 2 else name.replace('-', '_')} = {shown}")
        value = action.const if action.nargs == 0 else action.type(str(value)) if callable(action.type) else value
        expected[action.dest] = [value] if isinstance(action.default, list) else value
    assert len(expected) > 60
    monkeypatch.setattr("longctx.cli.flags.check_options", lambda options: None)  # no such files are there
    options = vars(parse(tmp_path, "\n".join(lines)))
    assert {name: options[name] for name in expected} == expected


def test_the_command_line_wins(tmp_path: Path) -> None:
    text = 'port = 9000\nhost = "0.0.0.0"\napi_key = ["a-key-of-the-file"]\nno-prefix-cache = true\nmax_running = 3\n'
    options = parse(tmp_path, text, "--port", "8000", "--api-key", "a-key-of-the-line", "--max-running=64")
    assert (options.port, options.host, options.max_running) == (8000, "0.0.0.0", 64)
    assert options.api_key == ["a-key-of-the-line"]
    assert not options.prefix_cache


def test_lists_repeat_a_flag(tmp_path: Path) -> None:
    assert parse(tmp_path, 'api-key = ["one-one-1", "bob two-two-2"]').api_key == ["one-one-1", "bob two-two-2"]
    assert parse(tmp_path, "buckets = [8, 64]").buckets == parse(tmp_path, "buckets = '8,64'").buckets == (8, 64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts = 1", "unknown key 'hosts': did you mean 'host'"),
        ("xyzzy = 1", "unknown key 'xyzzy'$"),
        ('config = "x"', "unknown key 'config'"),
        ("help = true", "unknown key 'help'"),
        ("[server]\nport = 1", "unknown key 'server'"),
        ("port = [1, 2]", "port must be"),
        ("port = true", "port must be"),
        ("port = 1979-05-27", "port must be"),
        ("no-prefix-cache = 1", "no-prefix-cache must be true or false"),
        ("port = ", "is no TOML"),
        ("port = 1\nport = 2", "is no TOML"),
        ("\x00", "is no TOML"),
    ],
)
def test_what_is_no_flag_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(tmp_path, text)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be read"):
        config_arguments(parser(), tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is no TOML"):
        config_arguments(parser(), tmp_path / "bytes.toml")


class Process:
    """The command in a process of its own."""

    def __init__(self, *arguments: str, signals: Sequence[signal.Signals] = ()) -> None:
        """`signals`: that it gets after its first line."""
        command = [sys.executable, "-c", PROGRAM, "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.url = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            for number in signals if len(self.lines) == 1 else ():
                self.process.send_signal(number)
            if line.startswith("ready "):
                self.url = line.split()[-1]
                break
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    def post(self, **fields: object) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=BODY | fields, timeout=60)


@pytest.fixture
def command() -> Iterator[Process]:
    made = Process(*SMALL)
    try:
        assert made.url, made.lines
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        if made.process.stderr is not None:
            made.process.stderr.close()


@pytest.mark.slow
def test_a_model_without_a_chat_template_says_so(command: Process) -> None:
    """As its chats are plain questions and answers, which `--chat-template` changes."""
    assert sum("no chat template" in line for line in command.lines) == 1


@pytest.mark.slow
def test_sigterm_lets_requests_finish_and_exits_with_0(command: Process) -> None:
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(command.post(max_tokens=600)))
    asking.start()
    while not httpx.get(f"{command.url}/load").json()["num_running_reqs"]:
        time.sleep(0.01)
    command.process.send_signal(signal.SIGTERM)
    while httpx.get(f"{command.url}/ready").status_code == 200:
        time.sleep(0.01)
    assert command.post().status_code == 503
    assert httpx.get(f"{command.url}/health").status_code == 200
    asking.join(60)
    assert answers[0].json()["usage"]["completion_tokens"] == 600
    assert command.process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(command: Process, number: signal.Signals) -> None:
    errors: list[httpx.TransportError] = []

    def ask() -> None:
        try:
            command.post(max_tokens=4000)
        except httpx.TransportError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while not httpx.get(f"{command.url}/load").json()["num_running_reqs"]:
        time.sleep(0.01)
    children = _children(command.process.pid)
    command.process.send_signal(number)
    time.sleep(0.7)  # the same signal within half a second counts as one
    assert command.process.poll() is None
    start = time.monotonic()
    command.process.send_signal(number)
    assert command.process.wait(5) == 128 + number
    assert time.monotonic() - start < 2
    asking.join(10)
    assert len(errors) == 1
    # The processes that tokenise end with it.
    end = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def _children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


@pytest.mark.slow
def test_sigterm_while_it_compiles_exits_with_0() -> None:
    command = [sys.executable, "-c", PROGRAM, "serve", "--port", "0", "--no-compile-cache", "--max-length", "4096"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"JAX_ENABLE_X64": "0"}
    ) as process:
        assert process.stderr is not None
        assert "memory" in process.stderr.readline()
        time.sleep(3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


PAIR = """
[engine]
tls-cert = "{cert}"
tls-key = "{key}"
tls-ca = "{ca}"
max_length = 2048
num_pages = 400
page_size = 16
max_running = 8
token_budget = 32
buckets = "32"
[[instances]]
role = "prefill"
[[instances]]
role = "decode"
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_cluster", [False, True])
def test_it_speaks_https_with_the_files_of_the_time(tmp_path: Path, is_cluster: bool) -> None:
    """Router and instances also among themselves, by certificates."""
    ca = make_ca(tmp_path)
    own, new = (make_certificate(tmp_path, ca, name) for name in ("own", "new"))
    flags = [*SMALL, "--tls-cert", str(own.cert), "--tls-key", str(own.key)]
    if is_cluster:
        file = tmp_path / "cluster.toml"
        file.write_text(PAIR.format(cert=own.cert, key=own.key, ca=ca.cert), encoding="utf-8")
        flags = [*flags[len(SMALL) :], "--tls-ca", str(ca.cert), "--cluster", str(file)]
    made = Process(*flags, signals=(signal.SIGHUP,))
    try:
        assert made.url.startswith("https://127.0.0.1:"), made.lines
        trust = ssl.create_default_context(cafile=str(ca.cert))
        with httpx.Client(base_url=made.url, verify=trust, timeout=60) as client:
            first = client.post("/v1/completions", json=BODY)
            assert first.json()["usage"]["completion_tokens"] == 8
            address = "127.0.0.1", int(made.url.rpartition(":")[2])
            before = ssl.get_server_certificate(address)
            for source, target in zip(new, own, strict=True):
                target.write_bytes(source.read_bytes())
            made.process.send_signal(signal.SIGHUP)
            end = time.monotonic() + 10
            while ssl.get_server_certificate(address) == before:
                assert time.monotonic() < end
            answers = [client.post("/v1/completions", json=BODY)]
        answers.append(httpx.post(f"{made.url}/v1/completions", json=BODY, timeout=60, verify=trust))
        assert [each.json()["choices"] for each in answers] == [first.json()["choices"]] * 2
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(30) == 0
    finally:
        made.process.kill()
        made.process.wait()
        if made.process.stderr is not None:
            made.process.stderr.close()
