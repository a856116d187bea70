"""How long the machine code of one warp, or of two that share a scheduler, takes on a Hopper multiprocessor.

A multiprocessor has four schedulers. Each warp of a warpgroup is on another one, with a tensor core of its own, so one
scheduler and one warp of each consumer warpgroup stand for all. The warps issue in order, one instruction of either a
cycle, the one that has waited longest first. An instruction waits for the cycles that the compiler wrote into the one
before, for its scoreboards, and for its pipe. Products run one after another in the order of issue, beside all else.

Copies are taken to be there in time: this is the time of a kernel that waits for no memory. Turns, by which one of two
warpgroups multiplies, are kept where `Turns` says which barriers they are.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.sass import Instruction, Loop, Program

# Cycles that an instruction of 32 threads keeps its pipe: 32 over the results a cycle and scheduler.
# Source: CUDA C++ Programming Guide, throughput of arithmetic instructions, compute capability 9.0, whose numbers are
# those of four schedulers.
_PIPES: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("FADD", "FMUL", "FFMA"), ("float", 1)),  # 128
    **dict.fromkeys(("IMAD", "HFMA2"), ("integer product", 2)),  # 64
    **dict.fromkeys(
        ("FMNMX", "FSEL", "FSETP", "ISETP", "IADD3", "LOP3", "SHF", "LEA", "SEL", "PLOP3", "VIADD", "PRMT", "SGXT"),
        ("integer", 2),  # 64
    ),
    **dict.fromkeys(("VIADDMNMX", "IMNMX", "VIMNMX", "MOV", "CS2R"), ("integer", 2)),
    "F2FP": ("conversion", 2),  # 64
    "MUFU": ("special", 8),  # 16
    "SHFL": ("shared memory", 4),  # 32
    **dict.fromkeys(("LDS", "STS", "LD", "ST", "LDG", "STG", "SYNCS"), ("shared memory", 4)),
}
# Cycles until a result whose time varies is there. Shared memory and the second-level cache: Luo et al. 2024,
# Benchmarking and Dissecting the Nvidia Hopper GPU Architecture, table of latencies. The others are assumed, close to
# what such tables have for Volta to Ampere; none is fitted.
LATENCY = {"LDS": 29, "LD": 29, "LDG": 262, "MUFU": 24, "SHFL": 24, "SYNCS": 24, "BAR": 20, "S2R": 24, "R2UR": 12}
_OTHER_LATENCY = 12
# From a product's last multiplication until a wait for it ends; assumed.
_PRODUCT_LATENCY = 32


def product_cycles(x: Instruction) -> int:
    """Cycles of the tensor cores for HGMMA.64xNx16: 64 * N * 16 multiplications, 2048 a cycle and multiprocessor.

    Source: NVIDIA's data sheet: 989 TFLOP/s are 4096 FLOP a cycle on each of 132 multiprocessors at 1.83 GHz.
    """
    columns = int(x.opcode.split(".")[1].split("x")[1])
    return columns * 64 * 16 // 2048


@dataclass(frozen=True)
class Turns:
    """How two warps that run the same loop take turns.

    Args:
      waits: which of a pass's waits for barriers are for the turn, from 0.
      arrivals: which of its arrivals give it.
      lead: the n-th such wait of a warp, from 0, ends with the other's arrival number n + lead, from 0.
    """

    waits: tuple[int, ...]
    arrivals: tuple[int, ...]
    lead: tuple[int, int]

    def of(self, loop: Loop) -> tuple[set[int], set[int]]:
        """The waits and arrivals of a loop, by identity."""
        waits = [x for x in loop.body if x.opcode.endswith("TRYWAIT")]
        arrivals = [x for x in loop.body if x.is_arrival]
        return {id(waits[i]) for i in self.waits}, {id(arrivals[i]) for i in self.arrivals}


# `schedule.py`: a pass waits for k, its turn and v, and gives the turn, k and v. Consumer 0 begins.
OUR_TURNS = Turns((1,), (0,), (-1, 0))


@dataclass
class _Warp:
    stream: Sequence[Instruction]
    ready: float = 0
    position: int = 0
    scoreboards: list[float] = field(default_factory=lambda: [0.0] * 6)
    groups: list[float] = field(default_factory=list)  # when each group of products ends
    last_product: float = 0
    marks: list[float] = field(default_factory=list)
    turns: int = 0  # waited for
    given: list[float] = field(default_factory=list)  # when


def run(
    streams: Sequence[Sequence[Instruction]],
    starts: Sequence[float],
    mark: Instruction | None = None,
    turns: tuple[Turns, Loop] | None = None,
) -> list[list[float]]:
    """Issue the streams, one of each warp; the cycles at which each warp has issued `mark`, and then its end.

    Raises:
      RuntimeError: each warp waits for a turn that the other will not give.
    """
    warps = [_Warp(stream, ready) for stream, ready in zip(streams, starts, strict=True)]
    waits, arrivals = turns[0].of(turns[1]) if turns else (set(), set())
    pipes: dict[str, float] = {}
    tensor_core = scheduler = 0.0

    def earliest(number: int) -> float:
        """When a warp can issue its next instruction, if no other does at that time."""
        warp = warps[number]
        x = warp.stream[warp.position]
        at = max(warp.ready, pipes.get(_pipe(x)[0], 0), *(warp.scoreboards[i] for i in range(6) if x.waits >> i & 1), 0)
        if turns and id(x) in waits and (wanted := warp.turns + turns[0].lead[number]) >= 0:
            given = warps[1 - number].given
            at = max(at, given[wanted] + LATENCY["SYNCS"]) if wanted < len(given) else math.inf
        return at

    while running := [i for i, warp in enumerate(warps) if warp.position < len(warp.stream)]:
        # Of two that can, the one that waited longest.
        at, _, number = min((earliest(i), warps[i].ready, i) for i in running)
        if at == math.inf:
            # A warp whose partner has ended has every turn.
            if len(running) == len(warps):
                raise RuntimeError("no warp has its turn")
            turns = None
            continue
        warp, at = warps[number], max(at, scheduler)
        x = warp.stream[warp.position]
        scheduler = at + 1
        warp.position += 1
        warp.ready = at + max(1, x.stall)
        pipe, cycles = _pipe(x)
        pipes[pipe] = at + cycles
        for board, busy in ((x.sets, LATENCY.get(x.family, _OTHER_LATENCY)), (x.reads, _OTHER_LATENCY)):
            if board is not None:
                warp.scoreboards[board] = max(warp.scoreboards[board], at + cycles + busy)
        if x.is_product:
            tensor_core = max(at, tensor_core) + product_cycles(x)
            warp.last_product = tensor_core + _PRODUCT_LATENCY
            if "gsb0" in x.operands:
                warp.groups.append(warp.last_product)
        elif x.opcode.startswith("WARPGROUP.DEPBAR"):
            left = int(x.operands.rpartition(",")[2], 16)
            if len(warp.groups) > left:
                warp.ready = max(warp.ready, warp.groups[len(warp.groups) - left - 1])
        elif x.family == "BAR":
            warp.ready = max(warp.ready, at + LATENCY["BAR"])
        warp.turns += id(x) in waits
        if id(x) in arrivals:
            warp.given.append(at)
        if x is mark:
            warp.marks.append(at)
    return [[*warp.marks, max(warp.ready, warp.last_product)] for warp in warps]


def _pipe(x: Instruction) -> tuple[str, int]:
    return _PIPES.get(x.family, ("other", 1))


def loop_cycles(loop: Loop, num_warps: int, turns: Turns | None = None, passes: int = 24) -> float:
    """Cycles of one pass of a loop in the steady state, of `num_warps` warps on a scheduler that all run it.

    Each does one pass in that time. They begin half a pass apart.
    """
    last = loop.body[-1]
    alone = run([[*loop.body] * 4], [0], last)[0]
    offset = (alone[3] - alone[1]) / 2 / num_warps
    kept = (turns, loop) if turns and num_warps == 2 else None
    ends = run([[*loop.body] * passes] * num_warps, [offset * i for i in range(num_warps)], last, kept)
    half = passes // 2
    return max((marks[passes - 1] - marks[half - 1]) / (passes - half) for marks in ends)


def tensor_cycles(body: Iterable[Instruction]) -> int:
    """Cycles of the tensor cores for one pass."""
    return sum(product_cycles(x) for x in body if x.is_product)


@dataclass(frozen=True)
class ItemCost:
    """Cycles of an item (a tile of one head) on a multiprocessor: of each block, and beside its blocks."""

    full: float
    masked: float
    beside: float

    def of(self, full: float, masked: float) -> float:
        return self.beside + full * self.full + masked * self.masked


def item_cost(program: Program, num_warps: int, turns: Turns | None = OUR_TURNS) -> ItemCost:
    """The cost of an item for the consumers of a forward kernel.

    Its innermost loops with products are those over blocks without and with a mask (one loop: no block has one). Beside
    them is the rest of the smallest loop around both, the one over items, or else of the program up to its end. It is
    run with few blocks, and what these cost is taken off, without turns. Branches ahead are not taken there.
    """
    full, masked = program.steps[0], program.steps[-1]
    with_turns = loop_cycles(full, num_warps, turns), loop_cycles(masked, num_warps, turns)
    alone = loop_cycles(full, num_warps), loop_cycles(masked, num_warps)
    around = [x for x in program.loops if x.start < full.start and masked.stop < x.stop]
    if around:
        outer = min(around, key=lambda x: x.stop - x.start)
        start, stop = outer.start, outer.stop
    else:
        ends = (i for i, x in enumerate(program.instructions) if i >= masked.stop and x.family == "EXIT")
        start, stop = 0, next(ends, len(program.instructions) - 1) + 1
    blocks, items = 4, 6
    item = [*program.instructions[start : full.start], *[*full.body] * blocks]
    if masked is not full:
        item += [*program.instructions[full.stop : masked.start], *masked.body]
    item += program.instructions[masked.stop : stop]
    ends = run([item * items] * num_warps, [i * alone[0] / num_warps for i in range(num_warps)], item[-1])
    period = max((marks[items - 1] - marks[1]) / (items - 2) for marks in ends)
    counted = blocks * alone[0] + (alone[1] if masked is not full else 0)
    return ItemCost(*with_turns, max(0.0, period - counted))
