"""Figures: statements beside the paper's own values, a table, and a drawing."""

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HOLDS, FAILS = "holds", "does not hold"
NEAR = 0.2  # of the paper's value, within which ours counts as the same
CORRECTED_SINCE = "6acdf8d"  # commit
BASES = ("predicted", "arithmetic", "fitted")
Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Statement:
    """A statement of a paper beside our result: two numbers, or an ordering that holds or does not.

    Attributes:
      figure: number of the figure, table or section in the paper, such as "15" or "table 6".
      text: what is said, with the setting: model, devices, lengths.
      paper: the paper's number; "holds" for an ordering or a crossover.
      ours: our number; "holds" or "does not hold" for an ordering, by a comparison (`ordering`).
      unit: of both numbers.
      why: one line that says where a difference comes from; needed where ours is not `is_near`.
      basis: of our number. `"predicted"`: it could have been wrong. `"arithmetic"`: it follows from sizes and settings
        alone. `"fitted"`: a number of the cost model was taken from what the paper measured here.
      is_corrected: whether the row was added, or its setting or model changed, when ours and the paper's value were
        known, see `corrected`.

    Raises:
      ValueError: the basis is none of these, a number is not finite, the paper's is 0, a text is empty, or an ordering
        has another value.
    """

    figure: str
    text: str
    paper: float | str
    ours: float | str
    unit: str = ""
    why: str = ""
    basis: str = "predicted"
    is_corrected: bool = False

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise ValueError(f"basis must be one of {', '.join(BASES)}, got {self.basis!r}")
        for name in ("figure", "text"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} must say something")
        if isinstance(self.paper, str):
            if self.paper != HOLDS or self.ours not in (HOLDS, FAILS):
                raise ValueError(
                    f"paper must be a number, or {HOLDS!r} with ours {HOLDS!r} or {FAILS!r}, got {self.paper!r} and "
                    f"{self.ours!r}: {self.text}"
                )
            return
        if isinstance(self.ours, str) or not (math.isfinite(self.paper) and math.isfinite(self.ours)) or not self.paper:
            raise ValueError(
                f"paper and ours must be finite numbers and the paper's not 0, got {self.paper} and {self.ours}: "
                f"{self.text}"
            )
        for name in ("paper", "ours"):  # of numpy too
            object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def ratio(self) -> float | None:
        """Our number over the paper's; None for an ordering."""
        if isinstance(self.paper, str) or isinstance(self.ours, str):
            return None
        return self.ours / self.paper

    @property
    def is_near(self) -> bool:
        """True if our number is within 20 % of the paper's, or the ordering holds."""
        return self.ours == HOLDS if self.ratio is None else abs(self.ratio - 1) <= NEAR


def ordering(figure: str, text: str, holds: bool, why: str = "") -> Statement:
    """A statement of the paper that holds here or does not, by a comparison of computed values."""
    return Statement(figure, text, HOLDS, HOLDS if holds else FAILS, why=why)


def based_on(basis: str, statements: Iterable[Statement]) -> list[Statement]:
    """Statements whose numbers have another basis; orderings stay as they are."""
    return [each if each.ratio is None else replace(each, basis=basis) for each in statements]


def corrected(statements: Iterable[Statement]) -> list[Statement]:
    """Statements that were added or corrected since `CORRECTED_SINCE`; the share without them is counted apart."""
    return [replace(each, is_corrected=True) for each in statements]


@dataclass(frozen=True)
class Figure:
    """A figure of a paper, as computed.

    Attributes:
      title: what it shows, one line.
      table: rows of the CSV file; each key is a column. Floats are written with six digits.
      draw: draws on `panels` matplotlib axes, side by side; None: there is no drawing.
      width, height: of a panel, inches.
    """

    title: str
    statements: List[Statement]
    table: List[Mapping[str, Cell]]
    draw: Callable[..., Any] | None = field(default=None, compare=False)
    panels: int = 1
    width: float = 5.0
    height: float = 3.4


@dataclass(frozen=True)
class Inputs:
    """Inputs of all figures.

    Attributes:
      seed: of everything that is random.
      data: folder of workloads and measured times; None: there is none, workloads are the built-in, synthetic ones.
      quick: for tests: few requests and short windows, a second or two for a figure; its values mean nothing.
    """

    seed: int = 0
    data: Path | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be an integer of at least 0, got {self.seed!r}")
        if self.data is not None and not self.data.is_dir():
            raise ValueError(f"data must be a folder, got {self.data}")

    def file(self, name: str) -> Path | None:
        """A file of the data folder, such as "mixes/splitwise_conv.csv"; None: it is not there."""
        path = None if self.data is None else self.data / name
        return path if path is not None and path.is_file() else None
