"""Asserts on the machine code of attention kernels, as ptxas makes it of their PTX: one ptxas, or both in all tests."""

import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks import cuda_tools, sass
from benchmarks.cuda_tools import Assembled
from benchmarks.sass import Loop, Program
from longctx.kernels.mosaic_gpu.schedule import Pipeline

VERSIONS = cuda_tools.VERSIONS[: None if os.environ.get("LONGCTX_TEST_ASSEMBLERS") == "all" else 1]
REGISTERS = 65536  # of a multiprocessor
WARPGROUP = 128  # threads


@dataclass(frozen=True)
class MachineCode:
    """One kernel as PTX, and as assembled by one ptxas."""

    ptx: str
    assembled: Assembled
    program: Program
    is_fp8: bool = False  # one warpgroup converts FP8 pages

    @property
    def name(self) -> str:
        return re.search(r"\.entry (\w+?)(_mosaic_gpu_kernel)?\(", self.ptx)[1]

    @property
    def num_warpgroups(self) -> int:
        return math.prod(map(int, re.search(r"\.maxntid (\d+), (\d+), (\d+)", self.ptx).groups())) // WARPGROUP

    @property
    def num_consumers(self) -> int:
        """Of a forward kernel: besides there is the producer, and for FP8 pages the converter."""
        return self.num_warpgroups - 1 - self.is_fp8


# What a warp issues for a block of keys, at most: 2 % more than it does today. Of blocks without a mask, with the mask
# of contiguous keys, and with that of pages, whose last block is cleaned too.
LIMITS = {64: (445, 760, 845), 128: (483, 796, 1096), 256: (442, 603, 1057)}
# With the mask of contiguous keys where rows have a first position, too.
LIMITS_WITH_FIRST = {64: 884, 128: 923, 256: 666}


def check_kernels(dumped: Path, copies: int = 1, is_fp8: bool = False, has_first: bool = False) -> None:
    """Check every kernel that was compiled, as ptxas assembles it.

    Args:
      dumped: the folder that Mosaic wrote PTX to.
      copies: number of copies of a block of keys, or of values, and of their scales.
      is_fp8: whether forward kernels read FP8 pages.
      has_first: whether rows of forward kernels, of contiguous keys, have a first position that they see.
    """
    for path in sorted(dumped.glob("*.ptx")):
        for version in VERSIONS:
            assembled = cuda_tools.assemble(path.read_text(), version)
            code = MachineCode(path.read_text(), assembled, sass.parse(assembled.sass), is_fp8)
            check_any(code)
            if code.name == "attention":
                check_forward(code, copies, has_first)
            elif code.name.startswith("attention_of"):
                check_backward(code)


def check_forward(code: MachineCode, copies: int, has_first: bool = False) -> None:
    """The loops over blocks of a consumer: their products, their length, and what is in flight when."""
    check_registers(code)
    check_barriers(code, copies)
    full, masked = code.program.steps
    products = Products.of(full)
    assert products == Products.of(masked) == Products.expected(products.head_size, products.block_kv)
    # Only pages are cleaned, by stores to shared memory.
    most_full, most_masked, most_cleaned = LIMITS[products.head_size]
    most_masked = LIMITS_WITH_FIRST[products.head_size] if has_first else most_masked
    assert len(full.body) <= most_full
    assert len(masked.body) <= (most_cleaned if masked.count("STS") else most_masked), len(masked.body)
    # All of the softmax of a block runs while the values of the one before are multiplied. Then the accumulator is
    # scaled and the weights are narrowed, in the other consumer's turn.
    assert set(sass.in_flight_under(full, "MUFU")) == {1}
    (idle,) = sass.idle_before(full, registers=False)
    assert idle <= products.head_size // 2 + 80
    for loop in (full, masked):
        # The values of a block are multiplied right behind the scores of the next.
        assert sass.idle_before(loop, registers=True) == [0]
        # The turn passes with both in flight, keys are free when the scores are done, values when none is in flight.
        assert sass.in_flight_at_arrivals(loop) == ([2, 1, 0] if code.num_consumers == 2 else [1, 0])
        check_arrivals(loop)


def check_backward(code: MachineCode) -> None:
    """A stage is free when no product is in flight."""
    assert code.program.steps
    for loop in code.program.steps:
        assert set(sass.in_flight_at_arrivals(loop)) <= {0}
        check_arrivals(loop)


def check_arrivals(loop: Loop) -> None:
    """All threads of a warpgroup arrive, as the barriers' counts expect."""
    arrivals = [x for x in loop.body if x.is_arrival]
    assert arrivals
    assert not [x for x in arrivals if x.predicate]


def check_barriers(code: MachineCode, copies: int) -> None:
    """Barriers are initialised with the arrivals that the schedule makes, for some number of stages."""
    found = barrier_counts(code.ptx)
    pipelines = [Pipeline(code.num_consumers, n, copies, n if code.is_fp8 else 0) for n in (2, 3, 4)]
    assert found in [expected_barriers(pipeline) for pipeline in pipelines], found


def check_any(code: MachineCode) -> None:
    """What holds for every kernel: no spill, nothing serialised, registers fit, stores are fenced from wgmma."""
    assert code.assembled.spilled_bytes == 0, code.assembled.report
    # ptxas tells with these notes that it waits for each wgmma by itself.
    assert not re.search(r"C75\d\d|serializ", code.assembled.report), code.assembled.report
    assert code.assembled.registers * code.num_warpgroups * WARPGROUP <= REGISTERS
    assert sass.unfenced(code.program.instructions) == []


def check_registers(code: MachineCode) -> None:
    """The limits that the warpgroups of a forward kernel set add up to no more than a multiprocessor has."""
    limits = [
        (action, int(n)) for action, n in re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", code.ptx)
    ]
    (consumer,) = [n for action, n in limits if action == "inc"] or [code.assembled.registers]
    others = [n for action, n in limits if action == "dec"] or [code.assembled.registers]
    assert len(others) == 1 + code.is_fp8
    assert (code.num_consumers * consumer + sum(others)) * WARPGROUP <= REGISTERS
    # ptxas allocates for the kernel as a whole what the launch gives, and for a warpgroup what it set.
    assert max(others) <= code.assembled.registers <= consumer


def barrier_counts(ptx: str) -> Counter[int]:
    """How many mbarriers are initialised with each number of arrivals."""
    constants = dict(re.findall(r"mov\.[bu]32\s+(%r\d+), (\d+);", ptx))
    counts = re.findall(r"mbarrier\.init\.shared(?:::cta)?\.b64 \[[^\]]+\], (%r\d+|\d+);", ptx)
    return Counter(int(constants.get(x, x)) for x in counts)


def expected_barriers(pipeline: Pipeline) -> Counter[int]:
    """What the schedule's barriers come to: every thread of a warpgroup arrives, of the one that copies too."""
    counts: Counter[int] = Counter()
    for barrier in pipeline.barriers.values():
        counts[barrier.arrivals * WARPGROUP] += barrier.number
    return counts


class Products(NamedTuple):
    """The products of one block in a forward kernel: instructions of each kind, and their columns."""

    scores: int
    values: int
    block_kv: int
    head_size: int

    @classmethod
    def of(cls, loop: Loop) -> "Products":
        columns: dict[bool, list[int]] = {False: [], True: []}
        for x in loop.body:
            if x.is_product:
                columns[x.reads_registers].append(int(re.match(r"HGMMA\.64x(\d+)x16\.F32", x.opcode)[1]))
        (block_kv,), (head_size,) = (set(columns[in_registers]) for in_registers in (False, True))
        return cls(len(columns[False]), len(columns[True]), block_kv, head_size)

    @classmethod
    def expected(cls, head_size: int, block_kv: int) -> "Products":
        return cls(head_size // 16, block_kv // 16, block_kv, head_size)
