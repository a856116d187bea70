"""Checks of values and of files' contents, whose errors name the value, or the file, and what is allowed.

The checks for files and directories raise no other OSError than FileNotFoundError; those of `pathlib` do, by version.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from numbers import Integral
from pathlib import Path
from typing import Any

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


MAX_JSON_BYTES = 16 * 2**20
"""Largest JSON file that is read; the index of a model of 405B parameters has some 100 KB."""


def check_directory(path: Path) -> None:
    """Check for a directory; FileNotFoundError: there is none; ValueError: the system cannot look at the path."""
    if not stat.S_ISDIR(_mode(path)):
        raise FileNotFoundError(f"no such directory: {path}")


def is_file(path: Path) -> bool:
    """Whether there is a regular file; ValueError as in `check_directory`."""
    return stat.S_ISREG(_mode(path))


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, which need not be there; ValueError as in `check_directory`."""
    return path.suffix.lower() == ".gguf" and not stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    """Type and permissions; 0 if there is nothing."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no path has such characters
        return 0
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; FileNotFoundError: no such file; ValueError: unreadable, too large, too deep, no object."""
    text = read_text(path)
    try:
        contents = json.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path} is not JSON, or nested too deeply: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds {type(contents).__name__}, not a JSON object")
    return contents


def read_text(path: Path) -> str:
    """The text of a UTF-8 file of at most `MAX_JSON_BYTES`; raises as `read_json`."""
    if not is_file(path):
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
