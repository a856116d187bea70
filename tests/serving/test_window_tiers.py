"""Window pages beyond the devices: pages are stored with them, and loads and leases bring those that are seen."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tiered_fake import make_tiered_engine, settle
from workload import Workload

from longctx.serving import ParallelPlan
from longctx.serving.kv_cache.tiers.config import TierConfig

# Without stages: fake devices reject rows whose results are dropped, after loads have overwritten what they see.
PLANS = [ParallelPlan(), ParallelPlan(1, 2, rank_tokens=16), ParallelPlan(1, 3, placement="interleave")]


@settings(max_examples=8, deadline=None)
@given(
    plan=st.sampled_from(PLANS),
    window=st.sampled_from([1, 6, 20, 60]),
    seed=st.integers(0, 2**20),
    num_pages=st.integers(30, 50),
    admission=st.sampled_from(["reserve", "optimistic"]),
)
def test_random_workloads_give_the_oracles_tokens(
    plan: ParallelPlan, window: int, seed: int, num_pages: int, admission: str
) -> None:
    """Fake devices check that each row sees window pages of its own tokens, loaded or computed."""
    engine = make_tiered_engine(
        num_pages, plan=plan, tiers=TierConfig(2**14), window=window, admission=admission, chunking="static"
    )
    Workload(engine, seed).run(120)
    settle(engine)
    windows = engine.core.pool.windows
    assert windows is not None
    assert windows.num_held == 0
