"""Random clusters and workloads: every request ends once, nobody holds more than there is, estimates return to 0."""

from cluster_cases import check_each_once, coupled, decode, prefill, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ADMISSIONS, POLICIES, ConductorConfig
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.simulation import Record, Simulation
from longctx.simulation.cluster import Change, ClusterInstance, ClusterSettings
from longctx.simulation.cluster.page_stream import OVERLAPS
from longctx.simulation.cluster.settings import ACTIONS


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[ClusterInstance], ConductorConfig, ClusterSettings, list[Change]]:
    is_coupled = draw(st.booleans())
    config = {"num_pages": draw(st.sampled_from([60, 200]))}
    bandwidth = draw(st.sampled_from([1e8, 1e11]))
    if is_coupled:
        instances = [coupled(f"c{i}", config=config) for i in range(draw(st.integers(1, 3)))]
    else:
        host = draw(st.sampled_from([0, 20, 1000]))
        instances = [prefill(f"p{i}", host, config=config, bandwidth=bandwidth) for i in range(draw(st.integers(1, 3)))]
        instances += [decode(f"d{i}", config=config) for i in range(draw(st.integers(1, 2)))]
    names = [each.name for each in instances]
    actions = ("kill", "join", "drain", "restore") if draw(st.booleans()) else ACTIONS
    changes = draw(
        st.lists(st.builds(Change, st.floats(0, 8), st.sampled_from(names), st.sampled_from(actions)), max_size=6)
    )
    return (
        instances,
        ConductorConfig(
            policy=draw(st.sampled_from(POLICIES)),
            admission=draw(st.sampled_from(ADMISSIONS)),
            ttft=draw(st.sampled_from([0.5, 30.0])),
            tpot=draw(st.sampled_from([0.015, 0.1])),
            defer_seconds=draw(st.sampled_from([0.0, 2.0])),
            is_inline=draw(st.booleans()),
            prefill_load=draw(st.sampled_from(["request", "instance"])),
        ),
        ClusterSettings(
            overlap=draw(st.sampled_from(OVERLAPS)),
            event_seconds=draw(st.sampled_from([0.0, 0.3])),
            report_seconds=draw(st.sampled_from([0.1, 1.0])),
            first_token=draw(st.sampled_from(["prefill", "decode"])),
            call_seconds=draw(st.sampled_from([0.0, 0.05])),
            swaps=draw(st.booleans()),
        ),
        changes,
    )


@settings(max_examples=12, deadline=None)
@given(clusters(), st.integers(0, 1000), st.sampled_from([2.0, 20.0]))
def test_every_request_ends_once_and_nothing_is_left(
    cluster: tuple[list[ClusterInstance], ConductorConfig, ClusterSettings, list[Change]], seed: int, rate: float
) -> None:
    instances, config, sizes, changes = cluster
    requests = workload(25, rate, seed)
    conductor = Conductor(config, PrefixIndex())
    simulation = Simulation(instances, conductor, sizes, changes)

    def check_capacity(record: Record) -> None:
        for node in simulation.nodes.values():
            if node.core is not None:
                core = node.core.core
                assert core.pool.num_held <= core.pool.num_pages
                assert len(core.scheduler.running) <= node.spec.config.max_running

    record = simulation.run(requests, progress=check_capacity)
    check_each_once(record, requests)
    for node in simulation.nodes.values():
        if node.core is not None:
            assert not node.core.known
            assert node.core.core.pool.num_held == 0
            assert not len(node.core.nic)
    if not record.open:
        for view in conductor.instances(simulation.loop.now):
            assert view.decoding == view.open_requests == 0
            assert view.reserved_tokens == 0
