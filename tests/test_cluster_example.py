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

from longctx.cli.config_file import config_arguments
from longctx.cli.instance_command import Secrets, engine_arguments, instance_arguments, serve_parser
from longctx.cli.join_flags import check_join_flags
from longctx.cli.serve_flags import serve_config
from longctx.cli.transfer_flags import check_transfer_flags
from longctx.cluster.config import ClusterFile, read_cluster

EXAMPLE = Path(__file__).parent.parent / "examples" / "cluster"
SCRIPTS = ("one_machine.sh", "ray.sh", "instance.sh", "longctx.sbatch")


def arguments_of(text: str, nth: int = 0) -> list[str]:
    """What follows a `longctx serve` in a script; variables are a role's or a host's name."""
    text = re.sub(r"^#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    line = [line for line in text.splitlines() if "longctx serve " in line][nth]
    words = line[line.index("longctx serve ") + len("longctx serve ") :].replace('"$@"', "").replace("$PEERS", "")
    words = re.sub(r"\$(role|ROLE)\b", "decode", words)
    split = shlex.split(re.sub(r"\$(\w+|\{\w+\})", "host", words))
    return split[: split.index("&")] if "&" in split else split


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags, with those of the file that `--config` names."""
    options = serve_parser().parse_args(arguments)
    if options.config is not None:
        file = EXAMPLE / options.config.name
        options = serve_parser().parse_args([*config_arguments(serve_parser(), file, arguments), *arguments])
    return options


def script(name: str) -> str:
    return (EXAMPLE / name).read_text(encoding="utf-8")


def documents() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = yaml.safe_load(script("longctx.yaml"))["items"]
    return items


def containers() -> dict[str, dict[str, Any]]:
    """The container of each workload."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["containers"][0]
        for each in documents()
        if each["kind"] != "Service"
    }


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
    assert engine.ignore_deadlines
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
    instance = parse(arguments_of(script("instance.sh")))
    check_join_flags(argparse.Namespace(**vars(instance) | {"join_key_file": None}))
    check_transfer_flags(instance)
    router = parse(arguments_of(script("longctx.sbatch")))
    assert instance.join == [f"host:{router.port}"]
    assert instance.join_key_file == instance.admin_key_file == router.admin_key_file == router.instance_key_file
    assert instance.kv_secret_file == router.kv_secret_file


def test_pods_join_the_routers() -> None:
    found = containers()
    router = command_of(found["longctx-router"])
    for role in ("prefill", "decode"):
        container = found[f"longctx-{role}"]
        instance = command_of(container)
        check_transfer_flags(instance)
        assert {each["name"]: each.get("value") for each in container["env"]}["ROLE"] == role
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
    assert sets["longctx-router"]["spec"]["replicas"] == 2
    for service in (each for each in documents() if each["kind"] == "Service"):
        labels = sets["longctx-router"]["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()


def test_probes_and_mounts() -> None:
    from longctx.serving.server.gate import OPEN_PATHS

    for each in documents():
        if each["kind"] == "Service":
            continue
        pod = each["spec"]["template"]["spec"]
        [container] = pod["containers"]
        asked = {container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
        assert asked <= OPEN_PATHS  # as probes send no key
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert pod["volumes"][1]["secret"]["defaultMode"] == 0o400
        wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] >= wait + command_of(container).shutdown_timeout + 15
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert each["spec"]["selector"]["matchLabels"] == labels
