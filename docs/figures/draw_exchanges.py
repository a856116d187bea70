"""Draw the figures of docs/context_parallelism.md: `python docs/figures/draw_exchanges.py` (asks for matplotlib)."""

import argparse
import pathlib
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from longctx.parallel.layout import LAYOUTS, layout_shards
from longctx.plotting import COLORS, save, style

N = 4
COLOURS = (COLORS[0], COLORS[4], COLORS[2], COLORS[3])  # large areas: yellow is easier on the eye than vermilion
INK, QUIET, LINE, MERGED = "#1F2933", "#5B6770", "#D5DBE1", "#DDE2E7"
BAR, WIRE, ROW = 0.36, 0.24, 0.94  # heights: what a rank computes, what it sends, and both with the gaps
TOP, LEFT, TIMES = 1.12, 1.2, "\N{MULTIPLICATION SIGN}"


def canvas(width: float, height: float, title: str) -> Axes:
    """Axes in inches, from the upper left corner of a white page."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    write(axes, 0.3, 0.33, title, size=12, weight="bold", align="left")
    return axes


def write(axes: Axes, x: float, y: float, text: str, size: float = 9, align: str = "center", **style: Any) -> None:
    axes.text(x, y, text, size=size, ha=align, va="center_baseline", **{"color": INK} | style)


def tint(colour: str) -> tuple[float, ...]:
    return tuple(1 - 0.2 * (1 - c) for c in to_rgb(colour))


def ink(colour: str) -> tuple[float, ...]:
    """Of letters: dark enough to be read on white."""
    return tuple(0.7 * c for c in to_rgb(colour))


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str, hollow: bool = False
) -> None:
    """A rounded box around (x, y), its left edge's middle; hollow: what is on the wire."""
    inset = 0.04
    shape = FancyBboxPatch(
        (x + inset, y - height / 2 + inset),
        *(width - 2 * inset, height - 2 * inset),
        boxstyle=f"round,pad={inset * 0.6},rounding_size=0.05",
        fc=tint(colour) if hollow else colour,
        ec=colour,
        lw=0.9,
    )
    axes.add_patch(shape)
    is_dark = not hollow and np.dot(to_rgb(colour), (0.30, 0.59, 0.11)) < 0.5
    write(axes, x + width / 2, y, text, 8 if hollow else 9, color="white" if is_dark else INK)


def states(axes: Axes, x: float, y: float, colours: list[str], labels: list[object]) -> None:
    """Small squares in a row: partial results."""
    for i, (colour, label) in enumerate(zip(colours, labels, strict=True)):
        box(axes, x + 0.225 * i, y, 0.24, 0.24, str(label), colour)


def arrow(axes: Axes, x: float, y: float, length: float) -> None:
    axes.annotate("", (x + length, y), (x, y), arrowprops={"arrowstyle": "-|>", "color": QUIET, "lw": 1.1})


def rank_rows(axes: Axes, right: float, notes: list[str]) -> list[float]:
    """Names of the ranks, with a line above each; -> the heights of their bars."""
    for rank in range(N):
        y = TOP + rank * ROW
        axes.plot([0.3, right], [y - 0.1] * 2, color=LINE, lw=0.8)
        write(axes, 0.3, y + 0.2, f"rank {rank}", 10, "left", weight="bold")
        write(axes, 0.3, y + 0.5, notes[rank], 8, "left", color=QUIET)
    return [TOP + rank * ROW + 0.2 for rank in range(N)]


def heads(axes: Axes, columns: list[tuple[float, float, str]]) -> None:
    for x, width, text in columns:
        write(axes, x + width / 2, TOP - 0.3, text, color=QUIET)


def legend(axes: Axes, entries: list[tuple[str, str, bool, str, float]]) -> None:
    x, y = LEFT, TOP + N * ROW + 0.2
    for mark, text, hollow, colour, width in entries:
        box(axes, x, y, 0.26, 0.24, mark, colour, hollow)
        write(axes, x + 0.33, y, text, 8.5, "left", color=QUIET)
        x += width


def draw_ring(moves: str) -> Axes:
    """The hops of both rings: what is there, attention to it, and under it the permute of it to the next rank."""
    is_kv = moves == "KV"
    hop, merge, home = (1.75, 0.36, 0.0) if is_kv else (1.55, 0.92, 2.3)
    right = LEFT + N * hop + (N * merge - merge if is_kv else home + merge)
    title = "Ring pass-KV: keys and values go round" if is_kv else "Ring pass-Q: queries go round, results come home"
    axes = canvas(right + 0.3, TOP + N * ROW + 0.5, title)
    rows = rank_rows(axes, right, [f"keeps {'Q' if is_kv else 'KV'}{r}" for r in range(N)])
    x = LEFT
    for i in range(N):
        heads(axes, [(x, hop, f"hop {i}")])
        for rank, y in enumerate(rows):
            source = (rank - i) % N
            q, kv = (rank, source) if is_kv else (source, rank)
            box(axes, x, y, hop, BAR, f"Q{q} {TIMES} KV{kv}", COLOURS[source])
            if i < N - 1:
                box(axes, x, y + 0.32, hop, WIRE, f"{moves}{source} → rank {(rank + 1) % N}", COLOURS[source], True)
            if is_kv and i > 0:
                box(axes, x + hop, y, merge, BAR, "+", QUIET)
        x += hop + (merge if is_kv and i > 0 else 0)
    entries = [("", "attention", False, COLOURS[0], 1.2), ("", "permute, hidden by it", True, COLOURS[0], 1.95)]
    if is_kv:
        legend(axes, [*entries, ("+", "merge into the running (out, lse)", False, QUIET, 3)])
        return axes
    heads(axes, [(x, home, "all-to-all"), (x + home, merge, "merge")])
    for rank, y in enumerate(rows):
        states(axes, x + 0.06, y, list(COLOURS), [rank] * N)
        arrow(axes, x + 1.02, y, 0.27)
        states(axes, x + 1.33, y, [COLOURS[rank]] * N, list(range(N)))
        box(axes, x, y + 0.32, home, WIRE, "partial results to their owners", QUIET, True)
        box(axes, x + home, y, merge, BAR, f"out {rank}", COLOURS[rank])
    entries += [("", "on the wire, hidden by nothing", True, QUIET, 2.45)]
    legend(axes, [*entries, ("0", "(out, lse): colour, whose queries; number, whose keys", False, COLOURS[0], 4)])
    return axes


def draw_kvp() -> Axes:
    """Both forms of the merge, after the same attention."""
    a, b = LEFT + 1.8, LEFT + 4.5  # where the forms begin
    right = b + 4.3
    axes = canvas(right + 0.3, TOP + N * ROW + 0.5, "KVP: all ranks have the queries, only states move")
    rows = rank_rows(axes, right, [f"has Q, KV{r}" for r in range(N)])
    for x in (a - 0.1, b - 0.1):
        axes.plot([x, x], [TOP - 0.5, TOP + N * ROW - 0.1], color=LINE, lw=0.9, ls=(0, (4, 3)))
    heads(axes, [(LEFT, 1.6, "attention"), (a, 2.5, 'merge="gather"'), (b, 4.3, 'merge="all_to_all"')])
    for rank, y in enumerate(rows):
        box(axes, LEFT, y, 1.6, BAR, f"Q {TIMES} KV{rank}", COLOURS[rank])
        states(axes, a + 0.1, y, [COLOURS[rank]], [""])
        arrow(axes, a + 0.38, y, 0.27)
        states(axes, a + 0.69, y, list(COLOURS), [""] * N)
        box(axes, a + 0.06, y + 0.32, 1.58, WIRE, "all-gather", QUIET, True)
        box(axes, a + 1.72, y, 0.7, BAR, "out", MERGED)
        states(axes, b + 0.1, y, [COLOURS[rank]] * N, list(range(N)))
        arrow(axes, b + 1.06, y, 0.27)
        states(axes, b + 1.37, y, list(COLOURS), [rank] * N)
        box(axes, b + 0.06, y + 0.32, 2.26, WIRE, "all-to-all", QUIET, True)
        arrow(axes, b + 2.36, y, 0.27)
        states(axes, b + 2.7, y, [MERGED], [rank])
        arrow(axes, b + 2.98, y, 0.27)
        states(axes, b + 3.29, y, [MERGED] * N, list(range(N)))
        box(axes, b + 2.66, y + 0.32, 1.58, WIRE, "all-gather", QUIET, True)
    entries = [("0", "(out, lse): colour, whose keys; number, which part of the rows", False, COLOURS[0], 4.4)]
    entries += [("", "merged", False, MERGED, 0.95), ("", "on the wire, hidden by nothing", True, QUIET, 2)]
    legend(axes, entries)
    return axes


def draw_layouts() -> Axes:
    """Rows of the causal square by the rank that computes them."""
    length, cell, gap = 16, 0.19, 0.62
    side = length * cell
    axes = canvas(0.6 + 3 * side + 2 * gap, side + 1.75, f"Who computes which row: {length} tokens, {N} ranks, causal")
    for i, layout in enumerate(LAYOUTS):
        shards = layout_shards(length, N, layout)
        x, y = 0.3 + i * (side + gap), 1.1
        write(axes, x, y - 0.28, layout, 11, "left", weight="bold")
        scores = np.array([np.sum(shard + 1) for shard in shards])
        for rank, shard in enumerate(shards):
            for t in shard:
                axes.barh(y + t * cell, (t + 1) * cell, cell, x, align="edge", fc=COLOURS[rank], ec="white", lw=0.7)
            line = y + 0.13 + rank * 0.27
            box(axes, x + side - 1.6, line, 0.24, 0.24, "", COLOURS[rank])
            write(axes, x + side - 1.28, line, f"rank {rank}", 9, "left")
            write(axes, x + side, line, f"{scores[rank] / scores.sum():.0%}", 9, "right", weight="bold")
        column = np.arange(1, length)
        axes.vlines(x + column * cell, y + column * cell, y + side, color="white", lw=0.7)
        busiest = scores.max() / scores.mean()
        write(axes, x, y + side + 0.3, f"busiest rank: {busiest:.2f} {TIMES} the mean", 9, "left", color=QUIET)
    return axes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", default="svg", choices=("svg", "png"))
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    args = parser.parse_args()
    with style(outlines=True):
        write_figures(args.directory, args.format)


def write_figures(folder: pathlib.Path, suffix: str) -> None:
    figures = {"pass_kv": draw_ring("KV"), "pass_q": draw_ring("Q"), "kvp": draw_kvp(), "layouts": draw_layouts()}
    for name, axes in figures.items():
        save(axes.figure, folder / f"{name}.{suffix}")


if __name__ == "__main__":
    main()
