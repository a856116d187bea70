"""Workloads on simulated instances: what an interrupted run leaves."""

import pytest

from longctx.models.config import LlamaConfig
from longctx.serving.config import EngineConfig
from longctx.serving.predictor import RuntimePredictor
from longctx.simulation import Instance, Record, Simulation
from longctx.simulation.workloads import WorkloadRequest

MODEL = LlamaConfig(50, 8, 8, 1, 1, 1, 8, max_positions=4000)


def simulation() -> Simulation:
    """One instance, each of whose steps takes 10 ms."""
    predictor = RuntimePredictor.of_rows({64: 10e-3}, (64,), (0.0,))
    config = EngineConfig(num_pages=256, token_budget=64, max_running=4, prefix_cache=False)
    return Simulation([Instance(MODEL, config, predictor)])


class _Interrupt(Exception):
    pass


@pytest.mark.parametrize("events", [1, 6, 13])
def test_a_run_after_an_interrupted_one_is_as_the_first(events: int) -> None:
    """Some of these interrupt it within a run of decodes that are one event."""
    requests = [WorkloadRequest(0.0, 8, 2000), WorkloadRequest(5.004, 8, 3, number=1)]  # within a step

    def interrupt(record: Record) -> None:
        if simulated.loop.num_events >= events:
            raise _Interrupt

    simulated = simulation()
    with pytest.raises(_Interrupt):
        simulated.run(requests, progress=interrupt)
    again = simulated.run(requests)
    first = simulation().run(requests)
    assert [(x.number, x.metrics.output_tokens) for x in again.served] == [(1, 3), (0, 2000)]
    assert [x.ttft for x in again.served] == pytest.approx([x.ttft for x in first.served])
