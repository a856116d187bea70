"""Checks of values, whose errors name the value and what is allowed."""

import math
import reprlib
from numbers import Integral

from longctx.annotations import Real

MAX_INT32 = 2**31 - 1
MAX_LAYERS = 2**14  # far above those of published models: a file must not ask for endless work
FP8_KV = "float8_e4m3fn"
"""The dtype of keys and values that are kept in one byte, each row of a token and KV head with a float32 scale."""
_MAX_IDS = 1000  # of a list in a file; published models have less than 10
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80


def shown(value: object) -> str:
    """A short representation of any value for an error message."""
    try:
        return _SHOWN.repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__


def check_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """Check for a Python or numpy integer from `low` to `high`, and return it as int."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {shown(value)}")
    number = int(value)
    if number < low or (high is not None and number > high):
        span = f"of at least {low}" if high is None else f"of {low} to {high}"
        raise ValueError(f"{name} must be an integer {span}, got {shown(number)}")
    return number


def check_num_layers(value: object) -> int:
    """Check a number of layers, before anything is made for each, and return it."""
    return check_integer("num_layers", value, 1, MAX_LAYERS)


def check_real(name: str, value: object, low: Real, high: Real = math.inf) -> float:
    """Check for a finite number from `low` to `high`, and return it as float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high or not math.isfinite(number):
        raise ValueError(f"{name} must be finite and {low:g} to {high:g}, got {shown(value)}")
    return number


def check_bool(name: str, value: object) -> None:
    """Check for True or False; numbers are not accepted."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")


def check_kv_dtype(kv_dtype: str | None) -> str | None:
    """Check the dtype of a cache's keys and values, and return it; None: that of the parameters."""
    if kv_dtype is not None and not (isinstance(kv_dtype, str) and kv_dtype == FP8_KV):
        raise ValueError(
            f"kv_dtype must be None, the dtype of the parameters, or {FP8_KV!r}, got {str(kv_dtype)[:60]!r}"
        )
    return kv_dtype


def check_token_ids(name: str, value: object, vocab_size: int = MAX_INT32) -> tuple[int, ...]:
    """Check for one token id, several or None, as files have them, and return them as a tuple."""
    ids = () if value is None else value if isinstance(value, list | tuple) else (value,)
    if len(ids) > _MAX_IDS:
        raise ValueError(f"{name} must have at most {_MAX_IDS} ids, got {len(ids)}")
    return tuple(check_integer(name, id, 0, vocab_size - 1) for id in ids)
