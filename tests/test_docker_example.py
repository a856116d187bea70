"""The Dockerfile and `examples/docker`: linters; commands, files and secrets fit together. No image is built."""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from longctx import extras
from longctx.cli import command_parser
from longctx.cli.config_file import config_arguments
from longctx.cli.serve_settings import check_join_flags, check_transfer_flags, serve_config
from longctx.cluster.config import read_cluster

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "docker"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
ENGINES = ("prefill-1", "prefill-2", "decode-1", "decode-2")


def instructions(name: str) -> list[str]:
    """Arguments of an instruction of the Dockerfile, wherever it stands."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLE / "compose.yaml").read_text(encoding="utf-8"))
    return found


def parse(name: str) -> argparse.Namespace:
    """The flags of a service, with those of its `--config` file as it lies beside compose.yaml."""
    service = compose()["services"][name]
    first, *arguments = service["command"]
    assert first == "serve"
    config = EXAMPLE / mounted(service)[arguments[arguments.index("--config") + 1]]
    arguments = arguments[2:]
    return command_parser("serve").parse_args(
        [*config_arguments(command_parser("serve"), config, arguments), *arguments]
    )


def bind_mounts(service: dict[str, Any]) -> list[str]:
    return [each for each in service["volumes"] if each.startswith("./")]


def mounted(service: dict[str, Any]) -> dict[str, str]:
    """Files of the example by where the container has them."""
    return {target: source for source, target, _ in (each.split(":") for each in bind_mounts(service))}


# The image


def test_the_linter_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint is not None, "it comes with the extra test"
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_runs_as_nobody_special_and_tells_its_health() -> None:
    assert instructions("USER") == ["${UID}"]
    assert "UID=1000" in instructions("ARG")
    [health] = instructions("HEALTHCHECK")
    [entry], [command] = instructions("ENTRYPOINT"), instructions("CMD")
    assert yaml.safe_load(entry) == ["longctx"]
    options = command_parser("serve").parse_args(yaml.safe_load(command)[1:])
    assert f"127.0.0.1:{options.port}/health" in health
    assert instructions("EXPOSE") == [str(options.port)]
    program = yaml.safe_load(health[health.index("[") :])
    assert program[:2] == ["python", "-c"]
    compile(program[2], "healthcheck", "exec")


def test_the_extras_of_the_image_exist() -> None:
    arguments = dict(each.split("=") for each in instructions("ARG") if "=" in each)
    assert set(arguments["EXTRAS"].strip('"').split(",")) <= extras.EXTRAS.keys()
    for name in re.findall(r"ACCELERATOR=(\w+)", DOCKERFILE + (EXAMPLE / "README.md").read_text(encoding="utf-8")):
        assert name in extras.EXTRAS
    assert not re.search(r"(?i)secret|token|password", "\n".join(instructions("ENV") + instructions("ARG")))


def test_what_is_sent_to_the_builder_is_enough_for_a_wheel(tmp_path: Path) -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    ignored = [line for line in lines if not line.startswith("#")]
    assert ignored[0] == "*"
    sent = [line[1:] for line in ignored if line.startswith("!")]
    copied = {name for each in instructions("COPY") for name in each.split()[:-1]} - {"."}
    assert copied <= {*sent}
    source = tmp_path / "source"
    source.mkdir()
    for name in sent:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, source / name)
    command = ["-W", "ignore", "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(source)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.glob("*.whl")
    assert path.stat().st_size < 8e6, "a small layer"


# The cluster


def test_the_compose_file_is_one() -> None:
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(EXAMPLE / "compose.yaml")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_and_secrets_that_flags_name_are_mounted() -> None:
    found = compose()
    assert [*found["services"]] == ["router", *ENGINES]
    for name, service in found["services"].items():
        for mount in bind_mounts(service):
            source, _, mode = mount.split(":")
            assert (EXAMPLE / source).is_file()
            assert mode == "ro"
        options = parse(name)
        named = [options.api_key_file, options.admin_key_file, options.kv_secret_file]
        named += [options.instance_key_file if name == "router" else options.join_key_file]
        assert [str(path) for path in named] == [
            f"/run/secrets/{key}" for key in ("clients", "cluster", "pages", "cluster")
        ]
        assert set(service["secrets"]) == found["secrets"].keys()
    ignored = (EXAMPLE / ".gitignore").read_text(encoding="utf-8").split()
    assert all(secret["file"].startswith("./secrets/") for secret in found["secrets"].values())
    assert "secrets/" in ignored


def test_containers_can_do_little_beside_serving() -> None:
    for name, service in compose()["services"].items():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "environment" not in service, "secrets are files"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert ("ports" in service) == (name == "router")
        grace = int(service["stop_grace_period"].removesuffix("s"))
        assert grace > parse(name).shutdown_timeout


@pytest.mark.parametrize("name", ENGINES)
def test_engines_join_the_router(name: str) -> None:
    options, router = parse(name), parse("router")
    check_join_flags(argparse.Namespace(**vars(options) | {"join_key_file": None}))
    check_transfer_flags(options)
    assert options.join == [f"router:{router.port}"]
    assert options.join_name == options.kv_advertise == name
    assert name.startswith(options.join_role)
    assert options.join_url == f"http://{name}:{options.port}"
    assert sorted(options.kv_peer) == sorted(ENGINES)
    options.kv_secret_file = None
    assert serve_config(options).page_size == options.page_size


def test_the_router_knows_the_pages_of_the_engines() -> None:
    router, engine = parse("router"), parse("decode-1")
    found = read_cluster(EXAMPLE / mounted(compose()["services"]["router"])[str(router.cluster)])
    assert found.launcher == "static"
    for name, value in found.engine.items():
        assert getattr(engine, name.replace("-", "_")) == value
    assert not engine.heeds_deadlines
    assert engine.kv_events
    assert engine.kv_events_replay
    assert router.host == engine.host == "0.0.0.0"
