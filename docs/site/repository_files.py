"""Hook of mkdocs: pages link to files of the repository that lie outside of docs/, and these become pages, too.

On the way from the repository to the site a link changes, as a file has another place there: `../examples/cluster` of
a page in docs/ is a page of that folder's files, and `docs/engine.md` of a file in the root is the page of the engine.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook_page import notebook_page

ROOT = Path(__file__).parents[2]
DOCS = "docs"
# Where files from outside of docs/ are on the site.
FOLDER = "repository"
# Files of the root that the navigation names, though no page may link to them.
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

# A link whose text is the name of the page that it leads to.
NAMED = re.compile(r"\[`?([\w./-]+\.md)`?\](?=\(([^()\s#:]+))")
LINK = re.compile(r"(\]\()([^()\s#:]+)((?:#[^()\s]*)?\))")
FENCE = re.compile(r"^( *)(```+|~~~+)")
FOR_TESTS = re.compile(r"^( *```+\w+) (not-run:.*|varies)$")
LANGUAGES = {".py": "python", ".sh": "sh", ".sbatch": "sh", ".yaml": "yaml", ".toml": "toml", ".json": "json"}

# A page's source on the site, and the file or folder of the repository that it shows.
shown: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file outside of docs/ that a page links to."""
    shown.clear()
    pending = [path for path in PAGES if (ROOT / path).is_file()]
    for file in files.documentation_pages():
        pending += links(f"{DOCS}/{file.src_uri}", file.content_string)
    while pending:
        path = pending.pop()
        source = site_path(path)
        if path.startswith(f"{DOCS}/") or source is None or source in shown:
            continue
        shown[source] = path
        text, images = page_of(path)
        files.append(File.generated(config, source, content=text))
        for name, image in images.items():
            files.append(File.generated(config, posixpath.join(posixpath.dirname(source), name), content=image))
        pending += links(path, text)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page, and drops what tests read behind the language of a block."""
    source = page.file.src_uri
    path = shown.get(source, f"{DOCS}/{source}")
    if source in shown:
        page.edit_url = None
        if not path.endswith((".md", ".ipynb")) and (ROOT / path).is_file():
            page.meta["search"] = {"exclude": True}

    def rewrite(match: re.Match[str]) -> str:
        target = site_path(resolve(path, match[2]))
        if target is None:
            return match[0]  # mkdocs says that it leads nowhere
        return match[1] + posixpath.relpath(target, posixpath.dirname(source)) + match[3]

    def name(match: re.Match[str]) -> str:
        target = ROOT / resolve(path, match[2])
        return f"[{title(target)}]" if target.suffix == ".md" and target.is_file() else match[0]

    return outside_of_blocks(markdown, lambda line: LINK.sub(rewrite, NAMED.sub(name, line)))


def title(page: Path) -> str:
    """A page's first heading, which says more on the site than a file's name."""
    return next(x.removeprefix("# ") for x in page.read_text(encoding="utf-8").splitlines() if x.startswith("# "))


def site_path(path: str) -> str | None:
    """The source, within docs/ or generated, of what shows a file of the repository; None: there is no such file."""
    place = ROOT / path
    if path.startswith("..") or not place.exists():
        return None
    if path.startswith(f"{DOCS}/"):
        inside = path.removeprefix(f"{DOCS}/")
        if place.is_dir():
            return f"{inside}/README.md" if (place / "README.md").exists() else f"{inside}/index.md"
        return inside
    if place.is_dir():
        return f"{FOLDER}/{path}/README.md"
    return f"{FOLDER}/{path}" if path.endswith(".md") else f"{FOLDER}/{path}.md"


def page_of(path: str) -> tuple[str, dict[str, bytes]]:
    """The page of a file or folder: prose as it is, code in a block, a folder as a list; and its images."""
    place = ROOT / path
    if place.suffix == ".ipynb":
        return notebook_page(place)
    if place.is_file():
        text = place.read_text(encoding="utf-8")
        language = LANGUAGES.get(place.suffix, "text")
        code = f"# {place.name}\n\n`{path}`\n\n~~~~~~{language}\n{text}\n~~~~~~\n"
        return (text if path.endswith(".md") else code), {}
    readme = place / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else f"# {path}\n"
    names = sorted(x.name for x in place.iterdir() if x.is_file() and x != readme)
    return text + "\n## Files\n\n" + "".join(f"- [{name}]({name})\n" for name in names), {}


def links(path: str, text: str) -> list[str]:
    """Files of the repository that a page links to."""
    found: list[str] = []
    outside_of_blocks(text, lambda line: found.extend(resolve(path, match[2]) for match in LINK.finditer(line)) or line)
    return found


def resolve(path: str, link: str) -> str:
    """A link of a file or folder, from the root of the repository."""
    folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    return posixpath.normpath(posixpath.join(folder, link))


def outside_of_blocks(text: str, change: Callable[[str], str]) -> str:
    """A text with lines changed that stand in no fenced block."""
    lines: list[str] = []
    fence = ""
    for line in text.split("\n"):
        found = FENCE.match(line)
        if fence:
            lines.append(line)
            fence = "" if found and found[2].startswith(fence) else fence
        elif found:
            lines.append(FOR_TESTS.sub(r"\1", line))
            fence = found[2]
        else:
            lines.append(change(line))
    return "\n".join(lines)
