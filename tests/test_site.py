"""The documentation's site: it builds without a warning, has every public name, and needs no other host."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from public_names import public_names

ROOT = Path(__file__).parent.parent
# What a browser loads by itself; a link waits for a click.
LOADS = re.compile(r"<(?:link|script|img|iframe|source|video|use)\b[^>]*? (?:href|src)=\"?([^\s\">]+)")


def test_links_between_pages_lead_to_files() -> None:
    """Anchors too: a heading's words, joined by dashes. The site, whose build takes half a minute, has all of it."""

    @functools.cache
    def anchors(page: Path) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}

    wrong = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = (page.parent / unquote(path)).resolve() if path else page
            has_headings = target.suffix == ".md" and target.parent.name != "api"  # there names are anchors
            is_wrong = not target.exists() or (anchor and has_headings and anchor not in anchors(target))
            if is_wrong and "://" not in link:
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert wrong == []


@pytest.mark.slow
def test_the_site_is_complete_and_needs_no_other_host(tmp_path: Path) -> None:
    """A strict build fails at each link that leads nowhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    ids = {each for path in pages if path.parent.name == "api" for each in re.findall(r' id="?([\w.]+)', pages[path])}
    assert {f"{package}.{name}" for package, found in public_names().items() for name in found} - ids == set()
    css = "".join(path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.css"))
    loads = {load for page in pages.values() for load in LOADS.findall(page)}
    loads |= {*re.findall(r"url\(\s*['\"]?([^'\")]*)", css), *re.findall(r"@import\s+['\"]([^'\"]*)", css)}
    assert len(loads) > 10
    assert [x for x in loads if urlsplit(x).netloc or urlsplit(x).scheme not in ("", "data")] == []
