"""Instances, servers and a router that share cores, by hand: each step takes 10 ms of a core."""

from typing import Any

import pytest

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig, Role
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.models import LlamaConfig
from longctx.serving import EngineConfig
from longctx.serving.predictor import RuntimePredictor
from longctx.simulation import EventLoop, HostTimes, Link, Record, Simulation
from longctx.simulation.cluster import Change, ClusterInstance, ClusterSettings, ServerTimes
from longctx.simulation.event_loop import Thread
from longctx.simulation.workloads import WorkloadRequest

MODEL = LlamaConfig(50, 8, 8, 1, 1, 1, 8, max_positions=1000)
CONFIG = EngineConfig(num_pages=64, token_budget=64, max_running=4, run_ahead=1, prefix_cache=False)
STEPS = RuntimePredictor.of_rows({64: 10e-3}, (64,), (0.0,))
SERVER, ROUTER = ServerTimes(request=2e-3, token=1e-3), ServerTimes(request=3e-3, token=0.5e-3)


def instance(name: str, core: str, role: Role = "both", **options: Any) -> ClusterInstance:
    return ClusterInstance(name, role, MODEL, CONFIG, STEPS, core=core, is_patient=True, **options)


def serve(
    instances: list[ClusterInstance],
    *requests: tuple[float, int, int],
    changes: list[Change] | None = None,
    **settings: Any,
) -> Record:
    conductor = Conductor(
        ConductorConfig(policy="least_loaded", admission="none", tpot=1e-3, is_inline=False), PrefixIndex()
    )
    rows = [WorkloadRequest(*request, number=number) for number, request in enumerate(requests)]
    return Simulation(instances, conductor, ClusterSettings(**settings), changes or []).run(rows)


def ttft(record: Record) -> list[float]:
    return [each.ttft for each in sorted(record.served, key=lambda each: each.number)]


def test_a_thread_does_its_work_in_order_and_shares_a_core() -> None:
    loop, ended = EventLoop(), dict[str, float]()
    core = Link(loop, 1.0)
    one, other = Thread([core]), Thread([core])
    for thread, name, seconds in ((one, "a", 1.0), (one, "b", 2.0), (other, "c", 1.0)):
        thread.run(seconds, lambda name=name: ended.update({name: loop.now}))
    assert one.seconds == 3.0
    loop.run()
    assert ended == {"a": 2.0, "c": 2.0, "b": 4.0}  # two threads at a time until 2 s
    assert one.seconds == 0.0


@pytest.mark.parametrize(
    ("cores", "second", "expected"),
    [
        ("00", 0.0, [20e-3, 20e-3]),
        ("00", 5e-3, [15e-3, 15e-3]),  # 5 ms alone, 10 ms of which each gets half, 5 ms alone
        ("01", 5e-3, [10e-3, 10e-3]),
        (("", ""), 5e-3, [10e-3, 10e-3]),
    ],
)
def test_steps_on_one_core_take_longer_while_others_compute(cores: str, second: float, expected: list[float]) -> None:
    instances = [instance("a", cores[0]), instance("b", cores[1])]
    record = serve(instances, (0.0, 8, 1), (second, 8, 1))
    assert ttft(record) == pytest.approx(expected)
    assert [each.totals.steps for each in record.instances] == [1, 1]


def test_a_server_takes_its_core_from_a_step() -> None:
    # At 4 ms the second request comes, whose 2 ms take until 8 ms; the step, which has 4 ms left then, ends at 12 ms.
    record = serve(
        [instance("a", "0", server=ServerTimes(request=1e-3, prompt_token=0.125e-3))], (0, 8, 1), (6e-3, 8, 1)
    )
    assert ttft(record) == pytest.approx([14e-3, 24e-3 - 6e-3])


@pytest.mark.parametrize("cores", ["01", ("", "")])
def test_a_request_passes_the_router_and_servers_and_its_token_comes_back(cores: str) -> None:
    one = [instance("a", cores[0], server=SERVER)]
    assert ttft(serve(one, (0.0, 8, 1), router=ROUTER)) == pytest.approx([(3 + 2 + 10 + 1 + 0.5) * 1e-3])
    two = [instance("p", cores[0], "prefill", server=SERVER), instance("d", cores[1], "decode", server=SERVER)]
    for tokens in (1, 3):  # the server that decodes asks the one that reads the prompt
        record = serve(two, (0.0, 8, tokens), router=ROUTER, call_seconds=0.25e-3, report_seconds=10.0)
        # With more tokens to come, the step that draws the second one shares the core with the server meanwhile.
        of_server = 2 if tokens > 1 and cores == "01" else 1
        assert ttft(record) == pytest.approx([(3 + 2 + 2 + 0.5 + 10 + of_server + 0.5) * 1e-3], rel=1e-5)
        assert record.served[0].metrics.finished >= record.served[0].metrics.first_token


def test_a_router_runs_on_the_core_that_has_the_least_to_do() -> None:
    # The first request's step is on core 0 until 13 ms; the second one's router runs on core 1, and so does its step.
    instances = [instance("a", "0"), instance("b", "1")]
    record = serve(instances, (0.0, 8, 1), (4e-3, 8, 1), router=ServerTimes(request=3e-3))
    assert ttft(record) == pytest.approx([13e-3, 13e-3])


def test_tokens_of_decodes_take_their_time_of_the_core() -> None:
    # Each of ten steps after the first has 1 ms of the server beside it: it takes 11 ms. The first token takes 1 ms.
    server = ServerTimes(token=1e-3)
    (served,) = serve([instance("a", "0", server=server)], (0.0, 8, 11), report_seconds=10.0).served
    assert served.ttft == pytest.approx(12e-3)  # 1 ms of the server and 1 ms of the second step
    assert served.metrics.finished == pytest.approx(10e-3 + 10 * 11e-3)


def test_what_the_host_takes_is_part_of_steps_on_a_core() -> None:
    host = HostTimes(request=1e-3, batch=2e-3, results=3e-3, shares_cores=True)
    both = [instance(name, "0", host=host) for name in "ab"]
    assert ttft(serve(both, (0.0, 8, 1), (0.0, 8, 1))) == pytest.approx([2 * (1 + 2 + 10 + 3) * 1e-3] * 2)
    with pytest.raises(ValueError, match="host must say that it shares cores"):
        instance("a", "0", host=HostTimes(results=1e-3))


def test_reports_take_their_time() -> None:
    server = ServerTimes(report=1e-3)
    record = serve([instance("a", "0", server=server)], (5e-3, 8, 1), report_seconds=10e-3)
    assert ttft(record) == pytest.approx([11e-3])  # that of 10 ms


def test_a_request_goes_on_elsewhere_when_its_instance_dies_on_a_shared_core() -> None:
    instances = [instance("a", "0", server=SERVER), instance("b", "0", server=SERVER)]
    for at in (1e-3, 6e-3, 25e-3):  # in the server, in the first step, and later
        changes = [Change(at, "a", "kill")]
        record = serve(instances, (0.0, 8, 4), changes=changes, router=ROUTER)
        (served,) = record.served
        assert (served.instance, served.metrics.output_tokens) == ("b", 4)


def test_two_runs_on_shared_cores_are_the_same() -> None:
    instances = [
        instance(f"{role}{core}", core, role, server=SERVER)  # type: ignore[arg-type]
        for role in ("prefill", "decode")
        for core in "01"
    ]
    requests = [(3e-3 * number, 8 + number % 50, 1 + number % 7) for number in range(60)]
    first, second = (serve(instances, *requests, router=ROUTER) for _ in range(2))
    assert len(first.served) == len(requests)
    assert first.served == second.served
