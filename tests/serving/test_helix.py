"""Engines whose feed-forward is sharded over context ranks too (Helix): tokens of one device, and fewer weights."""

import pytest
from mesh_workload import STRATEGIES, check_tokens

GROW, AUTO, PASS_Q, PASS_KV = STRATEGIES
FEW = [((1, 4, 2), GROW), ((1, 3, 1), PASS_KV), ((2, 2, 2), AUTO)]
MORE = [
    (sizes, strategy)
    for sizes in ((1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 5, 1), (1, 8, 1), (1, 4, 2), (1, 2, 4), (2, 2, 2), (3, 2, 1))
    for strategy in STRATEGIES
    if (sizes, strategy) not in FEW
]


@pytest.mark.parametrize(("sizes", "strategy"), FEW, ids=str)
def test_tokens_equal_those_of_one_device(sizes: tuple[int, int, int], strategy: tuple[str, str]) -> None:
    """Local, replicated and sharded rows; requests on some of the ranks, on one KV head that devices share."""
    check_tokens(sizes, strategy, events=40, ffn="all")


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "strategy"), MORE, ids=str)
def test_tokens_of_more_plans_equal_those_of_one_device(sizes: tuple[int, int, int], strategy: tuple[str, str]) -> None:
    check_tokens(sizes, strategy, ffn="all")
