"""The performance model: more work takes longer, what binds binds, and no prediction is faster than the hardware."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import kernel_model, warp_model
from benchmarks.h100_limits import floor
from benchmarks.kernel_plan import MULTIPROCESSORS, plan_of
from benchmarks.kernel_shapes import AttentionShape
from benchmarks.sass import Instruction, Loop, Program
from benchmarks.warp_model import ItemCost, Turns, item_cost, loop_cycles

FADD, MUFU, BRANCH = Instruction("FADD"), Instruction("MUFU.EX2", sets=0), Instruction("BRA", "x", "P0", target=0)
USE = Instruction("FADD", waits=1)
QK = Instruction("HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR4], R24")
PV = Instruction("HGMMA.64x128x16.F32.BF16", "R88, R24, gdesc[UR4], R88, gsb0")
WAIT = Instruction("WARPGROUP.DEPBAR.LE", "gsb0, 0x0")
TRY, ARRIVE = Instruction("SYNCS.PHASECHK.TRANS64.TRYWAIT"), Instruction("SYNCS.ARRIVE.TRANS64.A1T0")

instructions = st.sampled_from(
    [FADD, MUFU, USE, QK, PV, WAIT, Instruction("ISETP", stall=6), Instruction("LDS", sets=0)]
)


def loop_of(*body: Instruction) -> Loop:
    # Instructions are told apart by identity, as those of a program are.
    body = tuple(replace(x) for x in (*body, BRANCH))
    return Loop(0, len(body), body)


@given(st.lists(instructions, max_size=12), st.data())
def test_one_more_instruction_takes_no_less(body: list[Instruction], data: st.DataObject) -> None:
    more = list(body)
    more.insert(data.draw(st.integers(0, len(body))), data.draw(instructions))
    assert loop_cycles(loop_of(*more), 1) >= loop_cycles(loop_of(*body), 1)


@pytest.mark.parametrize("num_warps", [1, 2])
def test_what_binds_binds(num_warps: int) -> None:
    products = loop_of(*[QK] * 8, *[PV] * 8, WAIT)
    assert warp_model.tensor_cycles(products.body) == 16 * 64  # 64 * 128 * 16 products at 2048 a cycle
    assert num_warps * 16 * 64 <= loop_cycles(products, num_warps) <= num_warps * 16 * 64 + 64
    assert loop_cycles(loop_of(*[MUFU] * 50), num_warps) >= num_warps * 50 * 8
    assert loop_cycles(loop_of(*[FADD] * 50), num_warps) >= num_warps * 50
    # One that waits for each result hides in the other.
    waiting = loop_of(*[MUFU, USE] * 20)
    assert loop_cycles(waiting, 2) < 2 * loop_cycles(waiting, 1)


def test_what_is_issued_while_products_run_is_free() -> None:
    softmax = [FADD] * 400
    apart, under = loop_of(QK, PV, WAIT, *softmax), loop_of(QK, PV, *softmax, WAIT)
    assert loop_cycles(apart, 1) >= loop_cycles(under, 1) + 100
    products = loop_of(*[QK] * 15, PV, *softmax, WAIT)
    assert loop_cycles(products, 1) <= 16 * 64 + 64


def test_turns_are_kept() -> None:
    loop = loop_of(TRY, *[FADD] * 100, ARRIVE, *[FADD] * 5)
    turns = Turns((0,), (0,), (-1, 0))
    assert loop_cycles(loop, 2, turns) >= 200
    with pytest.raises(RuntimeError, match="no warp has its turn"):
        loop_cycles(loop, 2, replace(turns, lead=(0, 0)))


def test_an_item_costs_what_is_beside_its_loops() -> None:
    def program(beside: int) -> Program:
        full, masked = loop_of(QK, PV, WAIT, *[FADD] * 400), loop_of(QK, PV, WAIT, *[FADD] * 900)
        at, body = 0, []
        for part in ([FADD] * beside, full.body, [], masked.body, [FADD] * beside):
            body += [replace(x, target=at) if x.target is not None else replace(x) for x in part]
            at = len(body)
        return Program((*body, Instruction("BRA", "x", "P0", target=0), Instruction("EXIT")))

    small, large = item_cost(program(10), 2, None), item_cost(program(500), 2, None)
    assert small.full < small.masked
    assert (small.full, small.masked) == (large.full, large.masked)
    assert large.beside > small.beside + 400
    assert large.of(3, 1) == large.beside + 3 * large.full + large.masked


def shape(kind: str, batch: int, q_length: int, kv_length: int, heads: int, kv_heads: int) -> AttentionShape:
    return AttentionShape("some", "some", 1, kind, batch, q_length, kv_length, heads, kv_heads, 128)


SHAPES = [
    shape("prefill", 1, 4096, 4096, 8, 2),
    shape("chunk", 1, 64, 16384, 8, 1),
    shape("decode", 4, 1, 8192, 8, 2),
]


@pytest.mark.parametrize("some", SHAPES, ids=lambda x: x.kind)
def test_predictions(some: AttentionShape) -> None:
    """Each worker's blocks add up to those that are seen, and no time is below the floor."""
    plan = plan_of(some)
    block_q, split = kernel_model.kind_of(plan)
    worker, full, masked = kernel_model.loads(plan)
    assert worker.max() < MULTIPROCESSORS
    rows = np.arange(some.q_length) + 1 + some.kv_length - some.q_length
    group = some.heads // some.kv_heads if some.q_length < 512 else 1
    rows = np.repeat(rows, group)
    last_seen = [rows[i : i + block_q].max() for i in range(0, len(rows), block_q)]
    blocks = some.batch * some.heads // group * sum(-(-x // 128) for x in last_seen)
    assert int((full + masked + 1).sum()) == blocks

    perfect = ItemCost(16 * 64 * block_q // 64, 16 * 64 * block_q // 64, 16 * 64 * block_q // 64)
    fastest = kernel_model.predict(some, perfect)
    assert (fastest.merge > 0) == split
    assert fastest.seconds > floor(some.flops, some.bytes).ms / 1e3
    slower = replace(perfect, full=3 * perfect.full, beside=9 * perfect.beside)
    assert kernel_model.predict(some, slower).seconds >= fastest.seconds
    assert fastest.row["predicted_of_floor"] < 1


def test_the_model_asks_for_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import kernels

    monkeypatch.setattr(kernel_model, "missing", lambda: "some tool")
    text, _ = kernels.model(SHAPES)
    assert text.count("\n") == 2 + len(SHAPES) + 1
    assert text.endswith("Predictions need some tool.")
    monkeypatch.setattr(kernel_model, "missing", lambda: "")

    def fails(shapes: object) -> None:
        raise RuntimeError("ptxas failed: it")

    monkeypatch.setattr(kernel_model, "predict_all", fails)
    assert kernels.model(SHAPES)[0].endswith("No predictions: ptxas failed: it")
    assert jax.default_backend() == "cpu"
