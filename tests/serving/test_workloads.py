"""The engine under random workloads on a fake device: right tokens, one end for each request, nothing lost."""

import pytest
from fake_device import make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from workload import Workload

from longctx.serving import Slo


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**20),
    num_pages=st.integers(40, 80),
    page_size=st.sampled_from([1, 2, 4, 8, 16, 32]),
    run_ahead=st.integers(1, 8),
    admission=st.sampled_from(["reserve", "optimistic"]),
    prefix_cache=st.booleans(),
    policy=st.sampled_from(["fcfs", "edf", "srpf", "lrs", "lrs_relative", "ilrs"]),
    chunking=st.sampled_from(["static", "static:7", "adaptive"]),
    max_share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_random_workloads_give_the_oracles_tokens(
    seed: int,
    num_pages: int,
    page_size: int,
    run_ahead: int,
    admission: str,
    prefix_cache: bool,
    policy: str,
    chunking: str,
    max_share: float,
) -> None:
    engine = make_engine(
        num_pages * 4 // min(page_size, 4),
        page_size,
        run_ahead=run_ahead,
        admission=admission,
        prefix_cache=prefix_cache,
        policy=policy,
        chunking=chunking,
        max_share=max_share,
        # A step takes 1 to 1.25 ms, so some of these targets are easy to keep and some are not.
        slo=Slo(ttft_least=1e-4 if seed % 2 else 1.0, tpot=2e-3 if seed % 3 else 1.1e-3),
    )
    workload = Workload(engine, seed)
    workload.run(200)


@pytest.mark.parametrize("events", [500, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("admission", ["reserve", "optimistic"])
def test_thousands_of_events_with_little_memory(admission: str, events: int) -> None:
    """The pool is so small that memory limits what runs."""
    engine = make_engine(90, 2, admission=admission)
    workload = Workload(engine, 3)
    workload.run(events)
    assert workload.num_requests > events // 12
    stats = engine.stats()
    assert stats.cached_tokens > 0
    assert stats.pages_evicted > 0
    assert (stats.preemptions > 10) == (admission == "optimistic")
