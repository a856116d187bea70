"""A row of a file, whose errors name the line and the column."""

from collections.abc import Mapping
from typing import Any

from longctx.serving.validation import MAX_INT32, check_integer, check_real
from longctx.simulation.workloads.request import MAX_ARRIVAL, WorkloadRequest


class BadRowError(Exception):
    """A row that has another form; the text begins with the column."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class Row:
    """A line's values by column. Numbers may be text, as in a CSV file. Every error is a `BadRowError`."""

    def __init__(self, line: int, values: Mapping[str, Any]) -> None:
        self.line, self._values = line, values

    def __contains__(self, column: str) -> bool:
        return self._values.get(column) not in (None, "")

    def bad(self, message: object) -> BadRowError:
        return BadRowError(self.line, str(message))

    def value(self, column: str) -> Any:
        """A column's value as it is."""
        if self._values.get(column) is None:
            raise self.bad(f"{column!r} is missing")
        return self._values[column]

    def tokens(self, column: str, low: int = 1) -> int:
        """A column's number of tokens."""
        try:
            return check_integer(column, _number(self.value(column), int), low, MAX_INT32)
        except (TypeError, ValueError) as error:
            raise self.bad(error) from None

    def seconds(self, column: str, unit: float = 1.0) -> float:
        """A column's time, which has units of so many seconds; 0 if it is missing."""
        if column not in self:
            return 0.0
        try:
            return check_real(column, _number(self.value(column), float), 0, MAX_ARRIVAL / unit) * unit
        except (TypeError, ValueError) as error:
            raise self.bad(error) from None

    def request(self, arrival: float, prompt_tokens: int, output_tokens: int, number: int) -> WorkloadRequest:
        try:
            return WorkloadRequest(arrival, prompt_tokens, output_tokens, number=number)
        except (TypeError, ValueError) as error:
            raise self.bad(error) from None


def _number(value: Any, kind: type) -> Any:
    """The number that a text has, else the value as it is, for a check to refuse."""
    try:
        return kind(value) if isinstance(value, str) else value
    except ValueError:
        return value
