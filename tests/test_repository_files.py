"""Files that hosts of repositories and indexes read: workflows and CITATION.cff."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import longctx

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in workflow(path)["jobs"].values() for step in job["steps"]]


def commands(path: Path) -> list[str]:
    return [step["run"] for step in steps(path) if "run" in step]


def check(schema: str, *paths: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_keep_their_schema() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "package"]
    check("github-workflows", *WORKFLOWS)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_only_read_and_name_versions(path: Path) -> None:
    assert workflow(path)["permissions"] == {"contents": "read"}
    for step in steps(path):
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "actions/checkout@v4"))
    for command in commands(path):
        assert subprocess.run(["bash", "-n"], input=command, text=True, check=False).returncode == 0
        targets = re.findall(r"^make (\w+)", command, re.MULTILINE)
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_workflows_run_what_ci_runs_on_each_python_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [re.search(r":: (3\.\d+)$", line) for line in project["classifiers"]]
    versions = [found[1] for found in named if found]
    ci, docs, package = WORKFLOWS
    assert "bash .ci/run" in commands(ci)
    assert (ROOT / ".ci" / "run").is_file()
    assert workflow(ci)["jobs"]["check"]["strategy"]["matrix"]["python"] == versions
    assert commands(docs) == ["make docs"]
    [setup] = [step for step in steps(package) if step.get("uses", "").startswith("actions/setup-python")]
    assert sorted(setup["with"]["python-version"].split()) == versions
    assert all(f"python{version} " in f"{' '.join(commands(package))} ".replace(";", " ") for version in versions)


def test_citation_is_valid_and_of_this_version() -> None:
    path = ROOT / "CITATION.cff"
    check("citation-file-format", path)
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert found["version"] == longctx.__version__
    assert found["authors"] == [{"name": "The longctx authors"}]
    assert found["license"] == "Apache-2.0"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    cited = {re.sub(r"v\d+$", "", each["identifiers"][0]["value"]) for each in found["references"]}
    assert cited == set(re.findall(r"arXiv:[\d.]+\d", readme))
