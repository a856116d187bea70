"""What the checks of machine code read from PTX, and that they notice what is wrong."""

import dataclasses
from collections import Counter

import pytest
from machine_code import MachineCode, barrier_counts, check_any, check_barriers, check_registers, expected_barriers

from benchmarks.cuda_tools import Assembled
from benchmarks.sass import Instruction, Program
from longctx.kernels.mosaic_gpu.schedule import Pipeline

REPORT = """ptxas info    : Compiling entry function 'attention_mosaic_gpu_kernel' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers"""


def code(pipeline: Pipeline, report: str = REPORT, consumer: int = 232, *instructions: Instruction) -> MachineCode:
    lines = [".visible .entry attention_mosaic_gpu_kernel(", f".maxntid {128 * (pipeline.num_consumers + 1)}, 1, 1"]
    lines += [f"setmaxnreg.inc.sync.aligned.u32 {consumer};", "setmaxnreg.dec.sync.aligned.u32 40;"]
    number = 10
    for count, times in expected_barriers(pipeline).items():
        number += 1
        lines.append(f"mov.b32 %r{number}, {count};")
        lines += [f"@%p1 mbarrier.init.shared.b64 [%r1], %r{number};"] * times
    return MachineCode("\n".join(lines), Assembled("13.0.88", report, ""), Program(instructions))


def test_barriers_are_counted() -> None:
    pipeline = Pipeline(2, 3, 1)
    found = code(pipeline)
    assert barrier_counts(found.ptx) == expected_barriers(pipeline)
    # Ready: 3 of k and of v, 2 of q. Free likewise, with two consumers for k and v. And two turns.
    assert expected_barriers(pipeline) == Counter({128: 2 + 2 + 6 + 2, 256: 6})
    check_barriers(found, copies=1)
    with pytest.raises(AssertionError):
        check_barriers(found, copies=2)
    one_more = dataclasses.replace(found, ptx=found.ptx + "\n@%p1 mbarrier.init.shared.b64 [%r1], 128;")
    with pytest.raises(AssertionError):
        check_barriers(one_more, copies=1)


def test_registers_must_fit() -> None:
    check_registers(code(Pipeline(2, 3, 1)))
    with pytest.raises(AssertionError):
        check_registers(code(Pipeline(2, 3, 1), consumer=240))
    with pytest.raises(AssertionError):
        check_any(code(Pipeline(2, 3, 1), REPORT.replace("168", "176")))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0 bytes spill stores", "4 bytes spill stores"),
        ("0 bytes spill loads", "8 bytes spill loads"),
        ("ptxas info    : Used", "ptxas info    : (C7510) Potential Performance Loss: wgmma\nptxas info    : Used"),
        ("ptxas info    : Used", "wgmma.mma_async instructions are serialized due to\nptxas info    : Used"),
    ],
)
def test_what_ptxas_reports_is_noticed(old: str, new: str) -> None:
    check_any(code(Pipeline(1, 3, 1)))
    with pytest.raises(AssertionError):
        check_any(code(Pipeline(1, 3, 1), REPORT.replace(old, new)))


def test_a_store_without_a_fence_is_noticed() -> None:
    product = Instruction("HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR4], R24")
    with pytest.raises(AssertionError):
        check_any(code(Pipeline(1, 3, 1), REPORT, 232, Instruction("STS"), product))
