"""Steps that prompts share, planned without moving the core: random workloads are simulated as step by step."""

from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.models import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving import EngineConfig, ParallelPlan, Slo
from longctx.serving.predictor import Predictor, RuntimePredictor
from longctx.serving.predictor.roofline import roofline
from longctx.simulation import Instance, Record, Simulation
from longctx.simulation.workloads import WorkloadRequest

MODEL = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, max_positions=200_000)
ROWS = (1, 2, 4, 16, 64, 128, 256, 512)
PROGRAMS = RuntimePredictor.of_rows({n: 1e-3 + 4e-5 * n for n in ROWS}, (1, 16, 64), (1e-9, 2e-9, 2e-8), 1e-6)


@st.composite
def workloads(draw: st.DrawFn) -> list[WorkloadRequest]:
    """Long prompts that are read for hundreds of steps, and short ones that come meanwhile."""
    gap, prompts = st.integers(0, 1024), st.one_of(st.integers(1, 3_000), st.integers(6_000, 30_000))
    now, requests = 0, []
    for number in range(draw(st.integers(2, 6))):
        now += draw(gap)
        requests.append(WorkloadRequest(now / 1024, draw(prompts), draw(st.integers(1, 60)), number=number))
    return requests


OPTIONS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["ilrs", "ilrs", "fcfs", "srpf", "edf"]),
        "chunking": st.sampled_from(["adaptive", "static", "static:128"]),
        "run_ahead": st.integers(1, 3),
        "max_running": st.integers(2, 12),
        "max_share": st.sampled_from([0.25, 0.5, 1.0]),
        "page_size": st.sampled_from([16, 256]),
        "admission": st.sampled_from(["reserve", "optimistic"]),
        "prefix_cache": st.booleans(),
        "slo": st.builds(
            Slo, tpot=st.sampled_from([0.01, 0.03, 0.2, None]), step_seconds=st.sampled_from([0.005, 0.1, None])
        ),
    }
)


@settings(max_examples=8)
@given(requests=workloads(), options=OPTIONS, stages=st.integers(1, 3), is_measured=st.booleans())
def test_random_workloads_are_simulated_as_step_by_step(
    requests: list[WorkloadRequest], options: dict[str, object], stages: int, is_measured: bool
) -> None:
    plan, pages = ParallelPlan(stage=stages, tensor=2), 90_000 // int(str(options["page_size"]))
    config = EngineConfig(token_budget=512, num_pages=pages, hash_key=b"0" * 16, **options)  # type: ignore[arg-type]
    roofs = roofline(MODEL, Topology.preset("a100-nvlink"), 512, stage=stages, tensor=2, overhead=1e-3)
    predictor: Predictor = PROGRAMS if is_measured else roofs

    def run(is_at_once: bool) -> tuple[Record, int]:
        simulation = Simulation([Instance(MODEL, config, predictor, plan, skips_decodes=is_at_once)])
        return simulation.run(requests), simulation.loop.num_events

    (one, events), (other, by_one) = run(True), run(False)
    assert one.served == other.served
    assert one.steps == other.steps
    assert one.timeline == other.timeline
    assert one.stats == other.stats
    assert one.totals == other.totals
    assert events <= by_one
