"""The topology of an engine: found, given, and refused at the door."""

import pytest
from small_checkpoint import MODEL

from longctx.parallel import Topology
from longctx.serving import Engine, EngineConfig, ParallelPlan
from longctx.serving.predictor import CurvePredictor
from longctx.simulation import VirtualExecutor

CONFIG = EngineConfig(page_size=4, num_pages=64, max_running=4, token_budget=8)


def make_engine(plan: ParallelPlan, topology: Topology | None = None) -> Engine:
    return Engine(MODEL, None, CONFIG, executor=VirtualExecutor(lambda _: 0.0, 50), plan=plan, topology=topology)


def exchange_latency(engine: Engine) -> float | None:
    predictor = engine.predictor.predictor
    assert isinstance(predictor, CurvePredictor)
    return None if predictor.exchange is None else predictor.exchange.hardware.latency


def test_costs_follow_the_topology() -> None:
    found = make_engine(ParallelPlan(context=2))
    assert found.topology.device.name == "cpu"
    assert exchange_latency(found) == 0.0
    given = make_engine(ParallelPlan(context=2), Topology.preset("h100-rdma"))
    assert given.topology == Topology.preset("h100-rdma")
    assert exchange_latency(given) == 35e-6
    assert exchange_latency(make_engine(ParallelPlan(), Topology.preset("h100-rdma"))) is None


def test_a_topology_must_have_a_link_for_each_axis_of_the_plan() -> None:
    h100 = Topology.preset("h100-rdma")
    one_host = Topology(h100.device, {"tensor": h100.link("tensor")})
    with pytest.raises(ValueError, match="topology must have a link for the axis context, it has tensor"):
        make_engine(ParallelPlan(context=2), one_host)
    with pytest.raises(TypeError, match=r"topology must be a Topology, such as .*, got 'h100-rdma'"):
        make_engine(ParallelPlan(), "h100-rdma")  # type: ignore[arg-type]
    make_engine(ParallelPlan(), one_host)
