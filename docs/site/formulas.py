"""Hook of mkdocs: LaTeX between dollars becomes MathML, which browsers draw without a script or a font of their own."""

import html
import re

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

# What pymdownx.arithmatex makes of `$...$` and `$$...$$`.
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    content = INLINE.sub(lambda match: mathml(match[1], "inline"), content)
    return BLOCK.sub(lambda match: f'<div class="formula">{mathml(match[1], "block")}</div>', content)


def mathml(latex: str, display: str) -> str:
    """MathML of LaTeX that stands in HTML. Of environments with aligned lines the converter knows `split`."""
    return convert(html.unescape(latex).replace("{aligned}", "{split}"), display=display)
