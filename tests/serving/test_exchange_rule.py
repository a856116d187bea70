"""Which rows are sharded, and which exchange they take: by prediction, by the papers' rules, and as set."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.models import LlamaConfig
from longctx.parallel import EmpiricalRule, Topology, choose_ring
from longctx.parallel.cost import LLAMA3_405B
from longctx.serving import EngineConfig, ParallelPlan
from longctx.serving.engine.metrics import StepMetrics
from longctx.serving.executor.step_shapes import StepShapes
from longctx.serving.kv_cache.placement import Grown, Interleaved, Placement
from longctx.serving.parallel_plan import EXCHANGES
from longctx.serving.predictor import CurvePredictor
from longctx.serving.predictor.roofline import roofline
from longctx.serving.scheduler.batch import Chunk, work_by_rank
from longctx.serving.scheduler.exchange_rule import ExchangeRule
from longctx.serving.scheduler.sequence import Sequence
from longctx.serving.scheduler.step_budget import StepBudget
from longctx.simulation import Instance, Simulation
from longctx.simulation.workloads import WorkloadRequest

PAGE, RANKS, ROWS = 64, 4, 4096
MODEL = LlamaConfig.preset("llama-3.1-405b")


def costs(topology: str, ranks: int = RANKS) -> CurvePredictor:
    return roofline(MODEL, Topology.preset(topology), ROWS, tensor=8, context=ranks)


def rule(exchange: Any, topology: str | None = "h100-rdma", placement: Any = "interleave") -> ExchangeRule:
    plan = ParallelPlan(context=RANKS, tensor=8, exchange=exchange, placement=placement)
    predictor = None if topology is None else costs(topology)
    return ExchangeRule(plan, ROWS, PAGE, predictor, None if predictor is None else predictor.exchange)


def placed(length: int, placement: Placement | None = None) -> Sequence:
    sequence = Sequence("a sequence", 0, length, 1)
    sequence.pages = list(range(-(-length // PAGE)))
    sequence.placement = placement or Interleaved(RANKS, 0)
    sequence.rank_pages = sequence.placement.counts(0, len(sequence.pages))
    sequence.ranks = tuple(rank for rank, count in enumerate(sequence.rank_pages) if count)
    return sequence


def chunk(start: int, count: int, sharded: bool = True) -> Chunk:
    sequence = placed(start + count)
    return Chunk(sequence, 0, start, count, False, count == 1, tuple(range(RANKS)), sharded)


@pytest.mark.parametrize("tokens", [640, 1280, 2048])
def test_few_new_tokens_of_a_long_context_go_by_pass_q_over_a_network(tokens: int) -> None:
    """Of 128k on RDMA keys take several times as long; within a host, over NVLink, they are hidden."""
    few = [chunk(131_072 - tokens, tokens)]
    exchange, works = rule("auto").choose(few)
    assert exchange is not None
    assert exchange.name == "pass_q"
    seconds = {
        name: max(costs("h100-rdma").seconds(work) for work in work_by_rank(few, RANKS, PAGE, name))
        for name in ("pass_kv", "pass_q")
    }
    assert seconds["pass_kv"] > 1.2 * seconds["pass_q"]
    assert works == work_by_rank(few, RANKS, PAGE, "pass_q")
    assert f"T = {tokens:,}, P = {131_072 - tokens:,}" in exchange.reason
    assert f"pass_q {1e3 * seconds['pass_q']:.3g} ms" in exchange.reason
    full, _ = rule("auto").choose([chunk(0, 131_072)])
    assert full is not None
    assert full.name == "pass_kv"


@given(
    sizes=st.lists(st.tuples(st.integers(0, 200_000), st.integers(2, 20_000)), min_size=1, max_size=4),
    topology=st.sampled_from(["h100-nvlink", "h100-rdma", "h100-tcp", "meta-gti"]),
)
def test_auto_takes_what_is_predicted_to_be_fastest(sizes: list[tuple[int, int]], topology: str) -> None:
    chunks = [chunk(start, count) for start, count in sizes]
    exchange, works = rule("auto", topology).choose(chunks)
    predictor = costs(topology)
    seconds = {
        name: max(map(predictor.seconds, work_by_rank(chunks, RANKS, PAGE, name)))
        for name in ("pass_kv", "pass_q", "all_gather")
    }
    assert exchange is not None
    assert seconds[exchange.name] == min(seconds.values()) == max(map(predictor.seconds, works))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 200_000), st.integers(2, 20_000)), min_size=1, max_size=4),
    name=st.sampled_from(["algorithm_1", "algorithm_5", "empirical"]),
    topology=st.sampled_from(["h100-rdma", "h100-tcp"]),
    coefficients=st.none() | st.tuples(*[st.floats(-2, 2)] * 3),
)
def test_the_papers_rules_go_by_the_sums_of_new_and_of_cached_tokens(
    sizes: list[tuple[int, int]], name: str, topology: str, coefficients: tuple[float, float, float] | None
) -> None:
    empirical = EmpiricalRule(*coefficients) if coefficients is not None and name == "empirical" else None
    exchange, _ = rule(empirical or name, topology).choose([chunk(start, count) for start, count in sizes])
    tokens, cached = sum(count for _, count in sizes), sum(start for start, _ in sizes)
    hardware = Topology.preset(topology)
    answers = choose_ring(tokens, cached, RANKS, LLAMA3_405B.split(8), hardware, empirical or "predicted").answers
    assert exchange is not None
    assert exchange.name == answers[name]
    assert exchange.reason.startswith(name)
    assert exchange.reason.endswith(f"T = {tokens:,}, P = {cached:,}")


@pytest.mark.parametrize("exchange", [name for name in EXCHANGES if name != "kvp"])
def test_decodes_of_interleaved_pages_go_by_algorithm_4(exchange: str) -> None:
    by = rule(exchange)
    assert by.shards_decodes(8)
    found, _ = by.choose([chunk(100_000, 1), chunk(50_000, 1)])
    assert found is not None
    assert found.name == "pass_q"
    assert "algorithm 4" in found.reason


def test_decodes_beside_a_prompt_whose_keys_travel_are_replicated() -> None:
    """Else the step could take no exchange but pass-Q."""
    long, suffix = placed(200_000), placed(131_072)
    suffix.computed = 131_072 - 640
    assert not rule("pass_kv").shards_decodes(8, long)
    assert rule("pass_q").shards_decodes(8, long)
    assert not rule("auto").shards_decodes(8, long)
    assert rule("auto", "h100-tcp").shards_decodes(8, suffix)
    assert not rule("kvp").shards_decodes(8)
    assert not rule("auto", placement="grow").shards_decodes(8)


def test_a_short_rest_of_a_long_prompt_is_replicated_and_a_long_one_sharded() -> None:
    """Few rows cost the same on one rank as on all, and hops take time; many rows are shared."""
    by = rule("auto", placement="grow")
    keys = [131_072] * RANKS
    assert not by.shards(4 * 131_072, 4 * 131_072 + 16, keys)
    assert by.shards(4 * 131_072, 4 * 131_072 + ROWS, keys)
    assert by.shards(4 * 131_072, 4 * 131_072 + 10 * ROWS, keys)
    # On one rank alone, it leaves others to others, unless it is longer than a step.
    assert not by.shards(0, ROWS, [0] * RANKS)
    assert not by.shards(ROWS, 2 * ROWS, [ROWS, 0, 0, 0])
    assert by.shards(0, 2 * ROWS)


@pytest.mark.parametrize(("topology", "tokens"), [("h100-nvlink", 35), ("h100-rdma", 158), ("h100-tcp", 156)])
def test_how_many_tokens_are_worth_sharding_depends_on_the_link(topology: str, tokens: int) -> None:
    """The figures of docs/parallel_plans.md."""
    by, keys = rule("auto", topology, "grow"), [32_000] * RANKS
    assert not by.shards(128_000, 128_000 + tokens - 1, keys)
    assert by.shards(128_000, 128_000 + tokens, keys)


def test_a_prompt_stays_on_its_rank_where_the_link_is_too_slow() -> None:
    slow = Topology.from_dict({"device": "H100", "links": {axis: {"bandwidth": 1e7, "latency": 1e-3} for axis in AXES}})
    predictor = roofline(MODEL, slow, ROWS, context=RANKS)
    plan = ParallelPlan(context=RANKS)
    assert not ExchangeRule(plan, ROWS, PAGE, predictor).shards(0, 10 * ROWS)
    assert ExchangeRule(plan, ROWS, PAGE, costs("h100-rdma")).shards(0, 10 * ROWS)


AXES = ("stage", "context", "tensor")


@pytest.mark.parametrize("exchange", ["pass_q", "pass_kv", "all_gather", "algorithm_1", "algorithm_5", "empirical"])
def test_rules_without_prediction_shard_prompts_longer_than_a_step(exchange: str) -> None:
    by = rule(exchange, placement="grow")
    assert by.shards(0, ROWS + 1)
    assert not by.shards(100 * ROWS, 101 * ROWS, [25 * ROWS] * RANKS)
    assert rule(exchange).shards(0, 2)


def test_nothing_is_sharded_under_kvp_or_on_one_rank() -> None:
    assert not rule("kvp").shards(0, 100 * ROWS)
    assert not ExchangeRule(ParallelPlan(), ROWS).shards(0, 100 * ROWS)
    exchange, _ = ExchangeRule(ParallelPlan(), ROWS).choose([chunk(0, 5, sharded=False)._replace(ranks=(0,))])
    assert exchange is None


def test_replicated_rows_are_reported_as_kvp() -> None:
    decode = chunk(1000, 1, sharded=False)
    found, _ = rule("auto", placement="grow").choose([decode])
    assert found == ("kvp", "decodes alone")
    found, _ = rule("auto", placement="grow").choose([decode, chunk(100_000, 64, sharded=False)])
    assert found is not None
    assert found.name == "kvp"
    assert "sharded " in found.reason
    assert found.reason.endswith("T = 64, P = 100,000")
    found, _ = rule("kvp").choose([chunk(100_000, 64, sharded=False)])
    assert found == ("kvp", "set by the plan, T = 64, P = 100,000")


def simulate(exchange: Any, placement: Any, topology: str, prompt: int) -> list[StepMetrics]:
    """The steps of one prompt with some output, on 4 hosts."""
    config = EngineConfig(page_size=PAGE, num_pages=8192, max_running=8, token_budget=1024, chunking="static")
    plan = ParallelPlan(context=RANKS, tensor=8, exchange=exchange, placement=placement)
    simulation = Simulation([Instance(MODEL, config, costs(topology), plan)])
    return list(simulation.run([WorkloadRequest(0.0, prompt, 4)]).steps)


def test_every_step_says_what_it_exchanged_and_why() -> None:
    steps = simulate("auto", "interleave", "h100-rdma", 100_000)
    assert all(step.exchange is not None for step in steps)
    prompts = [step.exchange for step in steps if step.chunks]
    names = [exchange.name for exchange in prompts if exchange]
    assert names[0] == "all_gather"  # nothing is cached
    assert set(names[1:]) == {"pass_kv", "pass_q"}  # the last one has few tokens
    assert {step.exchange.name for step in steps if not step.chunks and step.exchange} == {"pass_q"}
    grown = simulate("kvp", "grow", "h100-rdma", 2_000)
    assert all(step.exchange is None for step in grown)  # it fits on one rank


@pytest.mark.parametrize("exchange", ["pass_q", "pass_kv", "all_gather"])
def test_a_set_exchange_is_taken_by_every_chunk_of_a_prompt(exchange: str) -> None:
    steps = simulate(exchange, "interleave", "h100-rdma", 20_000)
    assert {step.exchange.name for step in steps if step.chunks and step.exchange} == {exchange}


@pytest.mark.parametrize("name", ["algorithm_1", "algorithm_5"])
def test_rules_that_need_a_topology_say_so(name: str) -> None:
    with pytest.raises(ValueError, match=f"exchange='{name}' needs a topology, or a predictor that knows exchanges"):
        rule(name, None)
    config = EngineConfig(page_size=PAGE, num_pages=64, token_budget=64)
    bare = CurvePredictor((1, 64), (1e-3, 2e-3), 1e-9, 1e-9, 1e-6)
    with pytest.raises(ValueError, match="needs a topology"):
        Instance(MODEL, config, bare, ParallelPlan(context=2, exchange=name))
    Instance(MODEL, config, bare, ParallelPlan(context=2, exchange=name), topology=Topology.preset("h100-tcp"))


def test_without_costs_auto_says_that_it_has_none() -> None:
    exchange, _ = rule("auto", None).choose([chunk(1000, 1000)])
    assert exchange == ("pass_kv", "nothing to predict from, T = 1,000, P = 1,000")


@pytest.mark.parametrize(
    ("exchange", "error", "message"),
    [
        ("pass_k", ValueError, "exchange must be one of auto, .*, or empirical:ALPHA,BETA,GAMMA, got 'pass_k'"),
        ("pass_q:1", ValueError, "exchange must be one of"),
        ("empirical:", ValueError, "three numbers, separated by commas, got ''"),
        ("empirical:1,2", ValueError, "three numbers"),
        ("empirical:1,2,inf", ValueError, "gamma must be a finite number, got inf"),
        (None, TypeError, "exchange must be one of .*, got None"),
    ],
)
def test_wrong_exchanges_are_refused(exchange: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ParallelPlan(exchange=exchange)


@given(st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 3))
def test_coefficients_stay_as_they_are_in_a_plan(coefficients: tuple[float, float, float]) -> None:
    plan = ParallelPlan(exchange=EmpiricalRule(*coefficients))
    assert plan.empirical_rule == EmpiricalRule(*coefficients)
    assert ParallelPlan(**dataclasses.asdict(plan)) == plan  # as the header of a log has it


def test_growth_is_placed_where_the_keys_are() -> None:
    """A prompt that spans two of four ranks, with a short rest: its ranks alone compute it."""
    sequence = placed(40_000, Grown(RANKS, [(0, 2), (400, 3)]))
    sequence.computed = 39_900
    assert not rule("auto", placement="grow").shards_next(sequence)
    sequence.computed = 0
    assert rule("auto", placement="grow").shards_next(sequence)


@given(
    exchange=st.sampled_from([name for name in EXCHANGES if name != "kvp"]),
    placement=st.sampled_from(["grow", "interleave"]),
    sharded=st.integers(2, 2000) | st.integers(4000, 4 * 1024),
    replicated=st.integers(0, 9),
    local=st.integers(0, 9),
    start=st.sampled_from([0, 100, 5_000, 200_000]),
    decodes=st.booleans(),
    most=st.sampled_from([1024, 1024, 512, 100, 4]),
)
def test_what_is_chosen_is_what_is_compiled(
    exchange: str, placement: Any, sharded: int, replicated: int, local: int, start: int, decodes: bool, most: int
) -> None:
    """So the exchange that a step reports is the one that it runs."""
    if (exchange, placement) == ("pass_q", "interleave"):  # then all rows are sharded
        replicated = local = 0
    config = EngineConfig(page_size=PAGE, num_pages=8192, token_budget=1024, max_running=1, chunking=f"static:{most}")
    sharded = min(sharded, RANKS * most - 1)
    plan = ParallelPlan(context=RANKS, tensor=8, exchange=exchange, placement=placement)
    predictor = costs("h100-rdma")
    by = ExchangeRule(plan, most, PAGE, predictor, predictor.exchange, buckets=config.sharded_buckets)
    if placement == "interleave":  # there are no local rows then, and with pass-Q all are sharded
        replicated, local = 0 if exchange == "pass_q" else replicated, 0
    chunks = [chunk(start, sharded)] + ([chunk(start, 1)] if decodes and placement == "interleave" else [])
    chunks += [chunk(start, replicated, False)] if replicated else []
    chunks += [chunk(start, local, False)._replace(ranks=(1,))] if local else []
    found, _ = by.choose(chunks)
    assert found is not None
    shapes = StepShapes(MODEL, config, plan, 8192, 8192, 2)
    rows = -(-sum(chunk.num_tokens for chunk in chunks if chunk.sharded) // RANKS), replicated, local
    pages = -(-start // PAGE // RANKS)
    shape = shapes.of_step(rows, found.name, pages)
    # With nothing cached no query has to travel.
    assert shape.exchange == found.name or (not pages and (found.name, shape.exchange) == ("pass_q", "all_gather"))


def test_replicated_rows_of_different_ranks_are_counted_as_they_are_placed() -> None:
    """One after the other where they share a rank: 12 rows on each of three ranks, above the least bucket of 8."""
    config = EngineConfig(page_size=PAGE, num_pages=8192, token_budget=1024)
    plan, predictor = ParallelPlan(context=RANKS, tensor=8, exchange="auto"), costs("h100-rdma")
    buckets = config.growing_buckets(8)
    by = ExchangeRule(plan, 1024, PAGE, predictor, predictor.exchange, buckets=buckets)
    chunks = [chunk(0, 4 * (buckets[-1] - 20))]
    chunks += [chunk(1000, 4, False)._replace(ranks=ranks) for ranks in ((0, 1), (1, 2), (2, 3))]
    found, _ = by.choose(chunks)
    assert found is not None
    compiled = config.step_rows(plan)
    assert compiled.exchanges(compiled.round_up((buckets[-1] - 20, 12, 0))) == ("pass_q",) == (found.name,)


@pytest.mark.parametrize("chunking", ["static", "static:512", "static:1000"])
def test_keys_travel_in_steps_with_fewer_rows_than_the_token_budget(chunking: str) -> None:
    """A step is full of sharded rows when it has as many as `chunking` lets it have."""
    model, topology = LlamaConfig.preset("llama-3.1-8b"), Topology.preset("h100-rdma")
    config = EngineConfig(page_size=PAGE, num_pages=4000, token_budget=2048, chunking=chunking)
    plan = ParallelPlan(context=RANKS, placement="interleave")
    predictor = roofline(model, topology, 2048, context=RANKS)
    record = Simulation([Instance(model, config, predictor, plan, topology=topology)]).run(
        [WorkloadRequest(0.0, 60_000, 1)]
    )
    exchanges = [step.exchange for step in record.steps if step.exchange]
    assert all("pass_kv" in exchange.reason for exchange in exchanges[:-1])
    assert exchanges[1].name in ("pass_kv", "all_gather")  # few keys are cached


@pytest.mark.parametrize("exchange", ["pass_q", "pass_kv", "all_gather", "algorithm_1", "empirical"])
def test_a_step_is_filled_by_the_time_of_the_exchange_that_it_will_take(exchange: str) -> None:
    by, predictor = rule(exchange, "h100-tcp"), costs("h100-tcp")
    plan = ParallelPlan(context=RANKS, tensor=8, exchange=exchange, placement="interleave")
    sequence = placed(100_000)
    sequence.computed = 80_000
    step = StepBudget(plan, PAGE, predictor, ROWS, [], by)
    found, works = by.choose([chunk(80_000, 8000)])
    assert found is not None
    assert step.seconds_with(sequence, 8000) == pytest.approx(max(map(predictor.seconds, works)))


def steps_beside_decodes(
    config: EngineConfig, prompts: list[tuple[int, int]], decodes: int, topology: str = "h100-rdma"
) -> list[StepMetrics]:
    """Steps of `ParallelPlan.meta(4, 8)` with chunks of prompts that come together, beside running decodes.

    Args:
      prompts: cached and new tokens of each.
    """
    cached = [
        WorkloadRequest(0.0, start, 1, (order,), start, order) for order, (start, _) in enumerate(prompts) if start
    ]
    running = [WorkloadRequest(1e3, 100, 400, number=len(prompts) + number) for number in range(decodes)]
    last = [
        WorkloadRequest(1010.0, start + new, 1, (order,) * (start > 0), start, len(prompts) + decodes + order)
        for order, (start, new) in enumerate(prompts)
    ]
    predictor = roofline(MODEL, Topology.preset(topology), config.token_budget, tensor=8, context=RANKS)
    instance = Instance(MODEL, config, predictor, ParallelPlan.meta(RANKS, 8))
    steps = [step for step in Simulation([instance]).run([*cached, *running, *last]).steps if step.chunks]
    found = [step for step in steps if step.finished > 1010]
    assert sum(tokens for step in found for _, tokens in step.chunks) == sum(new for _, new in prompts)
    return steps


def algorithm_1(step: StepMetrics, topology: str = "h100-rdma") -> str:
    """What the paper's algorithm 1 chooses for a step's chunks; single rows, as decodes, go by its algorithm 4."""
    longer = [(start, tokens) for start, tokens in step.chunks if tokens > 1]
    if not longer:
        return "pass_q"
    cached, new = map(sum, zip(*longer, strict=True))
    return choose_ring(new, cached, RANKS, LLAMA3_405B.split(8), Topology.preset(topology), "algorithm_1").method


@pytest.mark.parametrize("decodes", [0, 1, 9])
@pytest.mark.parametrize(
    ("cached", "new", "exchange"),
    [
        (126_720, 1280, "pass_q"),
        (124_800, 3200, "pass_q"),
        (121_600, 6400, "pass_kv"),
        (102_400, 25_600, "pass_kv"),
        (0, 100, "pass_kv"),
        (0, 6400, "pass_kv"),
        (0, 12_800, "pass_kv"),
        (0, 16_384, "pass_kv"),
        (0, 128_000, "pass_kv"),
    ],
)
def test_meta_takes_what_algorithm_1_chooses(cached: int, new: int, exchange: str, decodes: int) -> None:
    """Of table 4's prompts and shorter full prefills, beside any number of decodes."""
    steps = [
        step
        for step in steps_beside_decodes(EngineConfig.meta(num_pages=2500), [(cached, new)], decodes)
        if step.finished > 1010
    ]
    assert [step.exchange.name for step in steps if step.exchange] == [exchange] * len(steps)
    assert all(step.decodes == decodes for step in steps)
    assert {algorithm_1(step) for step in steps} == {exchange}


@settings(max_examples=10)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 1500).map(lambda pages: pages * PAGE), st.integers(1, 20_000)), min_size=1, max_size=3
    ),
    decodes=st.integers(0, 12),
    budget=st.sampled_from([16, 512, 4096, 32_768]),
    chunking=st.sampled_from(["static", "adaptive"]),
    policy=st.sampled_from(["fcfs", "ilrs"]),
    topology=st.sampled_from(["h100-rdma", "h100-tcp"]),
)
def test_every_step_of_meta_follows_algorithm_1(
    prompts: list[tuple[int, int]], decodes: int, budget: int, chunking: str, policy: str, topology: str
) -> None:
    """Prompts in any number of chunks, several in a step, and steps of which decodes leave little."""
    if budget < 4096:  # else there are thousands of steps
        prompts = [(start % (50 * budget), new % (30 * budget) + 1) for start, new in prompts]
    sizes: Any = {"num_pages": 3000, "max_running": 16, "chunking": chunking, "policy": policy}
    for step in steps_beside_decodes(EngineConfig.meta(budget, **sizes), prompts, decodes, topology):
        assert step.exchange is not None
        assert step.exchange.name == algorithm_1(step, topology)
