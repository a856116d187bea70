"""What Medha's figures are computed from: outcomes of a window, and prompts alone."""

import numpy as np
import pytest

from longctx.serving.parallel_plan import ParallelPlan
from longctx.simulation.workloads import WorkloadRequest
from papers.figures.figure import Inputs
from papers.medha.runs import CHUNK, LONG, Outcome, alone, requests, run


def test_a_prompt_alone_takes_what_the_core_takes_for_it() -> None:
    prompts = [100, CHUNK, CHUNK + 1, 10 * CHUNK + 77]
    plan, options = ParallelPlan.medha(stage=2, tensor=8), {"chunking": "static", "policy": "fcfs"}
    for tokens, seconds in zip(prompts, alone(np.array(prompts)), strict=True):
        workload = [WorkloadRequest(0.0, tokens, 1)]
        cell = run("medha", "llama-3-8b", "medha-a100", 16, workload, 60.0, plan, **options)
        assert cell.ttft[0] == pytest.approx(seconds, rel=1e-3)


def test_requests_without_a_token_count_with_what_they_have_waited() -> None:
    inf = np.inf
    cell = Outcome(
        "x", 10.0, np.array([0.0, 1.0, 2.0, 8.0]), np.array([5, 5, LONG, 5]), np.array([2] * 4),
        np.array([0.0, 1.0, 5.0, inf]),
        np.array([1.0, 2.0, inf, inf]), np.array([3.0, inf, inf, inf]), np.array([2.0, np.nan, np.nan, np.nan]),
    )  # fmt: skip
    assert cell.waited.tolist() == [1, 1, 8, 2]
    assert cell.quantile(1.0) == 8
    assert (cell.served_share, cell.long_ended, cell.tpot_quantile(0.5)) == (0.5, 0, 2.0)
    assert cell.active(np.array([0.5, 2.5, 9.0])).tolist() == [1, 3, 3]


def test_all_systems_get_the_same_requests() -> None:
    inputs = Inputs(seed=3)
    first, second = (requests(inputs, "long", 0.5, 200.0) for _ in range(2))
    assert first == second != requests(Inputs(seed=4), "long", 0.5, 200.0)
    scaled = requests(inputs, "long", 0.5, 200.0, scale=2.0)
    assert [y.prompt_tokens / x.prompt_tokens for x, y in zip(first, scaled, strict=True)] == [
        2 if x.prompt_tokens >= LONG else 1 for x in first
    ]
    assert all(x.arrival < 200 for x in first)
