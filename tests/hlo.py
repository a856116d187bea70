"""Reads collectives, and what runs while they travel, from the text of a compiled and scheduled XLA module."""

import math
import re
from typing import NamedTuple

OPCODES = ("collective-permute", "all-gather", "all-to-all", "all-reduce", "reduce-scatter")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
# What may have a result the size of a cache that is updated in place.
IN_PLACE = {"parameter", "tuple", "get-tuple-element", "while", "bitcast", "fusion", "dynamic-update-slice", "scatter"}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?)(?<=[)}\]]) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


class Collective(NamedTuple):
    opcode: str
    sent: float  # bytes that a rank sends to others
    is_async: bool
    hidden_by: tuple[str, ...]  # opcodes between start and done, in the order in which they are issued


def collectives(text: str, num_ranks: int) -> list[Collective]:
    found = []
    lines = [match.groups() for match in map(_INSTRUCTION.match, text.splitlines()) if match]
    for at, (name, shapes, opcode, rest) in enumerate(lines):
        kind = next((kind for kind in OPCODES if opcode in (kind, f"{kind}-start")), None)
        if kind is None:
            continue
        is_async, between = opcode.endswith("-start"), ()
        if is_async:
            done = next(
                i for i in range(at, len(lines)) if lines[i][2].endswith("-done") and f"%{name})" in lines[i][3] + ")"
            )
            between = tuple(opcode for _, _, opcode, _ in lines[at + 1 : done])
        found.append(
            Collective(
                kind, _sent(kind, shapes, num_ranks, is_async), is_async and 'is_sync":true' not in rest, between
            )
        )
    return found


def _sent(kind: str, shapes: str, n: int, is_async: bool) -> float:
    """From the shape of the result, which for an asynchronous one stands beside its operands'."""
    sizes = [BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d) for dtype, dims in _SHAPE.findall(shapes)]
    if kind == "collective-permute":
        return sum(sizes) / (2 if is_async else 1)
    if kind == "all-gather":
        return (max(sizes) if is_async else sum(sizes)) * (n - 1) / n
    if kind == "all-to-all":
        return sum(sizes) / (2 if is_async else 1) * (n - 1) / n
    if kind == "reduce-scatter":
        return sum(sizes) * (n - 1)
    raise NotImplementedError(f"bytes of {kind}")


def opcodes_of_size(text: str, elements: int) -> set[str]:
    """Opcodes, inside of fusions too, of all results with at least so many elements."""
    found = set()
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            _, shapes, opcode, _ = match.groups()
            if max(math.prod(int(d) for d in dims.split(",") if d) for _, dims in _SHAPE.findall(shapes)) >= elements:
                found.add(opcode)
    return found
