"""One style for all drawings, with matplotlib (extra `plot`), which is imported only to draw."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

# Okabe and Ito's colours, which people of every colour vision tell apart; their yellow is too light for lines.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
"""Okabe and Ito's colours, which people of every colour vision tell apart: blue, vermilion, green and so on.

Source:
  Okabe and Ito, Color Universal Design (2008).

Examples:
  >>> from longctx.plotting import COLORS
  >>> COLORS[:2]
  ('#0072b2', '#d55e00')
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
      True if it can be imported.

    Examples:
      >>> from longctx.plotting import can_draw
      >>> can_draw()
      True
    """
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def style() -> Iterator[None]:
    """Within it, matplotlib draws and saves in our style.

    Yields:
      Nothing; the settings of matplotlib are as before when it ends.

    Examples:
      >>> import matplotlib
      >>> from longctx.plotting import style
      >>> with style():
      ...     matplotlib.rcParams["axes.spines.top"]
      False
      >>> matplotlib.rcParams["axes.spines.top"]
      True
    """
    import matplotlib as mpl
    from cycler import cycler

    settings: Any = {**_SETTINGS, "axes.prop_cycle": cycler(color=COLORS)}
    with mpl.rc_context(settings):
        yield


def drawing(panels: int = 1, width: float = 5.0, height: float = 3.4) -> "tuple[Drawing, list[Any]]":
    """A matplotlib figure and its axes, side by side. Within `style`.

    Args:
      panels: how many; 0: none, the caller divides the figure.
      width, height: of a panel, in inches.

    Returns:
      (figure, its axes from left to right).

    Examples:
      >>> from longctx.plotting import drawing, style
      >>> with style():
      ...     figure, [axes] = drawing()
      ...     lines = axes.plot([1, 2, 4], [10, 20, 40])
      >>> lines[0].get_color()  # of our style
      '#0072b2'
    """
    from matplotlib.figure import Figure as Drawing  # pyplot would need a display and keep global state

    figure = Drawing(figsize=(width * max(1, panels), height), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0]) if panels else []


def save(figure: "Drawing", path: Path) -> None:
    """Write a drawing as SVG or PNG, byte-equal for equal drawings. Within `style`.

    Args:
      figure: as of `drawing`.
      path: whose suffix says which of the two, `.svg` or `.png`.

    Examples:
      >>> from pathlib import Path
      >>> from longctx.plotting import drawing, save, style
      >>> with style():
      ...     figure, (left, right) = drawing(panels=2)
      ...     _ = left.plot([1, 2, 4], [10, 20, 40], marker="o", label="ring")
      ...     _ = right.bar(["pass-KV", "pass-Q"], [3, 5])
      ...     save(figure, Path("times.svg"))
      >>> Path("times.svg").read_text().startswith("<?xml")
      True
    """
    is_svg = path.suffix.lower() == ".svg"
    figure.savefig(path, metadata={"Date": None, "Creator": None} if is_svg else {"Software": None})
    if is_svg:  # spaces before line ends are of no use, and some tools take them away
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("".join(line.rstrip() + "\n" for line in lines), encoding="utf-8")
