"""Baselines: nothing is lost or done twice, one request alone takes what the formula says, order is kept."""

import itertools

import pytest

from longctx.parallel import Topology
from longctx.serving import ParallelPlan
from longctx.serving.predictor import Work
from longctx.simulation.hardware import predictor
from longctx.simulation.models import MODELS
from longctx.simulation.workloads import WorkloadRequest, arrive_at_rate, make_mix
from papers.baselines import BASELINES, make_simulation

MODEL, TOPOLOGY = MODELS["llama-3-8b"], Topology.preset("medha-a100")


def mixed(count: int, rate: float, seed: int = 3) -> list[WorkloadRequest]:
    """Short prompts, and some of 20,000 to 90,000 tokens."""
    requests = make_mix("sharegpt4", count, seed)
    long = [WorkloadRequest(0.0, 20_000 + 7_000 * at, 30, number=9 * at) for at in range(count // 9)]
    chosen = {request.number: request for request in (*requests, *long)}
    return arrive_at_rate([chosen[number] for number in sorted(chosen)], rate, seed)


@pytest.mark.parametrize("name", BASELINES)
def test_every_request_ends_once_with_all_its_tokens(name: str) -> None:
    requests = mixed(40, 6.0)
    record = make_simulation(name, MODEL, TOPOLOGY, 16, prefix_cache=False).run(requests, keep_steps=False)
    assert not record.open
    assert sorted(each.number for each in record.served) == list(range(40))
    for each in record.served:
        request, metrics = next(x for x in requests if x.number == each.number), each.metrics
        assert (metrics.prompt_tokens, metrics.output_tokens) == (request.prompt_tokens, request.output_tokens)
        assert metrics.arrival <= metrics.admitted < metrics.first_token <= metrics.last_token <= metrics.finished
        assert metrics.longest_gap >= each.tpot
    # No token is computed twice: a decode's first token comes with its prompt.
    assert record.totals.rows == sum(x.prompt_tokens + x.output_tokens - 1 for x in requests)
    assert record.totals.samples == sum(x.output_tokens for x in requests)
    assert record.totals.pairs == sum(x.length * (x.length - 1) // 2 for x in requests)
    assert 0 < sum(each.totals.busy * each.num_devices for each in record.instances) <= 16 * record.seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["medha-fcfs", "sarathi-512", "sarathi-2048", "striped", "loongserve"])
def test_first_come_is_first_served(name: str) -> None:
    requests = [WorkloadRequest(0.001 * n, [200_000, 100, 60_000, 300][n % 4], 2, number=n) for n in range(12)]
    simulation = make_simulation(name, MODEL, TOPOLOGY, 16, prefix_cache=False)
    admitted = sorted(simulation.run(requests).served, key=lambda each: (each.metrics.admitted, each.number))
    assert [each.number for each in admitted] == list(range(12))


def test_chunks_of_one_prompt_follow_each_other_only_in_a_sequence_pipeline() -> None:
    """Mnemosyne, 4.3: with 2 stages a prompt takes half the time, but for the last chunk's second stage."""
    prompt, plan = [WorkloadRequest(0.0, 40_960, 1)], ParallelPlan(stage=2, tensor=8)
    seconds = predictor(MODEL, TOPOLOGY, plan, max_rows=512).seconds
    chunks = [seconds(Work().with_chunk(at, 512, at == 40_448)) for at in range(0, 40_960, 512)]
    options = {"chunking": "static", "token_budget": 512, "prefix_cache": False, "policy": "fcfs"}
    ours = make_simulation("medha", MODEL, TOPOLOGY, 16, **options).run(prompt).served[0].ttft
    sarathi = make_simulation("sarathi-512", MODEL, TOPOLOGY, 16, prefix_cache=False).run(prompt).served[0].ttft
    assert sarathi == pytest.approx(2 * sum(chunks))
    assert ours == pytest.approx(sum(max(pair) for pair in itertools.pairwise([0.0, *chunks, 0.0])))


def test_two_prompts_fill_both_stages_of_a_standard_pipeline() -> None:
    prompts = [WorkloadRequest(0.0, 40_960, 1, number=number) for number in range(2)]
    simulation = make_simulation("sarathi-512", MODEL, TOPOLOGY, 16, prefix_cache=False)
    alone, both = simulation.run(prompts[:1]), simulation.run(prompts)
    assert both.seconds == pytest.approx(alone.seconds, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("medhaa", MODEL, TOPOLOGY, 16), "baseline must be one of medha, "),
        (("medha", MODEL, TOPOLOGY, 12), "devices must be at most 8 or a multiple of it, got 12"),
        (("medha", MODEL, TOPOLOGY, 16, ParallelPlan(tensor=8)), "plan must be of 16 devices, it is of 8"),
        (("loongserve", MODELS["llama-3-405b"], TOPOLOGY, 16), "tensor must be larger: 2 devices have no memory"),
    ],
)
def test_what_can_not_be_made_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_simulation(*arguments)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        # Rows of each step: the second prompt comes while the third token of the first request is computed.
        ("vllm-mixed", [4000, 1, 1, 8192, 1810, 2, 2, 1]),
        ("trtllm", [4000, 1, 1, 8192, 1810, 2, 2, 1]),
        ("sglang", [4000, 1, 1, 8192, 1808, 2, 2, 1, 1, 1]),
    ],
)
def test_engines_of_today_order_their_steps(name: str, steps: list[int]) -> None:
    simulation = make_simulation(name, MODEL, TOPOLOGY, 8, prefix_cache=False)
    first = simulation.run([WorkloadRequest(0.0, 4000, 8)])
    at = first.steps[2].finished - 1e-6
    record = make_simulation(name, MODEL, TOPOLOGY, 8, prefix_cache=False).run(
        [WorkloadRequest(0.0, 4000, 8), WorkloadRequest(at, 10_000, 3, number=1)]
    )
    assert [step.decodes + step.prompt_tokens for step in record.steps] == steps
