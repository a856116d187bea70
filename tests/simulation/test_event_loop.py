"""The event loop, links, and workloads over several instances: order, windows, follow-ups, bad input."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from longctx.models import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving import EngineConfig, ParallelPlan
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.predictor.roofline import roofline
from longctx.simulation import EventLoop, Instance, Link, Record, Simulation
from longctx.simulation.workloads import WorkloadRequest

MODEL = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, max_positions=50_000)
PREDICTOR = roofline(MODEL, Topology.preset("a100-nvlink"), 512, overhead=1e-3)


def make(name: str = "0", **options: Any) -> Instance:
    options = {"page_size": 64, "num_pages": 2000, "max_running": 8, "token_budget": 512} | options
    bandwidth = {"host_bandwidth": options.pop("host_bandwidth")} if "host_bandwidth" in options else {}
    return Instance(MODEL, EngineConfig(**options), PREDICTOR, name=name, **bandwidth)


def poisson(count: int, rate: float, seed: int = 0) -> list[WorkloadRequest]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    prompts, outputs = rng.integers(1, 3000, count).tolist(), rng.integers(1, 200, count).tolist()
    return [
        WorkloadRequest(*each, number=number) for number, each in enumerate(zip(times, prompts, outputs, strict=True))
    ]


def test_actions_run_in_the_order_of_their_times_and_of_equal_times_as_planned() -> None:
    loop, ran = EventLoop(), list[str]()
    loop.at(2.0, lambda: ran.append("b"))
    loop.at(1.0, lambda: (ran.append("a"), loop.at(2.0, lambda: ran.append("d"))))
    loop.at(2.0, lambda: ran.append("c"))
    loop.at(5.0, lambda: ran.append("late"))
    loop.run(until=4.0)
    assert ran == ["a", "b", "c", "d"]
    assert loop.now == 4.0
    loop.run()
    assert (ran[-1], loop.now, loop.num_events) == ("late", 5.0, 5)


@pytest.mark.parametrize("time", [0.5, math.nan, math.inf])
def test_an_action_is_not_planned_in_the_past(time: float) -> None:
    loop = EventLoop()
    loop.at(1.0, lambda: None)
    loop.run()
    with pytest.raises(ValueError, match="time must be finite and not before now"):
        loop.at(time, lambda: None)


def test_transfers_share_a_link() -> None:
    """100 bytes a second: 100 bytes alone until 0.5 s; then beside 25 others, which end at 1 s."""
    loop, ends = EventLoop(), dict[str, float]()
    link = Link(loop, bandwidth=100.0, latency=0.25)
    loop.at(0.0, lambda: link.send(100, lambda: ends.update(first=loop.now)))
    loop.at(0.5, lambda: link.send(25, lambda: ends.update(second=loop.now)))
    loop.at(0.5, lambda: link.send(0, lambda: ends.update(empty=loop.now)))
    loop.run()
    assert ends == pytest.approx({"empty": 0.75, "second": 1.25, "first": 1.5})
    assert len(link) == 0


@pytest.mark.parametrize(("bandwidth", "latency"), [(0.0, 0.0), (math.nan, 0.0), (1.0, -1.0), (1.0, math.inf)])
def test_a_link_has_a_bandwidth(bandwidth: float, latency: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Link(EventLoop(), bandwidth, latency)


def test_bytes_are_not_negative() -> None:
    with pytest.raises(ValueError, match="num_bytes"):
        Link(EventLoop(), 1.0).send(-1, lambda: None)


def test_the_same_workload_gives_the_same_record() -> None:
    def run() -> Record:
        return Simulation([make("a"), make("b")]).run(poisson(40, 20.0))

    assert run() == run()


def test_requests_go_where_least_is_to_be_read() -> None:
    lengths = [(0.0, 3000), (0.0, 100), (1e-4, 100)]
    requests = [WorkloadRequest(at, length, 1, number=number) for number, (at, length) in enumerate(lengths)]
    record = Simulation([make("a"), make("b")]).run(requests)
    assert [(each.instance, each.metrics.prompt_tokens) for each in record.served] == [
        ("b", 100),
        ("b", 100),
        ("a", 3000),
    ]
    routed = Simulation([make("a"), make("b")], lambda request, instances, now: instances[-1]).run(requests)
    assert {each.instance for each in routed.served} == {"b"}
    assert [each.totals.rows for each in routed.instances] == [0, 3200]


def test_two_instances_serve_what_one_does_by_halves() -> None:
    """Two that do not share anything take as long as one with half of the workload."""
    requests = poisson(20, 10.0)
    both = sorted((*requests, *requests), key=lambda request: request.arrival)
    turn = iter([0, 1] * 20)
    two = Simulation([make("a"), make("b")], lambda request, instances, now: instances[next(turn)]).run(both)
    one = Simulation([make()]).run(requests)
    for record in two.instances:
        assert record.totals == one.totals
    assert two.seconds == one.seconds
    assert [time for time, _, _ in one.timeline] == sorted({time for time, _, _ in two.timeline})
    assert [(2 * running, 2 * waiting) for _, running, waiting in one.timeline] == [
        (running, waiting) for _, running, waiting in two.timeline[1::2]
    ]


def test_a_window_leaves_requests_open() -> None:
    requests = [WorkloadRequest(0.0, 500, 10), WorkloadRequest(0.1, 500, 5000), WorkloadRequest(50.0, 1, 1)]
    simulation = Simulation([make(max_running=1, max_length=6000, prefix_cache=False)])
    record = simulation.run(requests, until=2.0)
    assert record.seconds == 2.0
    assert [each.metrics.output_tokens for each in record.served] == [10]
    (left,) = record.open
    assert (left.due, left.metrics.prompt_tokens) == (0.1, 500)
    assert left.ttft is not None
    assert 0 < left.metrics.output_tokens < 5000
    waiting = simulation.run([WorkloadRequest(0.0, 500, 5000), WorkloadRequest(0.0, 500, 5)], until=1.0)
    assert [each.ttft is None for each in waiting.open] == [False, True]
    again = simulation.run(requests[:1])
    assert again.served[0].ttft == pytest.approx(record.served[0].ttft)
    assert again.open == []


def test_what_follows_comes_after_the_end() -> None:
    """Two turns of a conversation, whose second begins with the first and its output."""
    requests = [
        WorkloadRequest(1.0, 640, 128, tuple(range(12)), 64, number=0),
        WorkloadRequest(0.0, 832, 10, tuple(range(13)), 64, number=1, after=0, delay=2.5),
        WorkloadRequest(0.0, 100, 10, number=2, after=1),
    ]
    first, second, third = Simulation([make()]).run(requests).served
    assert first.metrics.finished is not None
    assert second.due == pytest.approx(first.metrics.finished + 2.5)
    assert third.due == second.metrics.finished
    assert second.ttft < first.ttft
    # The last token of the first turn was never computed.
    assert second.metrics.cached_tokens == 640 + 128 - 64


def test_prefixes_are_found_by_blocks() -> None:
    """Of pages of 64 tokens in blocks of 100: one is found if all blocks up to its end are equal."""
    requests = [
        WorkloadRequest(0.0, 1000, 1, tuple(range(10)), 100, number=0),
        WorkloadRequest(9.0, 1000, 1, (0, 1, 2, 99, 4), 100, number=1),
        WorkloadRequest(18.0, 1000, 1, (7, 1, 2), 100, number=2),
        WorkloadRequest(27.0, 1000, 1, tuple(range(10)), 50, number=3),
    ]
    served = Simulation([make()]).run(requests).served
    assert [each.metrics.cached_tokens for each in served] == [0, 256, 0, 0]


def test_tokens_and_lengths_are_simulated_alike() -> None:
    """Prompts with tokens take the way of a server's requests; the same lengths and prefixes, the same times."""
    lengths = [WorkloadRequest(0.2 * i, 700 + 50 * i, 30, (1, 2, 3, 4 + i // 2), 128, number=i) for i in range(6)]
    tokens = [dataclasses.replace(each, prompt=tuple(each.tokens(1000).tolist()), blocks=()) for each in lengths]
    one, other = (Simulation([make()]).run(requests) for requests in (lengths, tokens))
    assert sum(each.metrics.cached_tokens for each in one.served) > 0
    assert one.served == other.served
    assert one.totals == other.totals


def test_loads_take_their_bytes_over_the_bandwidth_of_the_host() -> None:
    """A prefix that the devices had to forget: it comes from the host's memory, if that is faster than to compute."""
    shared, others = tuple(range(100)), [WorkloadRequest(4.0 * i, 6000, 1, number=i) for i in range(1, 4)]
    requests = [WorkloadRequest(0.0, 6400, 1, shared, 64), *others, WorkloadRequest(20.0, 6400, 1, shared, 64, 9)]
    tiers = TierConfig(host_bytes=2 * 10**11)
    page = 2 * 32 * 8 * 128 * 2 * 64
    ttft = {}
    for bandwidth in (1e9, 1e10, 1e11):
        record = Simulation([make(num_pages=150, tiers=tiers, host_bandwidth=bandwidth)]).run(requests)
        last = record.served[-1]
        assert last.metrics.loaded_tokens > 6000
        ttft[bandwidth] = last.ttft
        pages = last.metrics.loaded_tokens // 64
        assert last.ttft > pages * page / bandwidth
        assert last.ttft < pages * page / bandwidth + 0.2
    assert Simulation([make(num_pages=150)]).run(requests).served[-1].metrics.cached_tokens < 6000
    assert ttft[1e11] < ttft[1e10] < ttft[1e9]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival": 0.5}, r"requests\[1\] must arrive at 1.0 or later"),
        ({"prompt_tokens": 50_001}, r"requests\[1\] has 50002 tokens, more than the 50000"),
        ({"after": 3}, r"requests\[1\] must follow one that stands before it"),
        ({"number": 0}, r"requests\[1\] must have a number of its own"),
    ],
)
def test_what_can_not_be_served_is_refused(change: dict[str, Any], message: str) -> None:
    requests = [WorkloadRequest(1.0, 10, 1, number=0), WorkloadRequest(1.0, 10, 1, number=5)]
    requests[1] = dataclasses.replace(requests[1], **change)
    requests.append(WorkloadRequest(0.0, 10, 1, number=6, after=0))
    simulation = Simulation([make()])
    with pytest.raises(ValueError, match=message):
        simulation.run(requests)
    assert len(simulation.run(requests[:1]).served) == 1


@pytest.mark.parametrize("until", [0.0, -1.0, math.nan])
def test_a_window_is_positive(until: float) -> None:
    with pytest.raises(ValueError, match="until must be positive"):
        Simulation([make()]).run([WorkloadRequest(0.0, 1, 1)], until=until)


def test_instances_have_names_of_their_own() -> None:
    for instances in ([], [make("a"), make("a")]):
        with pytest.raises(ValueError, match="names of their own"):
            Simulation(instances)


def test_a_plan_must_suit_the_model() -> None:
    config = EngineConfig(num_pages=10, token_budget=64)
    with pytest.raises(ValueError, match="tensor"):
        Instance(MODEL, config, PREDICTOR, ParallelPlan(tensor=3))
    with pytest.raises(ValueError, match="num_pages must be given"):
        Instance(MODEL, EngineConfig(), PREDICTOR)
    with pytest.raises(ValueError, match="more than the 10 that the engine has"):
        Simulation([Instance(MODEL, config, PREDICTOR)]).run([WorkloadRequest(0.0, 10_000, 1)])
