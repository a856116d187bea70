"""Values at the door: errors that name the argument and what it should be."""

import math
from numbers import Integral, Real


def check_integer(name: str, value: object, low: int) -> int:
    """A Python or numpy integer of at least `low`, as int."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value}")
    return int(value)


def check_real(name: str, value: object, low: float, high: float = math.inf) -> float:
    """A finite number from `low` to `high`, as float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not low <= float(value) <= high or not math.isfinite(value):
        raise ValueError(f"{name} must be finite and {low} to {high}, got {value}")
    return float(value)


def check_text(name: str, value: object) -> str:
    """A string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode, got {value!r}") from error
    return value


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
