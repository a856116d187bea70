"""A step of one rank that is filled: what fits, and how many predictions that takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.models import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving.predictor import CurvePredictor, Predictor, RuntimePredictor, Work
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.roofline import roofline
from longctx.serving.scheduler.local_budget import LocalBudget
from longctx.serving.scheduler.sequence import Sequence

MODEL = LlamaConfig.preset("llama-3-8b")
ROWS = (1, 2, 8, 64, 128, 256)
PREDICTORS: dict[str, Predictor] = {
    "roofline": roofline(MODEL, Topology.preset("a100-nvlink"), 256, tensor=8),
    "measured": roofline(MODEL, Topology.preset("h100-nvlink"), 256, tensor=8, buckets=ROWS),
    "programs": RuntimePredictor.of_rows({n: 1e-3 + 1e-5 * n for n in ROWS}, (1, 64), (1e-9, 4e-8), 1e-6),
    "flat": CurvePredictor((1, 256), (1e-3, 1e-3), 0.0, 0.0, 0.0),
}


class Counted(CurvePredictor):
    """A predictor that counts the sizes it is asked about."""

    asked = 0

    def chunk_curve(self, work: Work, start: int):  # type: ignore[no-untyped-def]
        curve = super().chunk_curve(work, start)

        def seconds(count: int) -> float:
            Counted.asked += 1
            return curve(count)

        return seconds


def prompt(order: int, length: int, computed: int) -> Sequence:
    sequence = Sequence(f"s{order}", order, length, 1)
    sequence.computed = computed
    return sequence


@pytest.mark.parametrize("name", PREDICTORS)
@given(
    decodes=st.integers(0, 40),
    keys=st.integers(1, 50_000),
    computed=st.integers(0, 400_000),
    left=st.integers(1, 600),
    slack=st.floats(0.0, 1.2),
    share=st.floats(0.1, 1.0),
    other=st.integers(0, 100),
)
def test_the_largest_chunk_is_the_last_that_fits(
    name: str, decodes: int, keys: int, computed: int, left: int, slack: float, share: float, other: int
) -> None:
    predictor = Corrected(PREDICTORS[name])
    work = Work(decodes, decodes, decodes * keys)
    sequence, first = prompt(0, computed + left, computed), prompt(1, 5_000, 1_000)
    step = LocalBudget(predictor, 256, work)
    begun, full = step.seconds, predictor.seconds(work.with_chunk(computed, 256 - decodes, False))
    step.limit = begun + slack * (full - begun)
    step.take(first, other)
    work = work.with_chunk(1_000, other, False) if other else work
    assert step.work == work
    assert step.seconds == predictor.seconds(work)

    def seconds(count: int) -> float:
        return predictor.seconds(work.with_chunk(computed, count, count == left))

    limit = begun + share * (step.limit - begun)
    most = min(left, 256 - decodes - other, -int(-share * (256 - decodes) // 1))
    fitting = [count for count in range(1, most + 1) if seconds(count) <= limit]
    found = step.largest(sequence, share)
    assert found == max(fitting, default=0)
    if found:
        assert step.seconds_with(sequence, found) == max(step.seconds, seconds(found))
    step.take(sequence, found)
    assert step.rows == step.work.rows == decodes + other + found
    assert step.seconds == predictor.seconds(step.work)


def test_a_size_that_fits_is_found_by_few_predictions() -> None:
    """Each is a microsecond of a step that is planned, and halving takes twelve."""
    plain = roofline(MODEL, Topology.preset("h100-rdma"), 4096, tensor=8)
    predictor = Counted(**{name: getattr(plain, name) for name in CurvePredictor.__dataclass_fields__})
    for computed in (10_000, 100_000, 1_000_000):
        step, sequence = LocalBudget(predictor, 4096, Work(8, 8, 80_000)), prompt(0, 10**7, computed)
        step.limit, Counted.asked = 0.4 * step.seconds_with(sequence, 4088), 0
        assert 0 < step.largest(sequence) < 4088
        assert Counted.asked <= 9
