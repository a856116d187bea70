"""Seeded mutations of bytes and of JSON values, for the fuzzers of this folder."""

import copy
import random
from typing import Any

import pytest

NUM_INPUTS = pytest.mark.parametrize("num_inputs", [300, pytest.param(50_000, marks=pytest.mark.slow)])
"""Runs a fuzzer on 300 inputs in `make test` and on 50,000 in `make test-all`."""

HOSTILE = (
    *(None, True, False, 0, -1, 1, 3, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63), 10**7, 10**400),
    *(0.0, -0.0, 0.5, 1e308, -1e-300, float("nan"), float("inf"), -float("inf")),
    *("", "x", "0", "\x00", "\ud800", "\u202e", "../../etc/passwd", "/etc/passwd", "{{", "%s" * 8, "a" * 10_000),
    *([], {}, [[]], [None], [{}], {"": None}, {"rope_type": []}, [0] * 1000),
)
"""Values of wrong types, out of range, or on a limit, of which JSON can hold all."""


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, repeat, insert or remove some bytes."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(result) + 1)
        end = min(len(result), at + rng.choice((1, 1, 2, 8, 64)))
        match rng.randrange(6):
            case 0 if at < len(result):
                result[at] ^= 1 << rng.randrange(8)
            case 1:
                del result[at:end]
            case 2:
                del result[at:]
            case 3:
                result[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
            case 4:
                result[at:end] = rng.choice((b"\x00", b"\xff", b"{", b'"', b"[" * 50, b"9" * 30)) * (end - at)
            case _:
                result[at:at] = result[at:end] * rng.choice((1, 2, 50))
    return bytes(result)


def mutate_json(rng: random.Random, value: Any) -> Any:
    """Return a copy of a JSON value of which one or several parts are replaced, removed, added or swapped."""
    result = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        result = _mutate_once(rng, result)
    return result


def _mutate_once(rng: random.Random, value: Any) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.02:
        return copy.deepcopy(rng.choice(HOSTILE))
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.7:
        value[key] = _mutate_once(rng, value[key])
        return value
    match rng.randrange(4):
        case 0:
            del value[key]
        case 1:
            other = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
            value[key], value[other] = value[other], value[key]
        case 2 if isinstance(value, dict):
            value[str(rng.choice(("x", "", key)))] = copy.deepcopy(rng.choice(HOSTILE))
        case _:
            value[key] = copy.deepcopy(rng.choice(HOSTILE))
    return value
