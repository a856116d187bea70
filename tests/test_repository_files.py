"""Files that hosts of repositories and indexes read: README.md, workflows, CITATION.cff and CHANGELOG.md."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

import longctx

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# A command of pip or uv that names `longctx`, with or without extras: on the package index that is another project.
INSTALLS = re.compile(rb"""\b(pip3?|uv|uvx|pipx) (add|install|run)\b[^\n|;#]*?[ '"]longctx(\[[\w,]+\])?(?![\w/.*-])""")


def test_no_text_installs_the_package_of_the_same_name() -> None:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.splitlines()] if listed.returncode == 0 else [*ROOT.rglob("*.*")]
    assert INSTALLS.search(b"pip install 'long" + b"ctx[serve]'")
    assert not INSTALLS.search(b"pip install 'longctx-jax[serve]'")
    texts = [file for file in files if file.is_file() and ".venv" not in file.parts]
    assert [file.name for file in texts if INSTALLS.search(file.read_bytes())] == []


def test_ci_tests_files_that_exist() -> None:
    (listing,) = re.findall(r'TESTS="\$\((echo [^)]*)\)"', (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    files = subprocess.run(["bash", "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(files) > 50
    assert [file for file in files if not (ROOT / file).exists()] == []


def check(schema: str, *paths: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_keep_their_schema_may_only_read_and_name_commits() -> None:
    check("github-workflows", *WORKFLOWS)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for workflow in [yaml.safe_load(path.read_text(encoding="utf-8")) for path in WORKFLOWS]:
        assert workflow["permissions"] == {"contents": "read"}
        for step in [step for job in workflow["jobs"].values() for step in job["steps"]]:
            assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
            targets = re.findall(r"^make (\w+)", step.get("run", ""), re.MULTILINE)
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_citation_and_changelog_are_of_this_version() -> None:
    path = ROOT / "CITATION.cff"
    check("citation-file-format", path)
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert found["version"] == longctx.__version__
    cited = {re.sub(r"v\d+$", "", each["identifiers"][0]["value"]) for each in found["references"]}
    assert cited == set(re.findall(r"arXiv:[\d.]+\d", README))
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert longctx.__version__ == next(each for each in headings if each != "Unreleased")
