"""Parses the text of a compiled and scheduled XLA module: its collectives, and what runs during them."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

OPCODES = ("collective-permute", "all-gather", "all-to-all", "all-reduce", "reduce-scatter")
BYTES = dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn"), 1) | dict.fromkeys(("bf16", "f16", "u16"), 2)
BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
# Opcodes that may have results the size of the cache if it is updated in place; of a call, its instructions count.
IN_PLACE = {"parameter", "tuple", "get-tuple-element", "while", "bitcast", "fusion", "call"}
IN_PLACE |= {"dynamic-update-slice", "scatter"}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?)(?<=[)}\]]) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_CALL = re.compile(r"\b(body|true_computation|false_computation)=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
# How jax 0.12 writes them, and 0.10 some.
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_STRIDED_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


class Collective(NamedTuple):
    """A collective of a module."""

    opcode: str
    sent: float  # bytes that a rank sends to others
    is_async: bool
    hidden_by: tuple[str, ...]  # opcodes between start and done, in the order in which they are issued
    # The computations that it is in, the outermost first: "body of 16" (a loop of 16 trips), "true_computation",
    # "false_computation".
    within: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]  # devices that exchange data; (source, target) for a permute; empty: all

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of a mesh with these sizes along which the devices of a group differ."""
        groups = [np.unravel_index(group, tuple(sizes.values())) for group in self.groups]
        return tuple(name for at, name in enumerate(sizes) if any(np.ptp(group[at]) for group in groups))


def collectives(text: str, num_ranks: int) -> list[Collective]:
    """All collectives of a module; `num_ranks` is the size of a group where the text does not give it."""
    found = []
    lines, callers = _parse(text)
    for at, (computation, name, shapes, opcode, rest) in enumerate(lines):
        kind = next((kind for kind in OPCODES if opcode in (kind, f"{kind}-start")), None)
        if kind is None:
            continue
        is_async, between = opcode.endswith("-start"), ()
        if is_async:
            done = next(
                i for i in range(at, len(lines)) if lines[i][3].endswith("-done") and f"%{name})" in lines[i][4] + ")"
            )
            between = tuple(opcode for _, _, _, opcode, _ in lines[at + 1 : done])
        groups = _groups(rest)
        members = len(groups[0]) if groups and kind != "collective-permute" else num_ranks
        sent = _sent(kind, shapes, members, is_async)
        is_async = is_async and 'is_sync":true' not in rest
        within: list[str] = []
        while computation in callers:
            how, computation = callers[computation]
            within.insert(0, how)
        found.append(Collective(kind, sent, is_async, between, tuple(within), groups))
    return found


def _parse(text: str) -> tuple[list[tuple[str, str, str, str, str]], dict[str, tuple[str, str]]]:
    """Parse a module.

    Returns:
      (computation, name, shapes, opcode, rest of the line) of every instruction, and for each body of a loop or branch
      how it is called and the computation that calls it.
    """
    lines, callers, computation = [], {}, ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        elif match := _INSTRUCTION.match(line):
            name, shapes, opcode, rest = match.groups()
            lines.append((computation, name, shapes, opcode, rest))
            for how, called in _CALL.findall(rest):
                trips = _TRIPS.search(rest)
                callers[called] = (f"{how} of {trips[1]}" if how == "body" and trips else how, computation)
    return lines, callers


def _groups(rest: str) -> tuple[tuple[int, ...], ...]:
    if match := _GROUPS.search(rest):
        return tuple(tuple(map(int, group.split(","))) for group in match[1].strip("{}").split("},{"))
    if match := _STRIDED_GROUPS.search(rest):
        shape, dims, order = ([int(x) for x in part.split(",")] if part else [] for part in match.groups())
        groups = np.arange(math.prod(dims)).reshape(dims).transpose(order or None).reshape(shape)
        return tuple(map(tuple, groups.tolist()))
    if match := _MESH_GROUPS.search(rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        dims, axes = ([int(x) for x in part.split(",")] if part else None for part in match.groups()[1:3])
        inner = re.findall(r"'(\w+)'", match[4])
        outer = [name for name in sizes if name not in inner]
        order = [list(sizes).index(name) for name in (*outer, *inner)]
        ids = np.arange(math.prod(sizes.values())).reshape(dims or -1).transpose(axes)
        groups = ids.reshape(*sizes.values()).transpose(order)
        return tuple(map(tuple, groups.reshape(-1, math.prod(sizes[name] for name in inner)).tolist()))
    if "replica_groups=" in rest and "replica_groups={}" not in rest:
        raise ValueError(f"replica_groups of an unknown form: {rest}")
    return ()


def _sent(kind: str, shapes: str, n: int, is_async: bool) -> float:
    """Bytes sent, from the shapes of the result.

    Those of an asynchronous collective include its operands; before jax 0.12 not those of an all-reduce.
    """
    size = sum(BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d) for dtype, dims in _SHAPE.findall(shapes))
    if kind == "collective-permute":
        return size / (2 if is_async else 1)
    if kind == "all-gather":
        return size * (n - 1) / (n + 1 if is_async else n)
    if kind == "all-to-all":
        return size / (2 if is_async else 1) * (n - 1) / n
    if kind == "all-reduce":
        return 2 * size / (2 if shapes.startswith("((") else 1) * (n - 1) / n
    return size / (n + 1 if is_async else 1) * (n - 1)


def opcodes_of_size(text: str, elements: int) -> set[str]:
    """Opcodes of all results with at least `elements` elements, those inside fusions included."""
    found = set()
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            _, shapes, opcode, _ = match.groups()
            if max(math.prod(int(d) for d in dims.split(",") if d) for _, dims in _SHAPE.findall(shapes)) >= elements:
                found.add(opcode)
    return found


# Opcodes that pass their operand on, and those that write an array of nothing but its elements.
_VIEWS = (
    "bitcast",
    "optimization-barrier",
    "copy-done",
    "async-done",
    "slice-done",
    "dynamic-slice-done",
    "fusion-done",
)
_STARTS = ("copy-start", "slice-start", "dynamic-slice-start")
_MOVES = ("copy", "transpose", "reshape", "slice", "dynamic-slice", "concatenate", "convert", "pad", "bitcast-convert")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|body|to_apply)=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")


def copied_bytes(text: str, argument: str) -> int:
    """Bytes of arrays that a module makes of nothing but elements of an argument: copies of it, or of parts of it.

    Copies inside a loop count as often as it runs. What computes with the elements, as a product does, counts nothing;
    nor does a row that is looked up in a table.

    Args:
      argument: the name of the jitted function's argument, a pytree.
    """
    lines, _ = _parse(text)
    bodies: dict[str, list[tuple[str, str, str, str]]] = {}
    for computation, *instruction in lines:
        bodies.setdefault(computation, []).append(tuple(instruction))  # type: ignore[arg-type]
    (entry,) = re.findall(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)

    def walk(computation: str, operands: list[Any] | None, is_fused: bool) -> tuple[Any, int]:
        """Whether the result is elements of the argument, a list of that for a tuple, and the bytes that are copied."""
        made: dict[str, Any] = {}
        copied, result = 0, False
        for name, shapes, opcode, rest in bodies[computation]:
            names = _OPERAND.findall(rest.split("), ")[0])
            given, moved = [made.get(each, False) for each in names], 0
            if opcode == "parameter":
                at = int(rest.split(")")[0])
                result = re.search(rf'op_name="{argument}\b', rest) is not None if operands is None else operands[at]
            elif opcode == "tuple":
                result = given
            elif opcode == "get-tuple-element":
                index = _INDEX.search(rest)
                assert index is not None
                result = given[0][int(index[1])] if isinstance(given[0], list) else given[0]
            elif opcode in ("while", "fusion", "fusion-start", "call", "async-start"):
                called = _CALLED.search(rest)
                assert called is not None
                inputs = given if opcode != "while" else [given[0]]
                result, moved = walk(called[1], inputs, is_fused or opcode.startswith("fusion"))
                trips = _TRIPS.search(rest) if opcode == "while" else None
                moved *= int(trips[1]) if trips else 1
                if opcode.startswith("fusion") and not is_fused:
                    moved = _moved(shapes, result)
            elif opcode in _VIEWS:
                result = given[0]
            elif opcode in _MOVES + _STARTS:
                result = any(each is True for each in given[: None if opcode == "concatenate" else 1])
                moved = 0 if is_fused else _moved(shapes, result)
            else:
                result = False
            made[name] = result
            copied += moved
        return result, copied

    return walk(entry, None, False)[1]


def _moved(shapes: str, is_moved: Any) -> int:
    """Bytes of the arrays of a result that are elements of the argument; the first is what a start writes."""
    found = [(dtype, math.prod(map(int, filter(None, dims.split(","))))) for dtype, dims in _SHAPE.findall(shapes)]
    flags = is_moved if isinstance(is_moved, list) else [is_moved]
    return sum(BYTES[dtype] * size for (dtype, size), flag in zip(found, flags, strict=False) if flag is True)
