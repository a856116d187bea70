"""The documentation's site: it builds without a warning, its links lead somewhere, and it needs no other host."""

import functools
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Browser, sync_playwright
from public_names import documented, public_names

ROOT = Path(__file__).parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next(filter(None, map(shutil.which, BROWSERS)), None)
# Attributes of which a browser loads by itself. An `a` waits for a click.
LOADS = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "use": "href"}


def test_links_between_pages_lead_to_files() -> None:
    """Anchors too: a heading's words, joined by dashes. The site, whose build takes half a minute, has all of it."""

    @functools.cache
    def anchors(page: Path) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}

    wrong = []
    for page in ROOT.glob("docs/**/*.md"):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = (page.parent / unquote(path)).resolve() if path else page
            has_headings = target.suffix == ".md" and target.parent.name != "api"  # there names are anchors
            is_wrong = not target.exists() or (anchor and has_headings and anchor not in anchors(target))
            if is_wrong and "://" not in link:
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert wrong == []


def test_glossary_is_sorted_and_has_the_papers_words() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    terms = [term.lower() for term in re.findall(r"^## (.*)$", text, re.MULTILINE)]
    assert terms == sorted(terms)
    words = "pass-kv pass-q spp kvp ttft tpot chunk page prefix lse state ring zigzag stage context tensor"
    assert {*words.split()} <= {*terms}


class BuiltPage(HTMLParser):
    """A page's ids, where its links lead, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.ids |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADS and LOADS[tag] in found:
            self.loads.append(found[LOADS[tag]])


class Site:
    """The site as it was built, and what the build printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
        environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        self.built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
        self.pages = {str(path.relative_to(folder)): BuiltPage(path) for path in sorted(folder.rglob("*.html"))}
        self.files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    def leads_nowhere(self, page: str, link: str) -> bool:
        """Whether a link within the site has no file, or no such anchor in its page."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return False
        # The page of errors alone has absolute links, as it is shown at any address.
        folder = "" if parts.path.startswith("/") else posixpath.dirname(page)
        name = posixpath.normpath(posixpath.join(folder, unquote(parts.path).lstrip("/"))) if parts.path else page
        if name not in self.files:
            return True
        return name in self.pages and bool(parts.fragment) and parts.fragment not in self.pages[name].ids


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@pytest.mark.slow
def test_the_site_is_complete(site: Site) -> None:
    """It builds without a warning, from all pages, and has an entry for each public name; its links lead somewhere."""
    assert site.built.returncode == 0, site.built.stderr
    assert "WARNING" not in site.built.stderr + site.built.stdout
    sources = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in ROOT.glob("docs/**/*.md")]
    names = [str(path.with_name("index.html") if path.stem == "README" else path) for path in sources]
    assert set(names) - set(site.pages) == set()
    public = {f"{package}.{name}" for package, found in public_names().items() for name in found}
    members = {name for name in documented() if not name.endswith(".__call__")}
    ids = {each for name, page in site.pages.items() if name.startswith("api/") for each in page.ids}
    assert (public | members) - ids == set()
    links = [(name, link) for name, page in site.pages.items() for link in page.links + page.loads]
    assert [found for found in links if site.leads_nowhere(*found)] == []


@pytest.mark.slow
def test_nothing_is_loaded_from_another_host(site: Site) -> None:
    loads = {load for page in site.pages.values() for load in page.loads}
    css = "".join(path.read_text(encoding="utf-8") for path in site.folder.rglob("*.css"))
    loads |= {*re.findall(r"url\(\s*['\"]?([^'\")]*)", css), *re.findall(r"@import\s+['\"]([^'\"]*)", css)}
    assert [x for x in loads if urlsplit(x).netloc or urlsplit(x).scheme not in ("", "data")] == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if EXECUTABLE is None:
        pytest.skip("there is no Chromium on the PATH: apt-get install chromium")
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"]) as browser,
    ):
        yield browser


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_a_telephone(site: Site, browser: Browser, scheme: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    widths = {}
    for name in site.pages:
        page.goto((site.folder / name).as_uri())
        widths[name] = page.evaluate("document.documentElement.scrollWidth")
    assert {name: width for name, width in widths.items() if width > 390} == {}
    assert errors == []


@pytest.mark.slow
def test_search_works_in_files_without_a_server(site: Site, browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.goto((site.folder / "index.html").as_uri())
    box = page.get_by_placeholder("Search")
    box.click()  # the theme reads keys, once it is ready
    box.press_sequentially("ring_pass_kv")
    page.locator(".md-search-result__link[href*='api/parallel.html']").first.wait_for(timeout=30_000)
