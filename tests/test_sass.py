"""The reader of machine code, on small listings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import sass
from benchmarks.sass import Instruction, Loop, Program

QK = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR24], R24"
PV = "HGMMA.64x128x16.F32.BF16 R88, R24, gdesc[UR8].tnspB, R88"
LAST = ", gsb0"
ARRIVE = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR24], RZ"
WAIT_ALL, WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"


def listing(*lines: str, stall: int = 1, waits: int = 0, sets: int = 7, reads: int = 7) -> str:
    """As nvdisasm prints it: labels end with a colon."""
    upper = stall << 41 | sets << 46 | reads << 49 | waits << 52
    text, address = ["\t.target\tsm_90a"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"        /*{address:04x}*/                   {line} ;   /* 0x000000ff11167210 */")
            text.append(f"{'':99}/* 0x{upper:016x} */")
            address += 16
    return "\n".join(text)


def loop_of(*lines: str) -> Loop:
    (loop,) = sass.parse(listing(".L_x_0:", *lines, "@P0 BRA `(.L_x_0)", "EXIT")).loops
    return loop


@given(st.integers(0, 15), st.integers(0, 63), st.integers(0, 7), st.integers(0, 7))
def test_the_compilers_timing_is_read(stall: int, waits: int, sets: int, reads: int) -> None:
    program = sass.parse(listing("@!UP1 FADD.FTZ R1, R2, R3", stall=stall, waits=waits, sets=sets, reads=reads))
    boards = [None if x == 7 else x for x in (sets, reads)]
    wanted = Instruction("FADD.FTZ", "R1, R2, R3", "!UP1", stall, waits, *boards)
    assert program == Program((wanted,))
    assert wanted.family == "FADD"


def test_a_wait_put_behind_the_end_is_no_loop() -> None:
    """It comes back to where it left, which is also reached without it. Its own turning is one."""
    waiting = (".L_x_2:", "SYNCS.PHASECHK.TRANS64 P1, [R1], R2", "@!P1 BRA `(.L_x_2)", "BRA `(.L_x_1)")
    code = (
        ".L_x_0:",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2",
        "@!P1 BRA `(.L_x_2)",
        ".L_x_1:",
        "FADD R1, R1, R1",
    )
    program = sass.parse(listing("MOV R1, R2", *code, "BRA.U !UP0, `(.L_x_0)", "EXIT", *waiting))
    assert [(loop.start, loop.stop) for loop in program.loops] == [(1, 5), (6, 8)]
    assert program.loops[0].families == {"SYNCS": 1, "BRA": 2, "FADD": 1}
    assert program.steps == []


def test_only_the_smallest_loops_that_multiply_are_steps() -> None:
    inner = (".L_x_2:", "FADD R1, R1, R1", ".L_x_1:", "NANOSLEEP 0x10", "@P1 BRA `(.L_x_1)", PV, "@P2 BRA `(.L_x_2)")
    program = sass.parse(listing(".L_x_0:", "MOV R1, R2", *inner, "@P0 BRA `(.L_x_0)", "EXIT"))
    assert [(loop.start, loop.stop) for loop in program.loops] == [(0, 7), (1, 6), (2, 4)]
    (step,) = program.steps
    assert (step.start, step.stop, step.products) == (1, 6, 1)


def test_what_is_in_flight_at_arrivals() -> None:
    body = (QK, QK + LAST, PV, PV + LAST, ARRIVE, WAIT_BUT_ONE, ARRIVE, "MUFU.EX2 R1, R2", WAIT_ALL, ARRIVE)
    assert sass.in_flight_at_arrivals(loop_of(*body)) == [2, 1, 0]
    assert sass.in_flight_under(loop_of(*body), "MUFU") == {1: 1}
    # Without a wait, what one turn leaves is in flight in the next.
    for wait, expected in ((WAIT_BUT_ONE, [2, 2, 0]), (WAIT_ALL, [3, 1, 1])):
        assert sass.in_flight_at_arrivals(loop_of(*(x for x in body if x != wait))) == expected


def test_idle_instructions_before_products() -> None:
    apart = (QK + LAST, WAIT_ALL, "FADD R1, R1, R1", "FADD R1, R1, R1", PV + LAST, WAIT_ALL, "FMUL R1, R1, R1")
    # Of both warpgroups' products none is in flight over two additions; and over the branch and the multiplication.
    assert sass.idle_before(loop_of(*apart), registers=True) == [2]
    assert sass.idle_before(loop_of(*apart), registers=False) == [2]
    together = (PV, PV + LAST, "UMOV UR4, 0x1", QK, QK + LAST, WAIT_BUT_ONE, "FADD R1, R1, R1", WAIT_ALL)
    assert sass.idle_before(loop_of(*together), registers=False) == [0]
    assert sass.idle_before(loop_of(*together), registers=True) == [1]


def test_stores_that_no_fence_follows() -> None:
    store, fence = "STS [R1], R2", "FENCE.VIEW.ASYNC.S"
    for reader in (PV, ARRIVE):
        assert sass.unfenced(loop_of(store, fence, reader).body) == []
        (found,) = sass.unfenced(loop_of(store, reader).body)
        assert found.family == "STS"
        assert len(sass.unfenced(loop_of(fence, store, reader, fence).body)) == 1
    assert sass.unfenced(loop_of(PV, store).body) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no instruction"),
        (".target sm_90a", "no instruction"),
        ("        /*0000*/   EXIT ;", "no encoding"),
        (listing("@P0 BRA `(.L_x_9)", "EXIT"), r"no instruction at \.L_x_9"),
        (listing("@P0 BRA `(.L_x_9)", "EXIT", ".L_x_9:"), r"no instruction at \.L_x_9"),
    ],
)
def test_what_is_no_listing_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sass.parse(text)
