"""Prose: docstrings open with a verb or a noun, and neither they nor the documentation use words without a subject."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
OPENING = re.compile(r"(What|Who|Whoever|Whose|Nobody|Of|How|Where|When|So many)\b")
WORD = re.compile(r"\b(nobody|whoever|so many|in vain|doomed|heeds?|under way|vouch(es)?)\b", re.IGNORECASE)
# The words of pass keys' documents, and the label of a metric.
ALLOWED = {"longctx/models/passkey.py", "docs/metrics.md"}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_docstrings_open_with_a_verb_or_a_noun_and_name_their_subjects() -> None:
    wrong = []
    for path in sorted(path for folder in ("longctx", "papers") for path in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = (ast.get_docstring(node, clean=False) or "") if isinstance(node, DOCUMENTED) else ""
            if OPENING.match(text.lstrip()) or (WORD.search(text) and name not in ALLOWED):
                wrong.append(f"{name}: {text.splitlines()[0]}")
    assert wrong == []


def test_pages_name_their_subjects() -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in ("results", "site")]
    wrong = [
        f"{page.name}: {line}"
        for page in (ROOT / "README.md", *pages)
        if page.relative_to(ROOT).as_posix() not in ALLOWED
        for line in page.read_text(encoding="utf-8").splitlines()
        if WORD.search(line)
    ]
    assert wrong == []


def test_the_rooms_of_the_engine_s_page_have_its_files() -> None:
    text = (ROOT / "docs/engine.md").read_text(encoding="utf-8").partition("## Who does what")[2]
    rows = re.findall(r"^\|(.*?)\| (`.*?) \|", text, re.MULTILINE)
    room, missing = "", []
    for title, files in rows:
        room = title.strip(" `") or room
        folder = ROOT / "longctx" / "serving" / room.removeprefix("beside them")
        missing += [
            f"{room}{file}" for file in re.findall(r"`([\w/]+\.py|\w+/)`", files) if not (folder / file).exists()
        ]
    assert len(rows) > 20
    assert missing == []


def test_the_rules_find_what_they_forbid() -> None:
    assert OPENING.match("What a page holds.")
    assert not OPENING.match("Whatever a page holds.")
    assert WORD.search("Nobody waits.")
    assert not WORD.search("If `heeds_deadlines`, requests may be refused.")
