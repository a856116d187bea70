"""`examples/llama3_server`: its commands are ones that `longctx serve` takes, and its times fit together."""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from serve_process import free_port

from longctx.cli import command_parser
from longctx.cli.config_file import config_arguments

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "llama3_server"
SCRIPTS = ("one_host.sh", "two_processes.sh", "longctx.sbatch")
CONFIG = EXAMPLE / "server.toml"


def parser() -> argparse.ArgumentParser:
    made = command_parser("serve")
    made.exit_on_error = False
    return made


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags of a command, with those of `server.toml` if it names it."""
    options = parser().parse_args(arguments)
    if options.config is not None:
        assert options.config.name == CONFIG.name
        options = parser().parse_args([*config_arguments(parser(), CONFIG, arguments), *arguments])
    return options


def arguments_of(text: str) -> list[str]:
    """What follows `longctx serve` in a shell's or a unit's text; variables are numbers."""
    text = text.replace("\\\n", " ")
    line = next(line for line in text.splitlines() if re.search(r"\S+ serve --", line) and not line.startswith("#"))
    words = shlex.split(re.sub(r"\$\{?\w+(:-\d+)?\}?", "3", line[line.index(" serve --") :].replace('"$@"', "")))
    return words[1 : words.index("&") if "&" in words else None]


def manifests() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((EXAMPLE / "longctx.yaml").read_text(encoding="utf-8"))
    return {document["kind"]: document for document in documents}


def pod(kind: str) -> dict[str, Any]:
    """The specification of the pods of a role: "leader" or "worker"."""
    return manifests()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"][f"{kind}Template"]["spec"]


def command_of(kind: str) -> list[str]:
    [container] = pod(kind)["containers"]
    [script] = container["args"]
    assert script.startswith("exec longctx serve ")  # so that it gets the signals itself
    return arguments_of(script)


def seconds(text: str, name: str) -> int:
    found = re.search(rf"^{name}=(\d+)$", text, re.MULTILINE)
    assert found
    return int(found[1])


@pytest.mark.parametrize("name", [*SCRIPTS, "longctx.service"])
def test_commands_have_flags_that_exist(name: str) -> None:
    options = parse(arguments_of((EXAMPLE / name).read_text(encoding="utf-8")))
    assert options.tensor > 1
    # Whoever lets others in has keys.
    assert (options.host == "127.0.0.1") == (name == "two_processes.sh")
    assert (options.api_key_file is None) == (name == "two_processes.sh")


def test_leader_and_worker_run_the_same_command() -> None:
    assert command_of("leader") == command_of("worker")
    options = parse(command_of("leader"))
    size = manifests()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"]
    gpus = pod("leader")["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert size * gpus == options.stage * options.context * options.tensor
    assert options.api_key_file.parent == Path("/etc/longctx-keys")


def test_mounts_ports_and_labels_meet() -> None:
    options, found = parse(command_of("leader")), manifests()
    for kind in ("leader", "worker"):
        [container] = pod(kind)["containers"]
        volumes = {volume["name"] for volume in pod(kind)["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert options.coordinator.endswith(f":{ports['coordinator']}")
    [leader] = pod("leader")["containers"]
    assert {port["containerPort"] for port in leader["ports"] if port["name"] == "http"} == {options.port}
    service = found["Service"]["spec"]
    assert service["ports"][0]["targetPort"] == "http"
    labels = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
    assert service["selector"]["role"] == labels["role"]
    assert service["selector"]["leaderworkerset.sigs.k8s.io/name"] == found["LeaderWorkerSet"]["metadata"]["name"]


def test_probes_ask_what_the_server_answers() -> None:
    from longctx.serving.server.auth import OPEN_PATHS

    [leader], [worker] = pod("leader")["containers"], pod("worker")["containers"]
    asked = {kind: leader[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert asked == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    assert set(asked.values()) <= OPEN_PATHS  # as probes send no key
    assert not any(name.endswith("Probe") for name in worker)  # followers serve no HTTP


def test_whatever_kills_waits_for_requests_to_finish() -> None:
    timeout = parse(["--config", str(CONFIG)]).shutdown_timeout
    for kind in ("leader", "worker"):
        command = pod(kind)["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command[0] == "sleep"
        assert pod(kind)["terminationGracePeriodSeconds"] >= int(command[1]) + timeout + 15
    unit = (EXAMPLE / "longctx.service").read_text(encoding="utf-8")
    assert seconds(unit, "TimeoutStopSec") >= timeout + 15
    batch = (EXAMPLE / "longctx.sbatch").read_text(encoding="utf-8")
    early = re.search(r"--signal=TERM@(\d+)", batch)
    assert early
    assert int(early[1]) >= timeout + 15


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_of_plain_sh(name: str) -> None:
    script = EXAMPLE / name
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0
    assert os.access(script, os.X_OK) == name.endswith(".sh")


def test_every_file_is_in_the_readme() -> None:
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))
    assert listed == {path.name for path in EXAMPLE.iterdir()} - {"README.md"}


@pytest.mark.slow
def test_two_processes_serve_until_they_are_told_to_end() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    port = free_port()
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "PORT": str(port)}
    environment.pop("LONGCTX", None)
    command = [shutil.which("sh") or "sh", str(EXAMPLE / "two_processes.sh")]
    sizes = ["--max-length", "1024", "--token-budget", "64", "--buckets", "64", "--max-running", "4"]
    model = str(ROOT / "longctx" / "models" / "tiny")
    with subprocess.Popen([*command, model, *sizes], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            until_ready(f"http://127.0.0.1:{port}/ready", process)
            prompt = "The pass key of lemon is 48213. The old road crossed the field."
            prompt += "\\nQ: What is the pass key of lemon?\\nA: "
            body = f'{{"prompt": "{prompt}", "max_tokens": 8, "temperature": 0}}'.encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert '"48213"' in answer.read().decode()
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
        finally:
            process.terminate()


def until_ready(url: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        assert process.poll() is None
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError("it is not ready")
