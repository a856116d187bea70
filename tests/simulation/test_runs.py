"""Workloads on simulated instances: when follow-ups come, and what an interrupted run leaves."""

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


def test_a_follow_up_comes_after_an_answer_but_not_before_its_arrival() -> None:
    requests = [
        WorkloadRequest(0.0, 8, 1),
        WorkloadRequest(0.0, 8, 1, number=1, after=0, delay=2.0),
        WorkloadRequest(5.0, 8, 1, number=2, after=0, delay=2.0),
    ]
    due = {served.number: served.due for served in simulation().run(requests).served}
    assert due == {0: 0.0, 1: pytest.approx(2.01), 2: 5.0}


class _Interrupt(Exception):
    pass


@pytest.mark.parametrize("events", range(1, 16, 2))
def test_a_run_after_an_interrupted_one_is_as_the_first(events: int) -> None:
    """Some of these interrupt it within a run of decodes that are one event."""
    requests = [WorkloadRequest(0.0, 8, 2000), WorkloadRequest(5.0, 8, 3, number=1)]

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
