"""Mooncake's workloads and the arithmetic of its figures; the figures themselves are in test_figures.py."""

import numpy as np
import pytest

from longctx.cluster.conductor.config import ConductorConfig
from longctx.simulation.workloads import WorkloadRequest
from papers.figures.figure import Inputs
from papers.mooncake.cluster import MODEL, deployment, serve
from papers.mooncake.stages import loading, storing
from papers.mooncake.workloads import DATASETS, builtin_trace, dataset, poisson, repeat, reuse


@pytest.mark.parametrize("name", DATASETS)
def test_data_sets_have_the_papers_means(name: str) -> None:
    about, requests = DATASETS[name], dataset(name, 1_200)
    assert np.mean([x.prompt_tokens for x in requests]) == pytest.approx(about.prompt, rel=0.05)
    assert np.mean([x.output_tokens for x in requests]) == pytest.approx(about.output, rel=0.05)
    assert reuse(requests)[0] == pytest.approx(about.reuse, abs=0.03)
    assert requests == dataset(name, 1_200)
    assert requests != dataset(name, 1_200, seed=1)


def test_the_builtin_trace_is_shaped_as_the_public_one() -> None:
    """12,031 requests in 3,537 s, 12,035 tokens a prompt and 343 an answer, 37 % used again."""
    trace = builtin_trace(12_031, 3_537.0)
    assert len(trace) == 12_031
    assert np.mean([x.prompt_tokens for x in trace]) == pytest.approx(12_035, rel=0.15)
    assert np.mean([x.output_tokens for x in trace]) == pytest.approx(343, rel=0.05)
    assert reuse(trace)[0] == pytest.approx(0.37, abs=0.05)
    assert all(len(x.blocks) == -(-x.prompt_tokens // 512) for x in trace)
    assert trace[-1].arrival < 3_537


def test_copies_of_a_workload_share_nothing() -> None:
    requests = [WorkloadRequest(float(at), 1_024, 1, (at % 2, 7), number=at) for at in range(10)]
    copies = repeat(requests, 3)
    assert [x.arrival for x in copies] == sorted(x.arrival for x in copies)
    assert len({x.number for x in copies}) == len(copies) == 30
    assert len({block for x in copies for block in x.blocks}) == 3 * len(
        {block for x in requests for block in x.blocks}
    )
    assert repeat(requests, 1) == requests


def test_storing_by_layer_leaves_the_last_layers_share() -> None:
    """Prefill is slower than storing, so all but the last layer of the last chunk has left by then."""
    at_end, by_layer = storing(16_384)
    assert by_layer == pytest.approx(at_end / 4 / MODEL.num_layers)


def test_a_loaded_prefix_takes_the_longer_of_loading_and_computing() -> None:
    whole, load, computed = loading(65_536, 0.5)
    assert max(load, computed) <= whole <= load + computed
    assert loading(8_192, 0.0)[1] == 0.0


def test_clusters_have_the_instances_of_their_names() -> None:
    cluster = deployment("3P+1D", ConductorConfig())
    assert (cluster.prefill, cluster.decode, cluster.coupled) == (3, 1, 0)
    assert deployment("4M", ConductorConfig(), single=True).max_running == 1


def test_a_lost_run_ends_early_and_counts_the_rest_as_missed() -> None:
    requests = poisson(Inputs(quick=True), "arxiv", 50.0, 24)
    whole, lost = (serve("1P+1D", requests, give_up=limit) for limit in (None, 1.0))
    assert len(whole.ttft) == len(requests) > len(lost.ttft)
    assert (lost.waits() > 1.0).sum() > 2
    assert len(lost.waits()) == len(requests)
    assert whole.good(np.inf, np.inf) == 1.0 > lost.good(np.inf, np.inf)
