"""README.md and its neighbours say what is so: badges, the lines before the links, files that are named."""

import re
import subprocess
import tomllib
from pathlib import Path

import longctx

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# A command of pip or uv that names `longctx`, with or without extras.
_INSTALLS = re.compile(rb"""\b(pip3?|uv|uvx|pipx) (add|install|run)\b[^\n|;#]*?[ '"]longctx(\[[\w,]+\])?(?![\w/.*-])""")


def badge(subject: str) -> str:
    """The text of the badge of a subject, as it is shown."""
    (text,) = re.findall(rf"img\.shields\.io/badge/{subject}-((?:[^-\s]|--)+)-", README)
    return str(text).replace("_", " ").replace("--", "-")


def test_badges_say_what_the_metadata_say() -> None:
    versions = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert badge("python") == f"{versions[0]} to {versions[-1]}"
    assert PROJECT["requires-python"] == f">={versions[0]}"
    (jax,) = [line for line in PROJECT["dependencies"] if line.startswith("jax>=")]
    bounds = re.fullmatch(r"jax>=0\.(\d+)\S*,<0\.(\d+)", jax)
    assert bounds is not None
    assert badge("jax") == f"0.{bounds[1]} to 0.{int(bounds[2]) - 1}"
    assert badge("licence") == PROJECT["license"]


def test_badge_of_gpus_agrees_with_limitations() -> None:
    assert badge("GPU") == "not yet run on one"
    assert "Nothing has run on a GPU yet" in README.split("## Limitations")[1]


def test_the_first_thirty_lines_come_before_the_links() -> None:
    lines = README.splitlines()
    table = next(i for i, line in enumerate(lines) if line.startswith("| you want to"))
    text = [line for line in lines[:table] if line]
    assert len(text) <= 30
    head = "\n".join(text)
    for needed in ("pip install", "make demo", "make test", "```python", ".svg)"):
        assert needed in head


def test_files_that_are_named_exist() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
        missing = [link for link in links if not (ROOT / link).exists()]
        assert missing == [], page


def test_steps_that_install_take_a_clone() -> None:
    """The package is not on an index: the name alone adds extras where longctx is installed, and finds nothing else."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    by_name = rf"^pip install .*{PROJECT['name']}"
    assert [page.name for page in pages if re.search(by_name, page.read_text(encoding="utf-8"), re.MULTILINE)] == []


def test_no_text_installs_the_package_of_the_same_name() -> None:
    """`longctx` on the package index is another project, and ours is called `longctx-jax`."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.splitlines()] if listed.returncode == 0 else [*ROOT.rglob("*.*")]
    assert _INSTALLS.search(b"pip install 'long" + b"ctx[serve]'")
    assert _INSTALLS.search(b"uv pip install -q long" + b"ctx jax")
    assert not _INSTALLS.search(b"pip install 'longctx-jax[serve]'")
    texts = [file for file in files if file.is_file() and ".venv" not in file.parts]
    assert len(texts) > 500
    found = [str(file.relative_to(ROOT)) for file in texts if _INSTALLS.search(file.read_bytes())]
    assert found == []


def test_changelog_begins_with_this_version() -> None:
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest == longctx.__version__
