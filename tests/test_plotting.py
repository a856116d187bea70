"""The one style of drawings: its colours for people who see few, on paper and on the server's page; its files."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import longctx
from longctx.plotting import COLORS, DARK_COLORS, can_draw, drawing, save, save_both, style

SHEET = (Path(longctx.__file__).parent / "serving/server/page/style.css").read_text(encoding="utf-8")
LIGHT, DARK = SHEET.split("@media (prefers-color-scheme: dark)")[:2]
# How linear RGB looks without one kind of cones. Source: Machado, Oliveira and Fernandes 2009, severity 1.
VISIONS = {
    "all": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)


def linear(color: str) -> np.ndarray:
    values = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(color: str, vision: str) -> np.ndarray:
    """CIE L*a*b*, in which distances are as people see them, about."""
    xyz = TO_XYZ @ np.clip(VISIONS[vision] @ linear(color), 0, 1) / TO_XYZ.sum(1)
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    """Of WCAG 2.1: 1 to 21."""
    low, high = sorted(float(TO_XYZ[1] @ linear(color)) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def value_of(name: str, sheet: str) -> str:
    found = re.search(rf"--{name}: (#[0-9a-f]{{6}});", sheet)
    assert found is not None, name
    return found[1]


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("colors", [COLORS, DARK_COLORS], ids=["light", "dark"])
def test_colours_are_told_apart(colors: Sequence[str], vision: str) -> None:
    for one, other in itertools.combinations(colors, 2):
        assert np.linalg.norm(lab(one, vision) - lab(other, vision)) > 12, (one, other)


@pytest.mark.parametrize(("sheet", "colors"), [(LIGHT, COLORS), (DARK, DARK_COLORS)], ids=["light", "dark"])
def test_the_page_has_the_colours_of_drawings(sheet: str, colors: Sequence[str]) -> None:
    names = [*(f"prompt-{number}" for number in range(7)), "decodes"]
    assert tuple(value_of(name, sheet) for name in names) == tuple(colors)


@pytest.mark.parametrize("sheet", [LIGHT, DARK], ids=["light", "dark"])
def test_the_page_can_be_read(sheet: str) -> None:
    page, card, text = (value_of(name, sheet) for name in ("page", "card", "text"))
    for ground in (page, card):
        assert contrast(text, ground) >= 7
        for name in ("accent", "soft", "bad"):
            assert contrast(value_of(name, sheet), ground) >= 4.5, name
    assert contrast(value_of("on-accent", sheet), value_of("accent", sheet)) >= 4.5
    # Two of the light ones are lighter than that, and have an edge.
    for name in ("decodes", *(f"prompt-{number}" for number in (0, 1, 2, 3, 6)), "soft"):
        assert contrast(value_of(name, sheet), card) >= 3, name


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
