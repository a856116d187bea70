"""One style for all drawings, with matplotlib (extra `plot`), which is imported only to draw."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx import extras

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

# Okabe and Ito's colours, which people of every colour vision tell apart; their yellow is too light for lines.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
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
    """Whether matplotlib is installed."""
    return extras.is_installed("plot")


@contextmanager
def style() -> Iterator[None]:
    """Within it, matplotlib draws and saves in our style."""
    with extras.needed("plot", "a drawing"):
        import matplotlib as mpl
        from cycler import cycler

    settings: Any = {**_SETTINGS, "axes.prop_cycle": cycler(color=COLORS)}
    with mpl.rc_context(settings):
        yield


def drawing(panels: int = 1, width: float = 5.0, height: float = 3.4) -> "tuple[Drawing, list[Any]]":
    """A matplotlib figure and its axes, side by side; width and height of a panel in inches. Within `style`.

    Args:
      panels: 0: none; the caller divides the figure.
    """
    with extras.needed("plot", "a drawing"):
        from matplotlib.figure import Figure as Drawing  # pyplot would need a display and keep global state

    figure = Drawing(figsize=(width * max(1, panels), height), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0]) if panels else []


def save(figure: "Drawing", path: Path) -> None:
    """Write a drawing as SVG or PNG, byte-equal for equal drawings. Within `style`."""
    is_svg = path.suffix.lower() == ".svg"
    figure.savefig(path, metadata={"Date": None, "Creator": None} if is_svg else {"Software": None})
    if is_svg:  # spaces before line ends are of no use, and some tools take them away
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("".join(line.rstrip() + "\n" for line in lines), encoding="utf-8")
