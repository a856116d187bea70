"""Prose: docstrings open with a verb or a noun, and neither they nor the documentation use words without a subject."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPENING = re.compile(r"(What|Who|Whoever|Whose|Nobody|Of|How|Where|When|So many)\b")
WORD = re.compile(r"\b(nobody|whoever|so many|in vain|doomed|heeds?|under way|vouch(es)?)\b", re.IGNORECASE)
# The words of pass keys' documents, and the label of a metric.
ALLOWED = {"longctx/models/passkey.py", "docs/metrics.md"}
MODULES = sorted(path for folder in ("longctx", "papers") for path in (ROOT / folder).rglob("*.py"))
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in ("results", "site")),
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def docstrings(path: Path) -> list[tuple[str, str]]:
    """Return names and docstrings of a module, its classes and its functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                found.append((getattr(node, "name", "module"), text))
    return found


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    wrong = [
        f"{name_of(path)}: {name}: {text.splitlines()[0]}"
        for path in MODULES
        for name, text in docstrings(path)
        if OPENING.match(text)
    ]
    assert wrong == []


def test_docstrings_name_their_subjects() -> None:
    wrong = [
        f"{name_of(path)}: {name}: {match[0]}"
        for path in MODULES
        if name_of(path) not in ALLOWED
        for name, text in docstrings(path)
        if (match := WORD.search(text))
    ]
    assert wrong == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_pages_name_their_subjects(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    wrong = [f"{number}: {line}" for number, line in enumerate(lines, 1) if WORD.search(line)]
    assert wrong == [] or name_of(path) in ALLOWED


def test_the_rules_find_what_they_forbid() -> None:
    assert OPENING.match("What a page holds.")
    assert not OPENING.match("Whatever a page holds.")
    assert WORD.search("Nobody waits.")
    assert not WORD.search("If `heeds_deadlines`, requests may be refused.")
