"""Files of `examples/` and the Dockerfile: commands have flags that exist, and names, ports and times fit together."""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from serve_process import free_port, wait_until_ready

from longctx import extras
from longctx.cli import command_parser
from longctx.cli.config_file import config_arguments
from longctx.cli.serve_cluster import Secrets, engine_arguments, instance_arguments
from longctx.cli.serve_settings import check_join_flags, check_transfer_flags, serve_config
from longctx.cluster.config import read_cluster
from longctx.serving.kv_cache.secret import SecretFiles
from longctx.serving.server.auth import OPEN_PATHS
from longctx.serving.server.settings import is_loopback

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path for suffix in ("*.sh", "*.sbatch", "*.service") for path in EXAMPLES.glob(f"*/{suffix}"))
MANIFESTS = [EXAMPLES / name / "longctx.yaml" for name in ("cluster", "llama3_server")]
TOML = sorted(path for name in ("cluster", "docker", "llama3_server") for path in (EXAMPLES / name).glob("*.toml"))
COMPOSE = EXAMPLES / "docker" / "compose.yaml"


def parse(folder: Path, arguments: list[str], is_whole: bool = True) -> argparse.Namespace:
    """Return the flags of `longctx serve`, with those of the file in the folder that `--config` names."""
    parser = command_parser("serve")
    options = parser.parse_args(arguments)
    if options.config is not None:
        file = folder / options.config.name
        options = parser.parse_args([*config_arguments(parser, file), *arguments])
    options.kv_secret_file = options.join_key_file = None  # files that users make
    if options.join and is_whole:
        check_transfer_flags(argparse.Namespace(**vars(options) | {"kv_secret_file": Path("secret")}))
        check_join_flags(options)
    return options


def commands_of(path: Path) -> list[argparse.Namespace]:
    """Return the flags of the `longctx serve` of a script; variables are hosts, roles and numbers."""
    text = re.sub(r"^ *#.*$", "", path.read_text(encoding="utf-8").replace("\\\n", " "), flags=re.MULTILINE)
    plans = re.findall(r'\bplan="(.*)"$', text, re.MULTILINE) or [""]
    found = []
    for line in re.findall(r"\S+ serve (-.*)$", text, re.MULTILINE):
        for plan in plans:
            words = line.replace('"$@"', "").replace("$PEERS", "").replace("$plan", plan)
            words = re.sub(r"\$role\b", "decode", words)
            words = re.sub(r"\$\(\(.*?\)\)|\$\{\w+:-\d+\}", "3", words)
            words = re.sub(r"(--(process-id|num-processes|port)[ =])\S+", r"\g<1>3", words)
            split = shlex.split(re.sub(r"\$(\w+|\{\w+\})", "host", words))
            found.append(parse(path.parent, split[: split.index("&")] if "&" in split else split))
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_scripts_have_flags_that_exist(path: Path) -> None:
    commands = commands_of(path)
    assert bool(commands) == (path.parent.name != "multi_host")
    for options in commands:
        is_open = not is_loopback(options.host) and options.host != "host"
        assert not is_open or options.api_key_file, "a server that lets others in has keys"
        if options.cluster is not None:
            read_cluster(path.parent / options.cluster.name, options.launcher)


@pytest.mark.parametrize("path", TOML, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_of_flags_and_of_clusters_are_read(path: Path, tmp_path: Path) -> None:
    if not re.search(r"^\[", path.read_text(encoding="utf-8"), re.MULTILINE):
        assert serve_config(parse(path.parent, ["--config", str(path)], is_whole=False))
        return
    file = read_cluster(path)
    arguments = instance_arguments(engine_arguments("", file.engine), Secrets.make(SecretFiles(), None), [])
    config = serve_config(parse(path.parent, arguments))
    own = path.with_name("engine.toml")
    if file.launcher == "static":  # of engines that run already: router and engines must have the same pages
        options = parse(path.parent, ["--config", str(own)], is_whole=False)
        assert (config.page_size, config.max_length) == (options.page_size, options.max_length)
        assert options.kv_events
        assert options.kv_events_replay
        assert not options.heeds_deadlines


def templates(path: Path) -> dict[str, dict[str, Any]]:
    """Return the pods of each workload of a manifest; of process groups, leader and worker."""
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    found = {}
    for each in documents[0].get("items", documents):
        name, spec = each["metadata"]["name"], each["spec"]
        if each["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            found |= {name: group["leaderTemplate"], f"{name}-worker": group["workerTemplate"]}
            [leader] = group["leaderTemplate"]["spec"]["containers"]
            [worker] = group["workerTemplate"]["spec"]["containers"]
            assert leader["args"] == worker["args"], "all processes of a group have one command"
            options = of_container(path, leader)
            gpus = group["size"] * leader["resources"]["limits"]["nvidia.com/gpu"]
            assert gpus == options.stage * options.context * options.tensor
        elif "template" in spec:
            found[name] = spec["template"]
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    return found


def of_container(path: Path, container: dict[str, Any]) -> argparse.Namespace:
    [text] = container["args"]
    assert text.startswith("exec longctx serve ")  # so that it gets the signals itself
    script = path.parent / "container"
    words = text.replace("\\\n", " ").removeprefix("exec longctx serve ")
    words = re.sub(r"\$\(\(.*?\)\)|\$\(?LWS_(GROUP_SIZE|WORKER_INDEX)\)?", "1", words)
    return parse(script.parent, shlex.split(re.sub(r"\$(\w+|\{\w+\}|\(\w+\))", "host", words)))


def test_instances_of_a_cluster_are_reached_by_routers_and_instances_alone() -> None:
    path = ROOT / "examples/cluster/longctx.yaml"
    items = yaml.safe_load(path.read_text(encoding="utf-8"))["items"]
    [policy] = [each["spec"] for each in items if each["kind"] == "NetworkPolicy"]
    assert policy["podSelector"]["matchLabels"] == {"app": "longctx"}
    sources = [source["podSelector"]["matchLabels"]["app"] for rule in policy["ingress"] for source in rule["from"]]
    assert sources == ["longctx-router", "longctx"]
    opened = {
        port
        for each in policy["ingress"][0]["ports"]
        for port in range(each["port"], each.get("endPort", each["port"]) + 1)
    }
    [decode] = templates(path)["longctx-decode"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in decode["ports"]}
    assert opened == {ports["http"], ports["kv-events"], ports["kv-replay"]}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.parent.name)
def test_pods_have_probes_mounts_and_times_that_fit(path: Path) -> None:
    for name, template in templates(path).items():
        pod = template["spec"]
        [container] = pod["containers"]
        found = of_container(path, container)
        asked = {container[key]["httpGet"]["path"] for key in container if key.endswith("Probe")}
        assert bool(asked) != name.endswith("-worker")  # which serves no HTTP
        assert asked <= OPEN_PATHS  # as probes send no key
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] >= wait + found.shutdown_timeout + 15


@pytest.mark.parametrize("name", ["cluster", "llama3_server", "multi_host"])
def test_manifests_are_valid_and_pods_have_no_more_rights_than_they_need(name: str) -> None:
    """By the schemas of Kubernetes; those of the sets of leaders and workers are not among them."""
    documents = list(yaml.safe_load_all((EXAMPLES / name / "longctx.yaml").read_text(encoding="utf-8")))
    documents = documents[0].get("items", documents)
    pods = 0
    for document in documents:
        if "leaderworkerset" not in document["apiVersion"]:
            kubernetes_validate.validate(document, "1.31", strict=True)
        for pod in pods_of(document):
            pods += 1
            [user] = re.findall(r"^ARG UID=(\d+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
            rights = pod["securityContext"]
            assert rights["runAsNonRoot"]
            assert rights["runAsUser"] == rights["fsGroup"] == int(user)  # by the group, secrets can be read
            for container in pod["containers"]:
                rights = container["securityContext"]
                assert not rights["allowPrivilegeEscalation"]
                assert rights["capabilities"] == {"drop": ["ALL"]}
    assert pods
    assert "NetworkPolicy" in {document["kind"] for document in documents}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(documents[0] | {"spec": {"ports": "http"}}, "1.31", strict=True)


def pods_of(part: Any) -> Iterator[dict[str, Any]]:
    """Return the pods of a workload."""
    if isinstance(part, dict):
        if "containers" in part:
            yield part
        for each in part.values():
            yield from pods_of(each)


def test_the_image_is_of_extras_that_exist() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint is not None, "it comes with the extra test"
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    [names] = re.findall(r"^ARG EXTRAS=(\S+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(names.strip('"').split(",")) <= extras.EXTRAS.keys()


def test_containers_of_the_compose_file_find_files_and_secrets() -> None:
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    services, options, used = found["services"], {}, set[str]()
    for name, service in services.items():
        mounts = [each.split(":") for each in service["volumes"] if each.startswith("./")]
        assert all(mode == "ro" and (COMPOSE.parent / source).is_file() for source, _, mode in mounts)
        files = {target: COMPOSE.parent / source for source, target, _ in mounts}
        first, *arguments = service["command"]
        assert first == "serve"
        options[name] = parse(files[arguments[arguments.index("--config") + 1]].parent, arguments)
        assert str(options[name].config) in files
        mounted = {each if isinstance(each, str) else each["target"] for each in service["secrets"]}
        given = vars(options[name]).items()
        named = {value for field, value in given if field.endswith("_key_file") or field == "kv_secret_file"}
        assert {f"/run/secrets/{each}" for each in mounted} >= {str(each) for each in named - {None}}
        used |= {each if isinstance(each, str) else each["source"] for each in service["secrets"]}
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert int(service["stop_grace_period"].removesuffix("s")) > options[name].shutdown_timeout
    assert used == found["secrets"].keys()
    assert ["ports" in service for service in services.values()] == [True] + [False] * (len(options) - 1)


@pytest.mark.slow
def test_two_processes_answer() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command, environment = ["sh", str(EXAMPLES / "multi_host" / "two_processes.sh")], os.environ | {"PATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert "48213" in done.stdout


@pytest.mark.slow
def test_two_processes_serve_until_they_are_told_to_end() -> None:
    path, port = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", free_port()
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "PORT": str(port)}
    environment.pop("LONGCTX", None)
    command = ["sh", str(EXAMPLES / "llama3_server" / "two_processes.sh"), str(ROOT / "longctx" / "models" / "tiny")]
    sizes = ["--max-length", "1024", "--token-budget", "64", "--buckets", "64", "--max-running", "4"]
    with subprocess.Popen([*command, *sizes], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
        finally:
            process.terminate()
