"""Asserts on the machine code of attention kernels, as both versions of ptxas make it of their PTX."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks import cuda_tools, sass
from benchmarks.cuda_tools import Assembled
from benchmarks.sass import Loop, Program
from longctx.kernels.mosaic_gpu.schedule import Pipeline

REGISTERS = 65536  # of a multiprocessor
WARPGROUP = 128  # threads


@dataclass(frozen=True)
class MachineCode:
    """One kernel as PTX, and as assembled by one ptxas."""

    ptx: str
    assembled: Assembled
    program: Program

    @property
    def name(self) -> str:
        return re.search(r"\.entry (\w+?)(_mosaic_gpu_kernel)?\(", self.ptx)[1]

    @property
    def num_warpgroups(self) -> int:
        return math.prod(map(int, re.search(r"\.maxntid (\d+), (\d+), (\d+)", self.ptx).groups())) // WARPGROUP

    @property
    def num_consumers(self) -> int:
        """Of a forward kernel, whose last warpgroup is the producer."""
        return self.num_warpgroups - 1


def kernels_of(dumped: Path) -> list[MachineCode]:
    """Every kernel that was compiled, assembled by both versions of ptxas."""
    texts = [path.read_text() for path in sorted(dumped.glob("*.ptx"))]
    found = []
    for text in texts:
        for version in cuda_tools.VERSIONS:
            assembled = cuda_tools.assemble(text, version)
            found.append(MachineCode(text, assembled, sass.parse(assembled.sass)))
    return found


def check_any(code: MachineCode) -> None:
    """What holds for every kernel: no spill, nothing serialised, registers fit, stores are fenced from wgmma."""
    assert code.assembled.spilled_bytes == 0, code.assembled.report
    # ptxas tells with these notes that it waits for each wgmma by itself.
    assert not re.search(r"C75\d\d|serializ", code.assembled.report), code.assembled.report
    assert code.assembled.registers * code.num_warpgroups * WARPGROUP <= REGISTERS
    assert sass.unfenced(code.program.instructions) == []


def check_registers(code: MachineCode) -> None:
    """The limits that the warpgroups of a forward kernel set add up to no more than a multiprocessor has."""
    limits = {
        action: int(n) for action, n in re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", code.ptx)
    }
    consumer = limits.get("inc", code.assembled.registers)
    producer = limits.get("dec", code.assembled.registers)
    assert (code.num_consumers * consumer + producer) * WARPGROUP <= REGISTERS
    # ptxas allocates for the kernel as a whole what the launch gives, and for a warpgroup what it set.
    assert producer <= code.assembled.registers <= consumer


def barrier_counts(ptx: str) -> Counter[int]:
    """How many mbarriers are initialised with each number of arrivals."""
    constants = dict(re.findall(r"mov\.[bu]32\s+(%r\d+), (\d+);", ptx))
    counts = re.findall(r"mbarrier\.init\.shared(?:::cta)?\.b64 \[[^\]]+\], (%r\d+|\d+);", ptx)
    return Counter(int(constants.get(x, x)) for x in counts)


def expected_barriers(pipeline: Pipeline) -> Counter[int]:
    """What the schedule's barriers come to: a copy arrives once, and a warpgroup with each of its threads."""
    counts: Counter[int] = Counter()
    for name, barrier in pipeline.barriers.items():
        counts[barrier.arrivals * (1 if name.endswith("_ready") else WARPGROUP)] += barrier.number
    return counts


class Products(NamedTuple):
    """The products of one block in a forward kernel: instructions of each kind, and their shapes (rows, columns)."""

    scores: int
    values: int
    scores_shape: str
    values_shape: str

    @classmethod
    def of(cls, loop: Loop) -> "Products":
        kinds: Mapping[bool, list[str]] = {False: [], True: []}
        for x in loop.body:
            if x.is_product:
                kinds[x.reads_registers].append(re.match(r"HGMMA\.(64x\d+)x16\.F32", x.opcode)[1])
        (scores,), (values,) = (set(kinds[in_registers]) for in_registers in (False, True))
        return cls(len(kinds[False]), len(kinds[True]), scores, values)

    @classmethod
    def expected(cls, head_size: int, block_kv: int) -> "Products":
        return cls(head_size // 16, block_kv // 16, f"64x{block_kv}", f"64x{head_size}")
