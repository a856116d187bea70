"""LoongServe: one request alone takes what the formula says, order is kept, and groups are the best."""

import math

import pytest

from longctx.parallel import Topology
from longctx.serving import Metrics, ParallelPlan
from longctx.serving.predictor import Work
from longctx.simulation import EventLoop, Simulation
from longctx.simulation.hardware import predictor
from longctx.simulation.models import MODELS
from longctx.simulation.workloads import WorkloadRequest, arrive_at_rate, closed_loop, make_mix
from papers.baselines import make_simulation
from papers.loongserve import LoongServe
from papers.loongserve.decode_group import Active, DecodeGroup
from papers.loongserve.server import Group, plan_groups

MODEL, TOPOLOGY = MODELS["llama-3-8b"], Topology.preset("medha-a100")


def test_a_window_closes_with_what_is_open() -> None:
    requests = arrive_at_rate(make_mix("sharegpt4", 40, 3), 20.0, 3)
    simulation = make_simulation("loongserve", MODEL, TOPOLOGY, 16)
    whole, cut = simulation.run(requests), simulation.run(requests, until=1.5)
    served = [each for each in whole.served if each.metrics.finished - whole.served[0].metrics.arrival < math.inf]
    assert len(cut.served) + len(cut.open) == sum(x.arrival <= 1.5 for x in requests)
    ended = {each.number: each.ttft for each in served}
    assert cut.served
    assert all(each.ttft == pytest.approx(ended[each.number]) for each in cut.served)
    assert all(each.ttft is None or each.ttft == pytest.approx(ended[each.number]) for each in cut.open)


@pytest.mark.parametrize(("tokens", "degree"), [(300_000, 4), (1_200, None)])
def test_loongserve_alone_takes_the_time_of_one_sharded_batch(tokens: int, degree: int | None) -> None:
    server = LoongServe(MODEL, TOPOLOGY)
    record = Simulation([server]).run([WorkloadRequest(1.0, tokens, 3)])
    seconds = {
        n: predictor(MODEL, TOPOLOGY, ParallelPlan(1, n, 2)).seconds(
            Work().with_sharded(0, tokens, n, samples=True, exchange="pass_kv")
            if n > 1
            else Work().with_chunk(0, tokens, True)
        )
        for n in (1, 2, 3, 4)
    }
    (served,) = record.served
    assert served.ttft == pytest.approx(min(seconds.values()))
    assert degree is None or served.ttft == pytest.approx(seconds[degree])
    alone = predictor(MODEL, TOPOLOGY, ParallelPlan(1, 1, 2))
    decodes = sum(alone.seconds(Work(1, 1, tokens + more)) for more in (1, 2))
    assert served.tpot == pytest.approx(decodes / 2)


def test_a_prompt_beyond_one_instance_decodes_on_several() -> None:
    server = LoongServe(MODEL, TOPOLOGY)
    tokens = 2 * server.cost.capacity
    record = Simulation([server]).run([WorkloadRequest(0.0, tokens, 2)])
    expected = predictor(MODEL, TOPOLOGY, ParallelPlan(1, 3, 2)).seconds(
        Work(1, 1, -(-(tokens + 1) // 3), replicated=1)
    )
    assert record.served[0].tpot == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"requests\[0\] has .* tokens, more than the .* of 4 instances"):
        Simulation([server]).run([WorkloadRequest(0.0, 5 * server.cost.capacity, 2)])


def test_nobody_passes_a_long_prompt_that_waits() -> None:
    """With all instances at long prompts, a short one that comes waits for the first of these to end."""
    long = [WorkloadRequest(0.0, 500_000, 1, number=number) for number in range(2)]
    short = WorkloadRequest(1.0, 100, 1, number=2)
    record = make_simulation("loongserve", MODEL, TOPOLOGY, 16).run([*long, short])
    ttft = {each.number: each.ttft for each in record.served}
    assert ttft[0] == pytest.approx(ttft[1])
    assert ttft[2] > ttft[0] - 1
    with_pool = make_simulation("loongserve-reserved", MODEL, TOPOLOGY, 16).run([*long, short])
    pooled = {each.number: each.ttft for each in with_pool.served}
    assert pooled[2] < 0.1
    # Six instances are left for two long prompts: one of them has two.
    assert max(pooled[0], pooled[1]) == pytest.approx(2 * ttft[0], rel=0.05)


def test_decodes_give_way_to_a_prompt_and_pay_for_the_transfer() -> None:
    """With a decode on every instance, the next prompt's instance is freed by moving one to another."""
    server = LoongServe(MODEL, TOPOLOGY, num_instances=2, max_degree=1)
    first = [WorkloadRequest(0.0, 9_000, 400, number=number) for number in range(2)]
    record = Simulation([server]).run([*first, WorkloadRequest(2.0, 2_000, 5, number=2)])
    alone = server.cost.prefill_seconds([2_000], 1)
    served = {each.number: each for each in record.served}
    step = server.cost.decode_seconds(1, 9_400, 1)
    moved = server.cost.migration_seconds(9_400)
    assert alone < served[2].ttft <= alone + step + moved
    gaps = sorted(served[number].metrics.longest_gap for number in (0, 1))
    assert gaps[0] < 2.5 * step < moved < gaps[1]


def test_follow_ups_wait_for_the_answer() -> None:
    requests = closed_loop([WorkloadRequest(0.0, 500, 20, number=n) for n in range(9)], users=2, delay=0.5)
    record = make_simulation("loongserve", MODEL, TOPOLOGY, 16).run(requests)
    ended = {each.number: each.metrics.finished for each in record.served}
    came = {each.number: each.metrics.arrival for each in record.served}
    assert all(came[n] == pytest.approx(ended[n - 2] + 0.5) for n in range(2, 9))


def test_groups_have_the_least_sum_of_latencies() -> None:
    """Against all ways to divide prompts and instances."""
    lengths = [900, 50, 4000, 700]

    def seconds(first: int, stop: int, degree: int) -> float:
        return 10 * degree + sum(lengths[first:stop]) / degree

    def total(groups: tuple[Group, ...]) -> float:
        return sum((group.stop - group.first) * seconds(*group) for group in groups)

    def divide(first: int, instances: int) -> list[tuple[Group, ...]]:
        if first == len(lengths):
            return [()]
        return [
            (Group(first, stop, degree), *rest)
            for stop in range(first + 1, len(lengths) + 1)
            for degree in range(1, min(instances, 3) + 1)
            for rest in divide(stop, instances - degree)
        ]

    for instances in (1, 2, 4, 6):
        groups = plan_groups(seconds, len(lengths), instances, 3)
        assert groups is not None
        assert total(tuple(groups)) == min(map(total, divide(0, instances)))
        assert [group.first for group in groups] == [0, *(group.stop for group in groups[:-1])]
        assert sum(group.degree for group in groups) <= instances
    assert plan_groups(lambda first, stop, degree: math.inf, 2, 4, 3) is None


def test_many_decode_steps_as_one_event_are_the_same_as_one_by_one() -> None:
    def serve(longest: int) -> tuple[list[tuple[int, float]], int]:
        loop, ended = EventLoop(), []
        group = DecodeGroup(
            loop,
            lambda rows, keys: 1e-3 + 1e-4 * rows + 1e-6 * keys,
            lambda steps, rows, keys, took: None,
            lambda each: ended.append((each.request.number, loop.now)),
            lambda group: None,
        )

        def join(number: int, left: int) -> None:
            request = WorkloadRequest(0.0, 100 * number + 1, left, number=number)
            metrics = Metrics(loop.now, request.prompt_tokens, last_token=loop.now)
            group.change(lambda: group.active.append(Active(request, metrics, request.prompt_tokens, left)))

        for number, left in enumerate([40, 7, 90, 25]):
            loop.at(0.017 * number, lambda number=number, left=left: join(number, left))
        for at in range(longest):
            loop.at(0.0004 * at, lambda: group.change(lambda: None))  # every change ends what was planned
        loop.run()
        return ended, loop.num_events

    few, many = serve(0), serve(1000)
    assert few[0] == [(number, pytest.approx(at)) for number, at in many[0]]
    assert few[1] < 20 < many[1]
