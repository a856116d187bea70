"""Reads the machine code of a kernel, as `nvdisasm -c -hex` lists it: instructions, loops, and what they wait for.

The upper half of an encoding holds what the compiler decided about time: the cycles after which the warp may issue its
next instruction, and the scoreboards to wait for and to set (of six; for instructions whose time varies).

Source: Jia et al. 2018, Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking, 2.1; Hopper keeps the
places of these bits.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]+)\*/\s+(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);"
)
_ENCODING = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\((\.L\w+)\)")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
      opcode: with its modifiers, as in HGMMA.64x128x16.F32.BF16.
      operands: as listed.
      predicate: as in P0 or !UP1; empty where it always runs.
      stall: cycles until the warp may issue its next instruction.
      waits: scoreboards that must be free before it issues, a bit each.
      sets: the scoreboard that its result frees, or None.
      reads: the scoreboard that reading its operands frees, or None.
      target: number of the instruction that it may branch to, or None.
    """

    opcode: str
    operands: str = ""
    predicate: str = ""
    stall: int = 1
    waits: int = 0
    sets: int | None = None
    reads: int | None = None
    target: int | None = None

    @property
    def family(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def is_product(self) -> bool:
        return self.family == "HGMMA"

    @property
    def reads_registers(self) -> bool:
        """Whether the first factor of a product is in registers, as the weights of attention are."""
        return self.is_product and "gdesc" not in self.operands.split(",")[1]

    @property
    def is_arrival(self) -> bool:
        """Whether it arrives on an mbarrier without announcing a copy."""
        return self.opcode.startswith("SYNCS.ARRIVE") and self.opcode.endswith(("A1T0", "ART0"))

    @property
    def ends_path(self) -> bool:
        """Whether the next instruction is never reached through it."""
        if self.predicate:
            return False
        conditional = "," in self.operands  # BRA.U with a uniform predicate as its operand
        return self.family in ("EXIT", "RET") or (self.family == "BRA" and not conditional)


@dataclass(frozen=True)
class Loop:
    """Instructions [start, stop) of a program, the last of which goes back to the first.

    What the compiler put behind the program's end, as the waiting of a barrier that was not ready, is not among them.
    """

    start: int
    stop: int
    body: tuple[Instruction, ...]

    @cached_property
    def families(self) -> Counter[str]:
        return Counter(x.family for x in self.body)

    @property
    def products(self) -> int:
        return self.families["HGMMA"]

    def count(self, prefix: str) -> int:
        """Number of instructions whose opcode begins so."""
        return sum(x.opcode.startswith(prefix) for x in self.body)


@dataclass(frozen=True)
class Program:
    """The instructions of one kernel."""

    instructions: tuple[Instruction, ...]

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, in the order of their starts: the branch back is reached only through the start."""
        dominators = _dominators(self.instructions)
        ends: dict[int, int] = {}
        for i, x in enumerate(self.instructions):
            if x.target is not None and x.target <= i and dominators[i] >> x.target & 1:
                ends[x.target] = max(ends.get(x.target, 0), i)
        return [Loop(start, i + 1, self.instructions[start : i + 1]) for start, i in sorted(ends.items())]

    @property
    def steps(self) -> list[Loop]:
        """Loops that multiply with none inside that does: over the blocks of a consumer."""
        loops = [loop for loop in self.loops if loop.products]
        return [a for a in loops if not any(a is not b and a.start <= b.start and b.stop <= a.stop for b in loops)]


def parse(listing: str) -> Program:
    """Read the listing of one kernel.

    Raises:
      ValueError: it has no instruction, lacks encodings (`-hex`), or branches to a label that it doesn't have.
    """
    labels: dict[str, int] = {}
    found: list[tuple[re.Match[str], int]] = []
    for line, following in itertools.pairwise([*listing.splitlines(), ""]):
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.match(line):
            encoding = _ENCODING.search(following)
            if encoding is None or _INSTRUCTION.match(following):
                raise ValueError(f"the listing has no encoding (nvdisasm -hex) of: {line.strip()}")
            found.append((instruction, int(encoding[1], 16)))
    if not found:
        raise ValueError("the listing has no instruction")
    return Program(tuple(_instruction(match, upper, labels, len(found)) for match, upper in found))


def _instruction(match: re.Match[str], upper: int, labels: dict[str, int], number: int) -> Instruction:
    operands, target = match["operands"].strip(), None
    if match["opcode"].startswith("BRA") and (label := _TARGET.search(operands)):
        if labels.get(label[1], number) >= number:
            raise ValueError(f"the listing has no instruction at {label[1]}")
        target = labels[label[1]]
    sets, reads = upper >> 46 & 7, upper >> 49 & 7
    return Instruction(
        match["opcode"],
        operands,
        match["predicate"] or "",
        stall=upper >> 41 & 15,
        waits=upper >> 52 & 63,
        sets=None if sets == 7 else sets,
        reads=None if reads == 7 else reads,
        target=target,
    )


def _dominators(instructions: Sequence[Instruction]) -> list[int]:
    """For each instruction the set of those through which every path from the first one goes, a bit each."""
    before: list[list[int]] = [[] for _ in instructions]
    for i, x in enumerate(instructions):
        if not x.ends_path and i + 1 < len(instructions):
            before[i + 1].append(i)
        if x.target is not None:
            before[x.target].append(i)
    everything = (1 << len(instructions)) - 1
    dominators = [everything] * len(instructions)
    dominators[0], changed = 1, True
    while changed:
        changed = False
        for i in range(1, len(instructions)):
            through = everything
            for j in before[i]:
                through &= dominators[j]
            if (through := through | 1 << i) != dominators[i]:
                dominators[i], changed = through, True
    return dominators


def in_flight(instructions: Sequence[Instruction], at_start: int = 0) -> Iterator[int]:
    """Groups of products in flight once each instruction has issued; a wait for the last n leaves n."""
    number = at_start
    for x in instructions:
        if x.is_product and "gsb0" in x.operands:
            number += 1
        elif x.opcode.startswith("WARPGROUP.DEPBAR"):
            number = min(number, int(x.operands.rpartition(",")[2], 16))
        yield number


def in_flight_at_arrivals(loop: Loop) -> list[int]:
    """For each arrival on an mbarrier in one turn of a loop, the groups of products in flight."""
    *_, left = in_flight(loop.body)
    return [n for x, n in zip(loop.body, in_flight(loop.body, left), strict=True) if x.is_arrival]


def in_flight_under(loop: Loop, family: str) -> Counter[int]:
    """How many instructions of a family issue in one turn of a loop with each number of groups in flight."""
    *_, left = in_flight(loop.body)
    flying = in_flight(loop.body, left)
    return Counter(n for x, n in zip(loop.body, flying, strict=True) if x.family == family)


def idle_before(loop: Loop, registers: bool) -> list[int]:
    """Instructions that a warp issues between its last product's end and the first product of each group.

    0 where another product is still in flight. Of groups whose first factor is in registers, or in shared memory.
    """
    turns = [*loop.body, *loop.body]
    idle: list[int] = []
    since, previous = 0, None
    for i, (x, flying) in enumerate(zip(turns, in_flight(turns), strict=True)):
        if x.opcode.startswith("WARPGROUP.DEPBAR") and not flying:
            since = i
        elif x.is_product:
            begins = previous is None or "gsb0" in previous.operands or previous.reads_registers != x.reads_registers
            busy = flying > ("gsb0" in x.operands) or (previous is not None and "gsb0" not in previous.operands)
            if begins and i >= len(loop.body) and x.reads_registers == registers:
                idle.append(0 if busy else i - since - 1)
            previous = x
    return idle


def unfenced(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Stores to shared memory that a later product may read, or a later arrival tell of, without a fence between.

    wgmma reads shared memory by another proxy than stores write it: PTX asks for fence.proxy.async between.
    """
    open_stores: list[Instruction] = []
    found: list[Instruction] = []
    for x in instructions:
        if x.family in ("STS", "STSM"):
            open_stores.append(x)
        elif x.opcode.startswith("FENCE.VIEW.ASYNC"):
            open_stores = []
        elif x.is_product or x.is_arrival:
            found, open_stores = [*found, *open_stores], []
    return found
