"""`examples/cluster`: its files are ones that `longctx serve` takes, and they fit together."""

import argparse
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from longctx.cli import command_parser
from longctx.cli.config_file import config_arguments
from longctx.cli.serve_cluster import Secrets, engine_arguments, instance_arguments
from longctx.cli.serve_settings import check_join_flags, check_transfer_flags, serve_config
from longctx.cluster.config import ClusterFile, read_cluster

EXAMPLE = Path(__file__).parent.parent / "examples" / "cluster"
SCRIPTS = ("one_machine.sh", "ray.sh", "instance.sh", "longctx.sbatch")


def arguments_of(text: str, nth: int = 0, plan: str = "") -> list[str]:
    """What follows a `longctx serve` in a script; variables are a role's or a host's name, a number, or `plan`."""
    text = re.sub(r"^#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    line = [line for line in text.splitlines() if "longctx serve " in line][nth]
    words = line[line.index("longctx serve ") + len("longctx serve ") :].replace('"$@"', "").replace("$PEERS", "")
    words = re.sub(r"\$role\b", "decode", words)
    words = words.replace("$plan", plan)
    words = re.sub(r"\$\(\(.*?\)\)|\$LWS_(GROUP_SIZE|WORKER_INDEX)\b", "1", words)
    split = shlex.split(re.sub(r"\$(\w+|\{\w+\})", "host", words))
    return split[: split.index("&")] if "&" in split else split


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags, with those of the file that `--config` names."""
    options = command_parser("serve").parse_args(arguments)
    if options.config is not None:
        file = EXAMPLE / options.config.name
        options = command_parser("serve").parse_args(
            [*config_arguments(command_parser("serve"), file, arguments), *arguments]
        )
    return options


def script(name: str) -> str:
    return (EXAMPLE / name).read_text(encoding="utf-8")


def documents() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = yaml.safe_load(script("longctx.yaml"))["items"]
    return items


def templates() -> dict[str, dict[str, Any]]:
    """The pods of each workload; of the process groups, leader and worker."""
    found = {}
    for each in documents():
        name, spec = each["metadata"]["name"], each["spec"]
        if each["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            found |= {name: group["leaderTemplate"], f"{name}-worker": group["workerTemplate"]}
        elif each["kind"] != "Service":
            found[name] = spec["template"]
    return found


def containers() -> dict[str, dict[str, Any]]:
    """The container of each workload."""
    return {name: template["spec"]["containers"][0] for name, template in templates().items()}


def command_of(container: dict[str, Any]) -> argparse.Namespace:
    [text] = container["args"]
    assert text.startswith("exec longctx serve ")  # so that it gets the signals itself
    return parse(arguments_of(text))


@pytest.mark.parametrize("name", ["cluster.toml", "static.toml", "ray.toml"])
def test_files_are_clusters(tmp_path: Path, name: str) -> None:
    found: ClusterFile = read_cluster(EXAMPLE / name)
    arguments = instance_arguments(engine_arguments("", found.engine), Secrets.make(tmp_path, None), [])
    config = serve_config(parse(arguments))
    assert config.transfers
    if name != "static.toml":
        assert (found.count("prefill"), found.count("decode")) == (2, 2)


def test_routers_and_instances_have_the_same_pages() -> None:
    engine = parse(["--config", str(EXAMPLE / "engine.toml")])
    found = read_cluster(EXAMPLE / "static.toml").engine
    assert (found["page-size"], found["max-length"]) == (engine.page_size, engine.max_length)
    assert not engine.heeds_deadlines
    assert engine.kv_events
    assert engine.kv_events_replay


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_of_plain_sh(name: str) -> None:
    assert subprocess.run(["sh", "-n", str(EXAMPLE / name)], check=False).returncode == 0
    assert os.access(EXAMPLE / name, os.X_OK) == name.endswith(".sh")


def test_scripts_have_flags_that_exist() -> None:
    for name in ("one_machine.sh", "ray.sh", "longctx.sbatch"):
        options = parse(arguments_of(script(name)))
        read_cluster(EXAMPLE / options.cluster.name, options.launcher)
        assert (options.api_key_file is None) == (name == "one_machine.sh"), "whoever lets others in has keys"
    plans = re.findall(r'\bplan="(.*)"$', script("instance.sh"), re.MULTILINE)
    router = parse(arguments_of(script("longctx.sbatch")))
    sizes = []
    for plan in plans:
        instance = parse(arguments_of(script("instance.sh"), plan=plan))
        check_join_flags(argparse.Namespace(**vars(instance) | {"join_key_file": None}))
        check_transfer_flags(instance)
        assert instance.join == [f"host:{router.port}"]
        assert instance.join_key_file == instance.admin_key_file == router.admin_key_file == router.instance_key_file
        assert instance.kv_secret_file == router.kv_secret_file
        sizes.append((instance.stage * instance.tensor, instance.num_processes, instance.coordinator))
    assert sizes == [(8, None, None), (16, 2, "host:9876")]  # 8 GPUs a host


@pytest.mark.parametrize(
    ("process", "role", "number", "more"),
    [
        (0, "prefill", 0, "--stage 2 --coordinator a:9876 --num-processes 2 --process-id 0"),
        (3, "prefill", 1, "--stage 2 --coordinator c:9876 --num-processes 2 --process-id 1"),
        (4, "decode", 0, ""),
        (5, "decode", 1, ""),
    ],
)
def test_each_host_knows_its_place(process: int, role: str, number: int, more: str, tmp_path: Path) -> None:
    """Two groups of two hosts, and two hosts by themselves."""
    program = tmp_path / "longctx"
    program.write_text('#!/bin/sh\necho "$@"\nkill -TERM "$PPID"\nsleep 0.2\n', encoding="utf-8")
    program.chmod(0o700)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_PROCID": str(process)}
    environment |= {"HOSTS": "\n".join("abcdef"), "MODEL": "m", "SECRETS": "s", "ROUTER": "r", "PEERS": "--kv-peer=a"}
    command = ["sh", str(EXAMPLE / "instance.sh")]
    done = subprocess.run(command, env=environment, cwd=EXAMPLE, capture_output=True, text=True, timeout=30)
    assert f" --tensor 8 {more}".rstrip() + " --host 0.0.0.0 " in done.stdout
    assert f" --join r:8080 --join-role {role} --join-name {role}-{number} " in done.stdout


def test_pods_join_the_routers() -> None:
    found = containers()
    router = command_of(found["longctx-router"])
    assert found["longctx-prefill"]["args"] == found["longctx-prefill-worker"]["args"]
    for role in ("prefill", "decode"):
        container = found[f"longctx-{role}"]
        instance = command_of(container)
        check_transfer_flags(instance)
        assert instance.join_role == role
        assert instance.join == [f"longctx-router-{i}.longctx-router:{router.port}" for i in range(2)]
        assert instance.join_key_file == instance.admin_key_file == router.admin_key_file == router.instance_key_file
        assert instance.kv_secret_file == router.kv_secret_file
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports["http"] == instance.port
        assert instance.join_url.endswith(f":{instance.port}")
        assert ports["kv"] == instance.kv_port
        assert instance.kv_events.endswith(f":{ports['kv-events']}")
        assert instance.kv_events_replay.endswith(f":{ports['kv-replay']}")
    sets = {each["metadata"]["name"]: each for each in documents() if each["kind"] != "Service"}
    assert [each["spec"]["replicas"] for each in sets.values()] == [2, 2, 2]
    leader, worker = (found[f"longctx-prefill{which}"] for which in ("", "-worker"))
    prefill, size = command_of(leader), sets["longctx-prefill"]["spec"]["leaderWorkerTemplate"]["size"]
    gpus = leader["resources"]["limits"]["nvidia.com/gpu"]
    assert prefill.stage * prefill.context * prefill.tensor == size * gpus
    ports = {each["name"]: each["containerPort"] for each in worker["ports"]}
    assert ports["kv"] == prefill.kv_port
    assert prefill.coordinator.endswith(f":{ports['coordinator']}")
    assert "LONGCTX_GROUP_SECRET" in {each["name"] for each in worker["env"]}
    for service in (each for each in documents() if each["kind"] == "Service"):
        labels = sets["longctx-router"]["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()


def test_probes_and_mounts() -> None:
    from longctx.serving.server.auth import OPEN_PATHS

    for name, template in templates().items():
        pod = template["spec"]
        [container] = pod["containers"]
        asked = {container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
        assert bool(asked) != name.endswith("-worker")  # which serves no HTTP
        assert asked <= OPEN_PATHS  # as probes send no key
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert pod["volumes"][1]["secret"]["defaultMode"] == 0o400
        wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] >= wait + command_of(container).shutdown_timeout + 15
    for each in documents():
        if "template" in each["spec"]:
            assert each["spec"]["selector"]["matchLabels"] == each["spec"]["template"]["metadata"]["labels"]
