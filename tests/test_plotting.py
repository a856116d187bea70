"""The one style of drawings: its colours, which the server's page has too, and its files."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import longctx
from longctx.plotting import COLORS, DARK_COLORS, can_draw, drawing, save, save_both, style

SHEET = (Path(longctx.__file__).parent / "serving/server/page/style.css").read_text(encoding="utf-8")
LIGHT, DARK = SHEET.split("@media (prefers-color-scheme: dark)")[:2]


def value_of(name: str, sheet: str) -> str:
    found = re.search(rf"--{name}: (#[0-9a-f]{{6}});", sheet)
    assert found is not None, name
    return found[1]


@pytest.mark.parametrize(("sheet", "colors"), [(LIGHT, COLORS), (DARK, DARK_COLORS)], ids=["light", "dark"])
def test_the_page_has_the_colours_of_drawings(sheet: str, colors: Sequence[str]) -> None:
    names = [*(f"prompt-{number}" for number in range(7)), "decodes"]
    assert tuple(value_of(name, sheet) for name in names) == tuple(colors)


@pytest.mark.skipif(not can_draw(), reason="needs matplotlib")
def test_equal_drawings_are_equal_files(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        with style():
            figure, (left, right) = drawing(2)
            left.plot([1, 2], [2, 1], "o-", label="a line")
            left.legend()
            right.bar(["a", "b"], [1, 2])
            save_both(figure, tmp_path / folder, "drawn")
    for name in ("drawn.svg", "drawn.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    text = (tmp_path / "one/drawn.svg").read_text()
    assert ">a line<" in text  # it can be searched and selected
    assert COLORS[0] in text
    assert not re.search(r"[ \t]$", text, re.MULTILINE)


@pytest.mark.skipif(not can_draw(), reason="needs matplotlib")
def test_letters_may_be_outlines(tmp_path: Path) -> None:
    with style(outlines=True):
        figure, (axes,) = drawing()
        axes.set_title("laid out by hand")
        save(figure, tmp_path / "drawn.svg")
    assert "<text" not in (tmp_path / "drawn.svg").read_text()
