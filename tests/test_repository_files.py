"""Files that hosts of repositories and indexes read: README.md, workflows, CITATION.cff and CHANGELOG.md."""

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
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSIONS = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# A command of pip or uv that names `longctx`, with or without extras: on the package index that is another project.
INSTALLS = re.compile(rb"""\b(pip3?|uv|uvx|pipx) (add|install|run)\b[^\n|;#]*?[ '"]longctx(\[[\w,]+\])?(?![\w/.*-])""")


def badge(subject: str) -> str:
    """Return the text of the badge of a subject, as it is shown."""
    (text,) = re.findall(rf"img\.shields\.io/badge/{subject}-((?:[^-\s]|--)+)-", README)
    return str(text).replace("_", " ").replace("--", "-")


def test_badges_say_what_the_metadata_say() -> None:
    assert badge("python") == f"{VERSIONS[0]} to {VERSIONS[-1]}"
    (jax,) = [line for line in PROJECT["dependencies"] if line.startswith("jax>=")]
    bounds = re.fullmatch(r"jax>=0\.(\d+)\S*,<0\.(\d+)", jax)
    assert bounds is not None
    assert badge("jax") == f"0.{bounds[1]} to 0.{int(bounds[2]) - 1}"
    assert badge("licence") == PROJECT["license"]


def test_links_of_the_root_s_pages_lead_to_files() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
        assert [link for link in links if not (ROOT / link).exists()] == [], page


def test_no_text_installs_the_package_of_the_same_name() -> None:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.splitlines()] if listed.returncode == 0 else [*ROOT.rglob("*.*")]
    assert INSTALLS.search(b"pip install 'long" + b"ctx[serve]'")
    assert not INSTALLS.search(b"pip install 'longctx-jax[serve]'")
    texts = [file for file in files if file.is_file() and ".venv" not in file.parts]
    assert [file.name for file in texts if INSTALLS.search(file.read_bytes())] == []


def workflow(path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def test_ci_tests_files_that_exist() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (listing,) = re.findall(r'TESTS="\$\((echo [^)]*)\)"', script)
    files = subprocess.run(["bash", "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(files) > 50
    assert [file for file in files if not (ROOT / file).exists()] == []


def check(schema: str, *paths: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_keep_their_schema() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "package"]
    check("github-workflows", *WORKFLOWS)
    assert workflow(WORKFLOWS[0])["jobs"]["check"]["strategy"]["matrix"]["python"] == VERSIONS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_only_read_and_name_versions(path: Path) -> None:
    assert workflow(path)["permissions"] == {"contents": "read"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for step in [step for job in workflow(path)["jobs"].values() for step in job["steps"]]:
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "actions/checkout@v4"))
        command = step.get("run", "")
        assert subprocess.run(["bash", "-n"], input=command, text=True, check=False).returncode == 0
        targets = re.findall(r"^make (\w+)", command, re.MULTILINE)
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_citation_and_changelog_are_of_this_version() -> None:
    path = ROOT / "CITATION.cff"
    check("citation-file-format", path)
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert found["version"] == longctx.__version__
    cited = {re.sub(r"v\d+$", "", each["identifiers"][0]["value"]) for each in found["references"]}
    assert cited == set(re.findall(r"arXiv:[\d.]+\d", README))
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == longctx.__version__
