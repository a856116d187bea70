"""One style for all drawings, with matplotlib (extra `plot`), which is imported only to draw."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx import extras

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

# People of every colour vision tell them apart. Left out: their yellow, too light for lines.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#666666")
"""The colours of series, in their order, as `#rrggbb`.

Source:
  Okabe and Ito, Color Universal Design, 2008; the grey is ours.

Examples:
  >>> from longctx.plotting import COLORS
  >>> COLORS[0]
  '#0072b2'
"""
# The same on a dark ground, as the server's page has them; tests/test_plotting.py has the distances of both.
DARK_COLORS = ("#2f8fd0", "#f0743e", "#17b486", "#d98abb", "#ffc04d", "#a5d8f3", "#f2f2f2", "#7f7f7f")
"""The colours of series on a dark ground, as the server's page has them, as `#rrggbb`, in the order of `COLORS`.

Examples:
  >>> from longctx.plotting import COLORS, DARK_COLORS
  >>> dict(zip(COLORS, DARK_COLORS))["#0072b2"]  # the blue
  '#2f8fd0'
"""
PAPER = "#999999"  # of the paper's own values, where a drawing has these beside ours
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.dpi": 110,
    "savefig.facecolor": "white",
    "svg.hashsalt": "longctx",  # else ids in the file are random
    "svg.fonttype": "none",  # text stays text
}


def can_draw() -> bool:
    """Whether matplotlib is installed.

    Returns:
      False: `pip install 'longctx-jax[plot]'` brings it.

    Examples:
      >>> from longctx.plotting import can_draw
      >>> can_draw()
      True
    """
    return extras.is_installed("plot")


@contextmanager
def style(outlines: bool = False) -> Iterator[None]:
    """Within it, matplotlib draws and saves in our style.

    Args:
      outlines: whether letters of an SVG are shapes, as where boxes are laid out around them by hand.

    Yields:
      Nothing.

    Examples:
      >>> import matplotlib as mpl
      >>> from longctx.plotting import style
      >>> with style():
      ...     print(mpl.rcParams["axes.grid"])
      True
    """
    with extras.needed("plot", "a drawing"):
        import matplotlib as mpl
        from cycler import cycler

    settings: Any = {**_SETTINGS, "axes.prop_cycle": cycler(color=COLORS)}
    if outlines:
        settings["svg.fonttype"] = "path"
    with mpl.rc_context(settings):
        yield


def drawing(panels: int = 1, width: float = 5.0, height: float = 3.4) -> "tuple[Drawing, list[Any]]":
    """A matplotlib figure and its axes, side by side. Within `style`.

    Args:
      panels: how many axes; 0: none; the caller divides the figure.
      width, height: of a panel, inches.

    Returns:
      The figure, and a list of its axes.

    Examples:
      >>> from longctx.plotting import drawing, style
      >>> with style():
      ...     figure, (left, right) = drawing(2, width=4.0)
      >>> figure.get_size_inches().tolist()
      [8.0, 3.4]
    """
    with extras.needed("plot", "a drawing"):
        from matplotlib.figure import Figure as Drawing  # pyplot would need a display and keep global state

    figure = Drawing(figsize=(width * max(1, panels), height), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0]) if panels else []


def save(figure: "Drawing", path: Path) -> None:
    """Write a drawing as SVG or PNG, byte-equal for equal drawings. Within `style`.

    Args:
      figure: a matplotlib figure.
      path: its suffix says which, `.svg` or `.png`.

    Examples:
      >>> from pathlib import Path
      >>> from longctx.plotting import drawing, save, style
      >>> with style():
      ...     figure, (axes,) = drawing()
      ...     _ = axes.plot([1, 2, 4], [10, 20, 40], "o-")
      ...     save(figure, Path("line.svg"))
      >>> Path("line.svg").read_text().count("<svg")
      1
    """
    if path.suffix.lower() == ".svg":
        path.write_text(to_svg(figure), encoding="utf-8")
    else:
        figure.savefig(path, metadata={"Software": None})


def save_both(figure: "Drawing", folder: Path, name: str) -> None:
    """Write `NAME.svg`, for pages, and `NAME.png`, for what shows no SVG, into a folder. Within `style`.

    Args:
      figure: a matplotlib figure.
      folder: that exists.
      name: of the files, without suffix.

    Examples:
      >>> from pathlib import Path
      >>> from longctx.plotting import drawing, save_both, style
      >>> with style():
      ...     figure, [axes] = drawing()
      ...     _ = axes.plot([1, 2, 4], [10, 20, 40])
      ...     save_both(figure, Path("."), "line")
      >>> sorted(path.name for path in Path(".").iterdir())
      ['line.png', 'line.svg']
    """
    for suffix in (".svg", ".png"):
        save(figure, folder / f"{name}{suffix}")


def to_svg(figure: "Drawing") -> str:
    """The text of an SVG file of a drawing, equal for equal drawings. Within `style`.

    Args:
      figure: a matplotlib figure.

    Returns:
      The text, in UTF-8's characters.

    Examples:
      >>> from longctx.plotting import drawing, style, to_svg
      >>> with style():
      ...     figure, [axes] = drawing()
      ...     _ = axes.plot([1, 2, 4], [10, 20, 40])
      ...     text = to_svg(figure)
      >>> text.count("</svg>")
      1
    """
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    # Where a reader's machine lacks our font, text is in one as wide, and not in the browser's serifs. Spaces before
    # line ends are of no use, and some tools take them away.
    with_fonts = text.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    return "".join(line.rstrip() + "\n" for line in with_fonts.splitlines())


@contextmanager
def shown(panels: int = 1, width: float = 5.0, height: float = 3.4) -> Iterator[tuple["Drawing", list[Any]]]:
    """Within it a notebook has a `drawing` in our style, which is shown as SVG at its end.

    Args:
      panels, width, height: as for `drawing`.

    Yields:
      (a matplotlib figure, its axes from left to right).

    Examples:
      >>> from longctx.plotting import shown
      >>> with shown(panels=2) as (figure, (left, right)):
      ...     _ = left.plot([1, 2, 4], [10, 20, 40])
      ...     _ = right.bar(["pass-KV", "pass-Q"], [3, 5])
      {'image/svg+xml': '<?xml ...'}
    """
    from IPython.display import display

    with style():
        figure, axes = drawing(panels, width, height)
        yield figure, axes
        display({"image/svg+xml": to_svg(figure)}, raw=True)
