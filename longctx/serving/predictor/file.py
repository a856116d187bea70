"""Profiles on disk: a predictor, and the engine that it was measured on, as it is valid for no other."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from longctx.serving.predictor.measured import RuntimePredictor
from longctx.serving.predictor.runtime import CurvePredictor, Predictor

_FORMAT = "longctx profile 2"
Writable = RuntimePredictor | CurvePredictor
"""Predictors that can be written as plain data."""
_T = TypeVar("_T", RuntimePredictor, CurvePredictor)


def predictor_to_dict(predictor: Predictor) -> dict[str, Any]:
    """A predictor as JSON has it, with its `kind`. ValueError: it is a custom one, which can't be written."""
    if not isinstance(predictor, Writable):
        raise ValueError(f"predictor must be one of longctx.serving.predictor, got {type(predictor).__name__}")
    return dataclasses.asdict(predictor) | {"kind": type(predictor).__name__}


def predictor_from_dict(fields: Mapping[str, Any]) -> Writable:
    """The predictor of such fields; KeyError or ValueError if they are none."""
    kind = fields["kind"]
    if kind == CurvePredictor.__name__:
        return _decode(fields, CurvePredictor)
    if kind != RuntimePredictor.__name__:
        raise ValueError(f"its predictor is a {kind!r}")
    return _decode(fields, RuntimePredictor)


def _decode(fields: Any, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def save_profile(
    path: Path,
    predictor: RuntimePredictor,
    subject: Mapping[str, Any],
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write a predictor as JSON; `subject` describes the measured engine, `notes` is any further plain data."""
    contents = {"format": _FORMAT, "subject": dict(subject), "predictor": dataclasses.asdict(predictor)}
    if notes:
        contents["notes"] = dict(notes)
    path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


def load_profile(path: Path, subject: Mapping[str, Any]) -> RuntimePredictor:
    """Read the predictor of a profile that was measured on this subject.

    Raises:
      OSError: the file can't be read.
      ValueError: it is not a profile, or it is of another subject; the message names the difference.
    """
    predictor, measured = read_profile(path)
    expected = json.loads(json.dumps(dict(subject)))
    for name in sorted(measured.keys() | expected.keys()):
        if measured.get(name) != expected.get(name):
            raise ValueError(
                f"{path} was measured on another engine: {name} is {measured.get(name)} there and "
                f"{expected.get(name)} here; `longctx profile` measures this one"
            )
    return predictor


def read_profile(path: Path) -> tuple[RuntimePredictor, dict[str, Any]]:
    """Read the predictor of a profile, and the subject that it was measured on.

    Raises:
      OSError: the file can't be read.
      ValueError: it is not a profile.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        if contents["format"] != _FORMAT:
            raise ValueError(f"its format is {contents['format']!r}")
        measured, predictor = dict(contents["subject"]), _decode(contents["predictor"], RuntimePredictor)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a profile as `longctx profile` writes it: {error}") from None
    return predictor, measured
