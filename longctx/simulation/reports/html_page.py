"""A page of HTML that needs nothing else: style and drawings are in it, and it loads nothing."""

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 76rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; }
.wide { overflow-x: auto; }
.drawing svg { display: block; width: 100%; min-width: 52rem; height: auto; background: #fff; border-radius: .4rem; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818; } pre { background: #242424; } th, td { border-color: #444; }
}
"""


class Section(NamedTuple):
    """A part of a page: a title, and HTML that `text`, `table` or `svg` made."""

    title: str
    body: str


def page(title: str, sections: Iterable[Section]) -> str:
    """A whole page."""
    parts = "\n".join(f"<h2>{html.escape(section.title)}</h2>\n{section.body}" for section in sections)
    head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
    head += f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n'
        f"<body>\n<h1>{html.escape(title)}</h1>\n{parts}\n</body>\n</html>\n"
    )


def text(contents: str) -> str:
    """Text as it stands, such as a table of the command line."""
    return f"<pre>{html.escape(contents)}</pre>"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; numbers as they are given."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def svg(drawing: str) -> str:
    """An SVG drawing as `longctx.plotting` writes it; XML's declaration and its document type are no HTML.

    On a narrow screen it is moved sideways, rather than made too small to read.
    """
    at = drawing.find("<svg")
    if at < 0:
        raise ValueError("drawing must be an SVG document")
    return f'<div class="wide drawing">\n{drawing[at:].strip()}\n</div>'
