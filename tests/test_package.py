"""The distribution: its metadata, what the wheel and the sdist hold, and that they install and run elsewhere."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import longctx
from longctx import extras
from longctx.cli import COMMANDS

ROOT = Path(longctx.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOR_DEVELOPERS = {"aot", "test"}
# Of other Pythons than ours those that are on PATH, by a name such as python3.12, are tried too.
PYTHONS = [f"python3.{minor}" for minor in (11, 12, 13)]


def checkout_files() -> list[str]:
    """Files of the checkout that git would commit."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout of git")
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(name for name in names if name and (ROOT / name).is_file())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it, of a copy of the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in checkout_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-W", "ignore", "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def wheel(built: Path) -> Path:
    [path] = built.glob("*.whl")
    return path


def test_metadata_say_what_an_index_shows(built: Path) -> None:
    with zipfile.ZipFile(wheel(built)) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        found = email.message_from_bytes(archive.read(name))
    assert found["Name"] == extras.DISTRIBUTION == PROJECT["name"]
    assert found["Version"] == longctx.__version__
    links = re.findall(r"\]\(([^()\s]*)\)", str(found.get_payload()))
    assert links
    assert all(link.startswith("https://") for link in links), "the index has no files of the repository"


def test_the_wheel_has_the_package_alone(built: Path) -> None:
    with zipfile.ZipFile(wheel(built)) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name for name in checkout_files() if name.startswith("longctx/")}
    assert {
        "longctx/py.typed",
        "longctx/cluster/transfer/__init__.pyi",
        "longctx/models/tiny/model.safetensors",
    } < names
    assert "longctx/serving/server/page/index.html" in names


def test_the_sdist_has_the_checkout(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    made = {name for name in names if name in ("PKG-INFO", "setup.cfg") or name.startswith("longctx_jax.egg-info/")}
    assert names - made == {*checkout_files()}


def test_extras_are_those_that_messages_name() -> None:
    declared: dict[str, list[str]] = PROJECT["optional-dependencies"]
    assert declared.keys() - FOR_DEVELOPERS == extras.EXTRAS.keys()
    for name, extra in extras.EXTRAS.items():
        if name.startswith("cuda"):  # JAX's own extra has the plugin
            assert declared[name] == [f"jax[{name}]"]
            continue
        lines = [re.split(r"[\[><=!~]", line)[0] for line in declared[name] if not line.startswith(PROJECT["name"])]
        assert sorted(lines) == sorted(extra.packages.values()), name
        included = [part for line in declared[name] for part in re.findall(rf"^{PROJECT['name']}\[(.*)\]$", line)]
        assert tuple(part for parts in included for part in parts.split(",")) == extra.includes, name


@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_constraints_are_versions_that_the_package_takes(python: str) -> None:
    """Versions alone, of every package that is asked for by name, in the ranges of pyproject.toml."""
    lines = (ROOT / "constraints" / f"python{python}.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line) for line in lines)
    versions = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(versions) == len(lines)
    installed: dict[str, list[str]] = PROJECT["optional-dependencies"]
    names = ("distributed", "docs", "encryption", "gguf", "hub", "mooncake", "notebooks", "otlp", "plot", "serve")
    for line in [*PROJECT["dependencies"], *(line for name in (*names, "test") for line in installed[name])]:
        requirement = Requirement(line)
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), line


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_the_wheel_runs_in_an_empty_environment(built: Path, tmp_path: Path, python: str) -> None:
    found = sys.executable if sys.version_info[:2] == tuple(map(int, python[6:].split("."))) else shutil.which(python)
    if found is None or subprocess.run([found, "--version"], check=False, capture_output=True).returncode:
        pytest.skip(f"{python} is not on PATH")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    environment["LONGCTX_CACHE"] = str(tmp_path / "cache")

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run(found, "-m", "venv", "env")
    run("env/bin/pip", "install", "--quiet", str(wheel(built)))
    assert run("env/bin/longctx", "--version") == f"longctx {longctx.__version__}\n"
    for command in COMMANDS:
        assert "usage" in run("env/bin/longctx", command, "--help")
    assert "12 of 12" in run("env/bin/longctx", "demo")
    run("env/bin/python", "-c", "import longctx; [getattr(longctx, name) for name in longctx.__all__]")
    report = run("env/bin/longctx", "doctor")
    assert extras.pip_line("serve") in report
