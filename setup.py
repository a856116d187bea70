"""What pyproject.toml can't say: the text of the package index's page. All else is there."""

import re
import warnings
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\[\]]*)\]\((?!https?://)[^()]*\)")


def index_page(readme: str) -> str:
    """The README without links to files of the repository, which lead nowhere on an index page; their text stays.

    Images that lie in the repository go whole.
    """
    page = _LINK.sub(lambda link: "" if link["image"] else link["text"], readme)
    return re.sub(r"\n{3,}", "\n\n", page)


if __name__ == "__main__":
    # `make` installs the checkout so, and nobody is to be told of it each time.
    warnings.filterwarnings("ignore", r"\s*(Editable installation|Compat editable installs)")
    setup(
        long_description=index_page(Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
