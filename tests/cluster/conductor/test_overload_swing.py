"""Figures 7 and 8 in small: early rejection makes both pools' loads swing against each other, prediction damps it."""

from statistics import correlation, pstdev
from typing import NamedTuple

import pytest
from conductor_parts import cluster, instance, request
from two_pools import TwoPools

RULES = ("baseline", "early_rejection", "predicted_early_rejection")
_SECONDS = 400


class Swing(NamedTuple):
    """Of the loads after the first quarter: standard deviations, and the correlation of both."""

    prefill: float
    decode: float
    together: float
    in_vain: int
    completed: int


def swing(admission: str, prefill: int = 8, blocks: int = 50, seconds: float = 20.0, rate: float = 4.0) -> Swing:
    """Prefill instances of 0.1 s a block, and one that decodes 20 answers of so many seconds: requests come evenly."""
    prefills = [instance(f"p{i}") for i in range(prefill)]
    conductor = cluster(
        *prefills,
        instance("d", "decode", max_running=20, decode_tokens=10**7),
        admission=admission,
        ttft=20.0,
        tpot=1.0,
    )
    pools = TwoPools(conductor, lambda number: seconds)
    pools.run([(i / rate, request(f"r{i}", (i, blocks))) for i in range(int(rate * _SECONDS))], _SECONDS)
    loads = [each.loads for each in pools.samples if each.at > _SECONDS / 4]
    prefill, decode = [each.prefill for each in loads], [each.decode for each in loads]
    in_vain = sum(each.stage == "decode" for each in pools.rejections)
    return Swing(pstdev(prefill), pstdev(decode), correlation(prefill, decode), in_vain, len(pools.completed))


@pytest.fixture(scope="module")
def swings() -> dict[str, Swing]:
    return {name: swing(name) for name in RULES}


def test_early_rejection_makes_loads_swing_against_each_other(swings: dict[str, Swing]) -> None:
    early, baseline = swings["early_rejection"], swings["baseline"]
    assert early.prefill > 3 * baseline.prefill
    assert early.decode > 3 * baseline.decode
    assert early.together < -0.1


def test_prediction_damps_the_swing(swings: dict[str, Swing]) -> None:
    early, predicted = swings["early_rejection"], swings["predicted_early_rejection"]
    assert predicted.prefill < early.prefill / 2
    assert predicted.decode < early.decode / 5
    assert predicted.completed > early.completed


def test_each_rule_wastes_fewer_prefills_than_the_one_before(swings: dict[str, Swing]) -> None:
    wasted = [swings[name].in_vain for name in RULES]
    assert wasted[0] > wasted[1] > 5 * wasted[2]


def test_prediction_completes_most_where_both_pools_bind() -> None:
    found = [swing(name, 2, 9, 10.0, 2.5).completed for name in RULES]
    assert found[2] > 1.03 * max(found[:2])
