"""Files of computed figures: a table as CSV, the statements as JSON, a drawing; all the same for the same figure."""

import csv
import dataclasses
import functools
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

from longctx import plotting
from longctx.parallel import Topology
from papers.figures.figure import Cell, Figure, Statement
from papers.figures.registry import Registered

FILES = "simulation"  # subfolder for the files of figures
TOPOLOGIES = ("mnemosyne-h100", "h100-rdma", "medha-a100", "meta-gtt", "meta-gti", "a100-800g")


def write_figure(registered: Registered, figure: Figure, out: Path, is_from_data: bool, png: bool = False) -> None:
    """Write the files of a figure into the subfolder `FILES` of `out`; a drawing only if matplotlib is installed.

    Args:
      is_from_data: whether its workloads may be read from files of the data folder.
      png: a PNG too, beside the SVG.

    Raises:
      OSError: a file can't be written.
    """
    folder, name = out / FILES, registered.name
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(figure, folder / f"{name}.csv")
    plain = {
        "name": name,
        "title": figure.title,
        "paper": registered.paper,
        "data": is_from_data,
        "tables": tables_digest(),
        "statements": [dataclasses.asdict(statement) for statement in figure.statements],
    }
    (folder / f"{name}.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    if figure.draw is not None and plotting.can_draw():
        with plotting.style():
            drawn, axes = plotting.drawing(figure.panels, figure.width, figure.height)
            figure.draw(*axes)
            for suffix in (".svg", ".png") if png else (".svg",):
                plotting.save(drawn, folder / f"{name}{suffix}")


@functools.cache
def tables_digest() -> str:
    """Digest of the devices, links and measured operators that figures are computed by."""
    operators = resources.files("longctx.parallel").joinpath("operators.json").read_bytes()
    topologies = json.dumps([Topology.preset(name).to_dict() for name in TOPOLOGIES], sort_keys=True).encode()
    return hashlib.sha256(operators + topologies).hexdigest()[:12]


def write_csv(figure: Figure, path: Path) -> None:
    """Write its table; a column for each key of a row, in the order in which keys come."""
    columns = list(dict.fromkeys(key for row in figure.table for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(row.get(column)) for column in columns] for row in figure.table)


def _cell(value: Cell) -> str:
    """Six digits are enough, and the last bits of a float may differ between machines."""
    if value is None:
        return ""
    is_exact = isinstance(value, bool | int | str) or not hasattr(value, "__float__")
    return str(value) if is_exact else f"{float(value):.6g}"


@dataclasses.dataclass(frozen=True)
class Result:
    """A figure as its files have it; `tables` is the digest of those that it was computed by, empty of older files."""

    name: str
    title: str
    statements: list[Statement]
    is_from_data: bool
    has_drawing: bool
    tables: str


def read_result(figure: Registered, out: Path) -> Result | None:
    """Read what was written of a figure; None: nothing was."""
    path = out / FILES / f"{figure.name}.json"
    if not path.is_file():
        return None
    plain: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    statements = [Statement(**statement) for statement in plain["statements"]]
    has_drawing, tables = path.with_suffix(".svg").is_file(), plain.get("tables", "")
    return Result(plain["name"], plain["title"], statements, plain["data"], has_drawing, tables)


def remove_result(figure: Registered, out: Path) -> None:
    """Remove what was written of a figure."""
    for suffix in (".json", ".csv", ".svg", ".png"):
        (out / FILES / f"{figure.name}{suffix}").unlink(missing_ok=True)
