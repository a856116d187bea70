"""Checks of arguments and settings, whose errors name the argument and the values that are allowed."""

import dataclasses
import functools
import math
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from longctx.annotations import Real
from longctx.models.validation import check_bool, check_integer, check_real, shown

_LEAST_INT = -(2**63)


class Range(NamedTuple):
    """Numbers that a field of settings may have: `Annotated[int, Range(1)]`.

    Attributes:
      low: the least one.
      high: the greatest one.
      is_open: whether `low` itself is excluded.
    """

    low: float
    high: float = math.inf
    is_open: bool = False


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
Share = Annotated[float, Range(0, 1)]
AboveZero = Annotated[float, Range(0, is_open=True)]
Seconds = Annotated[float, Range(0, 1e9)]


class FieldType(NamedTuple):
    """Type of a field of settings.

    Attributes:
      kind: `int`, `float`, `bool` or `str`, of values that `check_fields` checks, or another type.
      is_optional: whether the field may be None.
      choices: the values of a `Literal`.
      range: of a number. None: any integer; a float is not checked.
      checks: functions of name and value among the annotations, such as that a file can be read.
      help: text among the annotations.
    """

    kind: Any
    is_optional: bool = False
    choices: tuple[Any, ...] = ()
    range: Range | None = None
    checks: tuple[Callable[[str, Any], object], ...] = ()
    help: str = ""

    def check(self, name: str, value: Any) -> Any:
        """Check a value, and return it as Python's own type; errors name it."""
        if value is None and self.is_optional:
            return None
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"{name} must be one of {', '.join(map(str, self.choices))}, got {shown(value)}")
        elif self.kind is int:
            low, high, _ = self.range or Range(_LEAST_INT)
            value = check_integer(name, value, int(low), None if high == math.inf else int(high))
        elif self.kind is float:
            low, high, is_open = self.range or Range(-math.inf)
            if is_open and isinstance(value, Real) and not value > low:
                raise ValueError(f"{name} must be above {low:g}, got {shown(value)}")
            value = value if self.range is None else check_real(name, value, low, high)
        elif self.kind is bool:
            check_bool(name, value)
        elif self.kind is str:
            check_text(name, value)
        for check in self.checks:
            check(name, value)
        return value


@functools.cache
def field_types(settings: type) -> dict[str, FieldType]:
    """Return the types of the fields of a dataclass, by name."""
    hints = get_type_hints(settings, include_extras=True)
    return {field.name: _field_type(hints[field.name]) for field in dataclasses.fields(settings)}


def check_fields(settings: Any) -> None:
    """Check the fields of a frozen dataclass by their types, and convert numbers to Python's own.

    Integers, numbers, switches, texts and `Literal`s are checked, numbers by their `Range`. Fields of other types are
    left as they are.

    Args:
      settings: in its `__post_init__`.

    Raises:
      TypeError, ValueError: a value is of the wrong type or out of range; the message names the field.
    """
    made_of: type = type(settings)
    for name, kind in field_types(made_of).items():
        value = getattr(settings, name)
        checked = kind.check(name, value)
        if checked is not value:
            object.__setattr__(settings, name, checked)


def _field_type(hint: Any) -> FieldType:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found = _field_type(arguments[0])
        for each in arguments[1:]:
            if isinstance(each, Range):
                found = found._replace(range=each)
            elif isinstance(each, str):
                found = found._replace(help=each)
            elif callable(each):
                found = found._replace(checks=(*found.checks, each))
        return found
    if origin in (Union, UnionType):
        kinds = [each for each in arguments if each is not NoneType]
        found = _field_type(kinds[0]) if len(kinds) == 1 else FieldType(object)
        return found._replace(is_optional=NoneType in arguments)
    if origin is Literal:
        return FieldType(type(arguments[0]), choices=arguments)
    return FieldType(hint)


def check_text(name: str, value: object) -> str:
    """Check for a string that can be encoded as UTF-8, and return it."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode, got {shown(value)}") from error
    return value
