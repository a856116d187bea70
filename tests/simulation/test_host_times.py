"""What an engine's thread takes beside the devices, by hand."""

import pytest

from longctx.models.config import LlamaConfig
from longctx.serving.config import EngineConfig
from longctx.serving.predictor import RuntimePredictor
from longctx.simulation import HostTimes, Instance, Record, Simulation
from longctx.simulation.workloads import WorkloadRequest

MODEL = LlamaConfig(50, 8, 8, 1, 1, 1, 8, max_positions=1000)
HOST = {"request": 1e-3, "batch": 2e-3, "results": 3e-3}


def serve(device: float, run_ahead: int, requests: list[WorkloadRequest], **more: bool) -> Record:
    """Every batch takes the devices so many seconds."""
    predictor = RuntimePredictor.of_rows({64: device}, (64,), (0.0,))
    config = EngineConfig(num_pages=64, token_budget=64, max_running=4, run_ahead=run_ahead, prefix_cache=False)
    return Simulation([Instance(MODEL, config, predictor, host=HostTimes(**HOST, **more))]).run(requests)


@pytest.mark.parametrize(
    ("device", "run_ahead", "ttft", "tpot"),
    [
        (10e-3, 1, 13e-3, 15e-3),  # one after the other
        (10e-3, 2, 13e-3, 10e-3),  # the thread's work is hidden
        (1e-3, 2, 5e-3, 5e-3),  # the devices' work is hidden: at first the thread submits two batches
        (1e-3, 1, 4e-3, 6e-3),
    ],
)
def test_a_thread_hides_what_it_does_meanwhile(device: float, run_ahead: int, ttft: float, tpot: float) -> None:
    (served,) = serve(device, run_ahead, [WorkloadRequest(0.0, 8, 101)]).served
    assert served.ttft == pytest.approx(ttft)
    assert served.tpot == pytest.approx(tpot, rel=0.01)


def test_what_shares_the_cores_is_never_hidden() -> None:
    (served,) = serve(10e-3, 2, [WorkloadRequest(0.0, 8, 101)], shares_cores=True).served
    assert served.ttft == pytest.approx(16e-3)
    assert served.tpot == pytest.approx(13e-3, rel=0.01)


def test_requests_that_come_together_enter_one_after_the_other() -> None:
    requests = [WorkloadRequest(0.0, 8, 1, number=number) for number in range(3)]
    record = serve(10e-3, 1, requests)
    assert [served.ttft for served in record.served] == pytest.approx([3e-3 + 12e-3] * 3)


def test_who_comes_while_the_thread_plans_waits_for_the_next_step() -> None:
    requests = [WorkloadRequest(0.0, 8, 1), WorkloadRequest(1e-3, 8, 1, number=1)]
    first, second = serve(10e-3, 1, requests).served
    assert first.ttft == pytest.approx(13e-3)
    assert second.ttft == pytest.approx(13e-3 - 1e-3 + 3e-3 + 13e-3)


def test_a_front_end_takes_one_request_after_the_other_beside_the_steps() -> None:
    predictor = RuntimePredictor.of_rows({64: 10e-3}, (64,), (0.0,))
    config = EngineConfig(num_pages=64, token_budget=64, max_running=4, run_ahead=1, prefix_cache=False)
    instance = Instance(MODEL, config, predictor, host=HostTimes(front_end=2e-3))
    requests = [WorkloadRequest(0.0, 8, 2, number=number) for number in range(3)]
    record = Simulation([instance]).run(requests)
    # The first one's step begins at 2 ms and ends at 12 ms; the others came at 4 and 6 ms.
    assert [served.ttft for served in record.served] == pytest.approx([12e-3, 22e-3, 22e-3])
    assert [served.tpot for served in record.served] == pytest.approx([10e-3] * 3)
    cut = Simulation([instance]).run(requests, until=3e-3)
    assert len(cut.open) == 3  # those in the front end too


def test_times_are_checked() -> None:
    with pytest.raises(ValueError, match="results must be"):
        HostTimes(results=-1.0)
    with pytest.raises(TypeError, match="shares_cores must be"):
        HostTimes(shares_cores=1)  # type: ignore[arg-type]
