"""The topology of an engine: found, given, and refused at the door."""

import re
from pathlib import Path

import pytest
from small_checkpoint import MODEL, save_small_checkpoint

from longctx.cli import main
from longctx.models import LlamaConfig
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


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("h100", "--topology must be one of h100-nvlink, .*, or a file, got 'h100'"),
        ("broken.json", "broken.json is no topology: link of tensor: latency must be a finite number .* got -1"),
        ("tensor.json", "--topology must have a link for the axis context, it has tensor"),
    ],
)
def test_the_command_line_refuses_wrong_topologies(
    topology: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_small_checkpoint(tmp_path / "model")
    Path("broken.json").write_text('{"device": "H100", "links": {"tensor": {"bandwidth": 1, "latency": -1}}}')
    Path("tensor.json").write_text('{"device": "H100", "links": {"tensor": "nvlink-h100"}}')
    arguments = ["generate", "--model", str(model), "--prompt", "a", "--max-tokens", "1", "--context", "2"]
    assert main([*arguments, "--topology", topology]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_presets_suit_the_models_of_their_papers() -> None:
    assert LlamaConfig.preset("llama-3.1-405b").num_layers == 126
    Topology.preset("meta-gtt").check(tensor=8, context=16)
