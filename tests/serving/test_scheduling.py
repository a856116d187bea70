"""What the policies and adaptive chunks promise, over long virtual times."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, Metrics, ParallelPlan, Request, SamplingParams, Slo
from longctx.serving.predictor import CurvePredictor, Work
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.serving.scheduler.chunking import Chunker, Chunking, smallest_chunk
from longctx.serving.scheduler.policy import POLICIES, by_urgency, make_policy
from longctx.serving.scheduler.sequence import Sequence
from longctx.simulation import Instance, Record, Simulation, VirtualExecutor
from longctx.simulation.workloads import WorkloadRequest

MODEL = Llama(LlamaConfig(50, 8, 8, 1, 1, 1, 8, max_positions=200_000))
# 10 ms whatever there is, 5,000 tokens a second besides, and 100 million pairs.
DEVICE = CurvePredictor((1, 2), (0.0102, 0.0104), 1e-8, 1e-7, 1e-5)
BUDGET = 512
FULL = DEVICE.seconds(Work().with_chunk(0, BUDGET, True))


def serve(
    requests: list[WorkloadRequest], device: Callable[[Batch], float] | None = None, **options: object
) -> tuple[Record, Instance]:
    """In virtual time, by a scheduler whose predictor is `DEVICE`."""
    defaults = {"token_budget": BUDGET, "page_size": 64, "num_pages": 8192, "prefix_cache": False}
    options = {"chunking": "static"} | defaults | options
    instance = Instance(MODEL.config, EngineConfig(**options), DEVICE, seconds=device)  # type: ignore[arg-type]
    return Simulation([instance]).run(requests), instance


def make_engine(executor: VirtualExecutor | None = None, **options: object) -> Engine:
    """An engine in virtual time."""
    executor = executor or VirtualExecutor(lambda batch: DEVICE.seconds(batch.work), 50)
    options = {"chunking": "static"} | options
    config = EngineConfig(token_budget=BUDGET, page_size=64, num_pages=8192, **options)  # type: ignore[arg-type]
    return Engine(MODEL, None, config, executor=executor, clock=executor.clock, predictor=DEVICE)


def least_chunk(instance: Instance, efficient: float) -> Callable[[int], int]:
    """The smallest chunk, by the tokens before it, that reaches such a share of the best one's speed."""
    chunker = instance.core.scheduler.chunker
    return lambda start: smallest_chunk(chunker.predictor, chunker.chunking, start, efficient)


def of_length(record: Record, low: int, high: int = 10**9) -> list[Metrics]:
    """In order of arrival."""
    found = [x.metrics for x in record.served if low <= x.metrics.prompt_tokens <= high]
    return sorted(found, key=lambda metrics: metrics.arrival)


# Adaptive chunks.


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**20),
    policy=st.sampled_from(sorted(POLICIES)),
    tpot=st.sampled_from([0.02, 0.05, 0.15]),
    error=st.sampled_from([0.0, 0.2]),
    run_ahead=st.integers(1, 4),
)
def test_no_decode_waits_longer_than_promised(
    seed: int, policy: str, tpot: float, error: float, run_ahead: int
) -> None:
    """By more than the predictor's error, or than one smallest efficient chunk takes beside the decodes."""
    rng = np.random.default_rng(seed)
    lengths = [int(rng.choice([20, 300, 20_000], p=[0.6, 0.3, 0.1])) for _ in range(40)]
    arrivals = np.cumsum(rng.exponential(0.5, len(lengths)))
    requests = [
        WorkloadRequest(float(at), length, int(rng.integers(2, 60)), number=i)
        for i, (at, length) in enumerate(zip(arrivals, lengths, strict=True))
    ]

    def device(batch: Batch) -> float:
        return DEVICE.seconds(batch.work) * float(rng.uniform(1 - error, 1 + error))

    record, instance = serve(
        requests, device, policy=policy, chunking="adaptive", slo=Slo(tpot=tpot, tpot_factor=1.0), run_ahead=run_ahead
    )
    assert len(record.served) == len(requests)
    mixed = [step for step in record.steps if step.decodes and step.chunks]
    assert mixed
    least = least_chunk(instance, 0.5)
    for step in mixed:
        # Decodes wait for just this step: it ends in time as far as predictions, corrected on the way, are right.
        assert step.seconds <= step.predicted * (1 + error) / (1 - error) + 1e-9
        assert step.predicted <= tpot + 1e-9 or step.prompt_tokens <= least(min(at for at, _ in step.chunks))
    gaps = [x.metrics.longest_gap for x in record.served]
    assert max(gaps) == pytest.approx(max(step.seconds for step in record.steps if step.decodes))


def test_chunks_shrink_as_the_context_grows() -> None:
    """Beside one decode, with steps that use the time they may take, and no less than the smallest efficient chunk."""
    requests = [WorkloadRequest(0.0, 10, 3000), WorkloadRequest(1.0, 150_000, 1, number=1)]
    record, instance = serve(requests, chunking="adaptive", slo=Slo(tpot=0.1))
    chunks = [(at, count, s) for s in record.steps for at, count in s.chunks if at > 0]
    sizes = [count for _, count, _ in chunks[:-1]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 350
    least = least_chunk(instance, 0.5)
    assert least(0) > least(100_000) >= 1
    for at, count, step in chunks[:-1]:
        work = Work(1, 1, 10 + step.number)
        assert count == least(at) or DEVICE.seconds(work.with_chunk(at, count + 1, False)) > 0.1
        assert step.seconds <= 0.1 or count == least(at)


@pytest.mark.parametrize("stages", [1, 4])
def test_a_target_of_a_batch_gives_a_token_as_much_in_each_stage(stages: int) -> None:
    """A decode beside a long prompt: batches take up to the target, where one of a token bounds all of its stages."""
    requests = [WorkloadRequest(0.0, 10, 400), WorkloadRequest(1.0, 20_000, 1, number=1)]
    longest = []
    for scope in ("token", "batch"):
        slo = Slo(tpot=0.08, tpot_factor=1.0, step_seconds=0.08, tpot_scope=scope)  # type: ignore[arg-type]
        config = EngineConfig(
            token_budget=BUDGET, page_size=64, num_pages=8192, prefix_cache=False, chunking="adaptive", slo=slo
        )
        model = dataclasses.replace(MODEL.config, num_layers=4)
        instance = Instance(model, config, DEVICE, ParallelPlan(stage=stages))
        record = Simulation([instance]).run(requests, keep_steps=True)
        decode = next(x.metrics for x in record.served if x.metrics.prompt_tokens == 10)
        assert decode.tpot_target == pytest.approx(0.08 * (stages if scope == "batch" else 1))
        longest.append(max(step.seconds for step in record.steps if step.decodes and step.prompt_tokens))
    assert longest[1] > (2 * longest[0] if stages > 1 else 0)
    assert longest[1] <= 0.08
    assert Slo(tpot=None, step_seconds=None, tpot_scope="batch").per_token(4).tpot is None


def test_without_decodes_a_step_is_as_large_as_is_of_use() -> None:
    unbounded = Slo(tpot=0.011, step_seconds=None)
    record, _ = serve([WorkloadRequest(0.0, 5000, 1)], chunking="adaptive", slo=unbounded)
    assert [count for s in record.steps for _, count in s.chunks] == [512] * 9 + [392]
    # 512 tokens reach 4,500 a second, and no chunk more than 4,700.
    record, _ = serve([WorkloadRequest(0.0, 5000, 1)], chunking="adaptive", token_budget=8192, slo=unbounded)
    assert {count for s in record.steps for _, count in s.chunks} == {512, 392}


@pytest.mark.parametrize("step_seconds", [0.02, 0.1, 0.15])
def test_without_decodes_a_step_takes_no_longer_than_those_who_come_may_wait(step_seconds: float) -> None:
    """Unless that is less than a chunk needs for nine tenths of the best one's speed."""
    record, instance = serve(
        [WorkloadRequest(0.0, 60_000, 1)], chunking="adaptive", token_budget=2048, slo=Slo(step_seconds=step_seconds)
    )
    good = least_chunk(instance, 0.9)
    sizes = [(at, count, step.predicted) for step in record.steps for at, count in step.chunks]
    assert all(predicted <= step_seconds or count <= good(at) for at, count, predicted in sizes)
    seconds = sum(step.seconds for step in record.steps)
    assert seconds < DEVICE.prefill_seconds(0, 60_000, 2048) / 0.89


@pytest.mark.parametrize("number", [64, 200])
def test_static_chunks_fill_their_rows(number: int) -> None:
    requests = [WorkloadRequest(0.0, 10, 200), WorkloadRequest(0.0, 5000, 1, number=1)]
    record, _ = serve(requests, chunking=f"static:{number}", policy="fcfs")
    rows = [step.decodes + step.prompt_tokens for step in record.steps if step.chunks]
    assert set(rows[:-1]) == {number}


def test_short_prompts_wait_for_shorter_steps_where_nobody_decodes() -> None:
    """30,000 tokens at a time, and short prompts at random, none of which decodes. Long ones take a little longer."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(0.5, 100)).tolist()
    requests = [WorkloadRequest(at, int(rng.integers(20, 300)), 1, number=i) for i, at in enumerate(arrivals)]
    requests += [WorkloadRequest(15.0 * i, 30_000, 1, number=100 + i) for i in range(4)]
    requests.sort(key=lambda request: request.arrival)
    waits, longs = {}, {}
    for step_seconds in (None, 0.1):
        record, _ = serve(requests, chunking="adaptive", token_budget=1024, slo=Slo(step_seconds=step_seconds))
        waits[step_seconds] = np.percentile([x.ttft for x in of_length(record, 0, 300) if x.ttft], [50, 99])
        longs[step_seconds] = np.mean([x.ttft for x in of_length(record, 30_000) if x.ttft])
    assert waits[0.1][0] < 0.85 * waits[None][0]
    assert waits[0.1][1] < 0.7 * waits[None][1]
    assert longs[0.1] < 1.2 * longs[None]


# Starvation and head-of-line blocking.


LONG = 10_000


def saturating(count: int) -> list[WorkloadRequest]:
    """A long prompt, and short ones that fill the device: each a full step, and the next is there when it ends."""
    return [
        WorkloadRequest(0.0, LONG, 1, number=count),
        *(WorkloadRequest(i * FULL, BUDGET, 1, number=i) for i in range(count)),
    ]


@pytest.mark.parametrize(
    ("policy", "starves"), [("srpf", True), ("edf", False), ("lrs", False), ("lrs_relative", False), ("ilrs", False)]
)
def test_who_starves(policy: str, starves: bool) -> None:
    """The long one takes 2.8 s alone and is due after 14; short ones are due after 1 s; the stream goes on for 110.

    Once the long one is read, all are 2.8 s behind: short ones are late by 1.8 times what they were promised, and by
    relative slack it is the long one's turn no sooner.
    """
    record, _ = serve(saturating(1000), policy=policy)
    (long,) = of_length(record, LONG)
    end = max(x.arrival for x in of_length(record, BUDGET, BUDGET))
    assert long.first_token is not None
    assert long.ttft_deadline is not None
    if starves:
        assert long.first_token > end
    else:
        assert long.first_token < (1.5 if policy in ("edf", "lrs") else 4) * long.ttft_deadline < end / 1.5


def test_under_fcfs_a_short_one_waits_for_the_whole_long_one() -> None:
    requests = [WorkloadRequest(0.0, 100_000, 1), WorkloadRequest(0.1, 10, 1, number=1)]
    alone = DEVICE.prefill_seconds(0, 100_000, BUDGET)
    waits = {}
    for policy in POLICIES:
        record, _ = serve(requests, policy=policy)
        (short,), (long,) = of_length(record, 0, 10), of_length(record, 100_000)
        assert short.ttft is not None
        assert long.ttft is not None
        assert long.ttft < 1.01 * alone  # prompts that share a step cost nothing here
        waits[policy] = short.ttft
    assert waits.pop("fcfs") > alone - 0.2
    assert max(waits.values()) < 1.0
    assert waits["ilrs"] <= waits["lrs_relative"]


def test_priority_comes_before_urgency() -> None:
    low, high = prompt(0, 100), prompt(1, 90_000, priority=1)
    for policy in POLICIES:
        assert list(by_urgency(make_policy(policy, 0.5), [low, high], 1.0)) == [high, low]


@pytest.mark.slow
def test_more_than_can_be_done_of_a_mix() -> None:
    """As in Medha's figure 22: medians of TTFT over that alone, 1 prompt in 20 being long, 1.5 times the capacity."""
    rng = np.random.default_rng(1)
    lengths = [30_000 if i % 20 == 10 else int(rng.integers(20, 600)) for i in range(1000)]
    load = sum(DEVICE.prefill_seconds(0, length, BUDGET) for length in lengths) / len(lengths)
    arrivals = np.cumsum(rng.exponential(load / 1.5, len(lengths)))
    requests = [
        WorkloadRequest(float(at), length, 4, number=i)
        for i, (at, length) in enumerate(zip(arrivals, lengths, strict=True))
    ]
    medians = {}
    for policy in ("fcfs", "edf", "lrs", "lrs_relative", "ilrs"):
        record, _ = serve(requests, policy=policy, chunking="adaptive", slo=Slo(tpot=0.1), max_running=256)
        alone = [DEVICE.prefill_seconds(0, x.metrics.prompt_tokens, BUDGET) for x in record.served]
        medians[policy] = float(np.median([x.ttft / t for x, t in zip(record.served, alone, strict=True)]))
    assert medians["fcfs"] > medians["edf"] > medians["lrs_relative"] > medians["ilrs"]
    assert medians["fcfs"] > medians["lrs"] > medians["lrs_relative"]


# What is known of a device changes.


def test_a_slow_reader_is_no_slow_device() -> None:
    requests = [WorkloadRequest(0.0, 600, 50, number=i) for i in range(3)]
    executor = VirtualExecutor(lambda batch: DEVICE.seconds(batch.work), 50)
    engine = make_engine(executor)
    for request in requests:
        engine.submit(Request(request.tokens(50).tolist(), SamplingParams(max_tokens=50, ignore_eos=True)))
    while engine.has_work:
        engine.step()
        executor.now += 1.0
    assert (engine.predictor.decode_factor, engine.predictor.prompt_factor) == pytest.approx((1.0, 1.0))


def test_predictions_are_made_anew_for_all() -> None:
    """The device is ten times slower than its profile says, which shows after some steps."""
    lengths = (20_000, 5000)
    requests = [WorkloadRequest(at, n, 1, number=i) for i, (at, n) in enumerate(zip((0.0, 1.5), lengths, strict=True))]
    first = [WorkloadRequest(0.0, 10, 30, number=9)]
    record, _ = serve([*first, *requests], lambda batch: 10 * DEVICE.seconds(batch.work), policy="srpf")
    assert [x.metrics.prompt_tokens for x in record.served if x.metrics.prompt_tokens > 10] == [5000, 20_000]
    for x in record.served:  # what was promised stays promised, and is what is measured
        if x.metrics.prompt_tokens > 10:
            assert x.metrics.ttft_deadline == pytest.approx(
                5 * DEVICE.prefill_seconds(0, x.metrics.prompt_tokens, BUDGET)
            )
            assert x.metrics.kept_ttft is False


def test_what_is_in_the_cache_is_not_left_to_read() -> None:
    engine = make_engine(policy="srpf")
    cached, other = [1] * 50_000, [2] * 20_000
    engine.generate([cached])
    for prompt in (other, cached):
        engine.submit(Request(prompt, SamplingParams(max_tokens=1)))
    first = next(event for _ in iter(int, 1) for event in engine.step() if event.output)
    assert first.output is not None
    assert first.output.metrics.prompt_tokens == 50_000


def test_who_is_put_back() -> None:
    """Prompts before decodes, then the least urgent by priority: a decode goes on at the price of a prompt."""
    page = {"page_size": 64, "num_pages": 40, "admission": "optimistic", "max_running": 8}
    requests = [WorkloadRequest(0.0, 2000, 1, number=0), *(WorkloadRequest(0.1, 60, 190, number=i) for i in (1, 2, 3))]
    record, instance = serve(requests, policy="srpf", chunking="static:16", **page)
    assert instance.core.stats().preemptions > 0
    assert {x.metrics.prompt_tokens for x in record.served if x.metrics.preemptions} == {2000}


# Prompts that share a step.


def tokens_of(chunker: Chunker, prompts: list[Sequence], decodes: list[Chunk], now: float) -> dict[Sequence, int]:
    """How many tokens of each prompt a step gets."""
    return {sequence: share.num_tokens for sequence, share in chunker.pack(prompts, decodes, now).items()}


def prompt(order: int, length: int, arrival: float = 0.0, ttft: float = 10.0, priority: int = 0) -> Sequence:
    sequence = Sequence(f"s{order}", order, length, 1, arrival, priority)
    sequence.deadline, sequence.ttft_budget = arrival + ttft, ttft
    sequence.prefill_remaining = DEVICE.prefill_seconds(0, length, BUDGET)
    return sequence


def test_short_prompts_share_a_step_by_what_they_have_used_of_their_slack() -> None:
    long, short = prompt(0, 100_000, ttft=60.0), prompt(1, 5000, arrival=10.0, ttft=10.0)
    for max_share, now in itertools.product((0.0, 0.25, 0.5, 1.0), (10.0, 12.0, 14.0, 16.0)):
        chunker = Chunker(make_policy("ilrs", max_share), DEVICE, Chunking(False, BUDGET))
        shares = tokens_of(chunker, [long, short], [], now)
        used = 1 - (20.0 - now - short.prefill_remaining) / 10.0
        if next(by_urgency(chunker.policy, [long, short], now)) is short:
            assert shares == {short: BUDGET}
        else:
            assert shares.get(short, 0) == BUDGET - np.ceil((1 - min(max_share, used)) * BUDGET)
            assert shares[long] == BUDGET - shares.get(short, 0)
    alone = Chunker(make_policy("lrs_relative", 1.0), DEVICE, Chunking(False, BUDGET))
    assert tokens_of(alone, [long, short], [], 12.0) == {long: BUDGET}


@pytest.mark.parametrize(("tokens", "number"), [(60, 1), (60, 4), (200, 1)])
def test_a_fresh_short_prompt_gets_what_it_needs_to_be_in_time(tokens: int, number: int) -> None:
    """A step of the long prompt takes 0.3 to 0.5 s, and it is due soon, so that short ones, which are due after 1 s,
    come first only when they have used up 0.8 s. With what they have used up of their slack when they come, 2 to 5 % of
    a step, they would be late.
    """
    long = WorkloadRequest(0.0, 100_000, 1)
    requests = [WorkloadRequest(20.0 + 3.1 * (i // number), tokens, 1, number=i + 1) for i in range(8 * number)]
    record, _ = serve([long, *requests], policy="ilrs", slo=Slo(ttft_factor=1.2))
    (first,) = of_length(record, 100_000)
    assert first.finished is not None
    assert first.kept_ttft
    short = of_length(record, tokens, tokens)
    assert max(metrics.arrival for metrics in short) < first.finished
    assert all(metrics.kept_ttft for metrics in short)


def test_what_is_lent_goes_to_the_shortest() -> None:
    """Not to another long prompt, which is more urgent than the short one and would take all of it."""
    longest, long, short = prompt(0, 100_000, ttft=1.0), prompt(1, 90_000, ttft=1.0), prompt(2, 100, 9.0, ttft=5.0)
    chunker = Chunker(make_policy("ilrs", 0.5), DEVICE, Chunking(False, BUDGET))
    assert [*by_urgency(chunker.policy, [short, long, longest], 10.0)] == [longest, long, short]
    shares = tokens_of(chunker, [longest, long, short], [], 10.0)
    assert shares == {longest: BUDGET // 2, long: BUDGET // 2 - 100, short: 100}


def test_by_predicted_time_where_chunks_are_adaptive() -> None:
    """The long one's tokens take longer each: half of the time is not half of the tokens."""
    long, short = prompt(0, 100_000, ttft=60.0), prompt(1, 5000, arrival=10.0, ttft=10.0)
    long.computed = 90_000
    decode = Chunk(Sequence("d", 2, 10, 100, tpot_target=0.1), 0, 19, 1, True, True)
    work = Work(1, 1, 20)
    chunker = Chunker(make_policy("ilrs", 0.5), DEVICE, Chunking(True, BUDGET))
    long.prefill_remaining = DEVICE.prefill_seconds(90_000, 100_000, BUDGET)
    long.deadline = 25.0  # more urgent than the short one
    shares = tokens_of(chunker, [long, short], [decode], 18.0)
    with_long = work.with_chunk(90_000, shares[long], False)
    total = DEVICE.seconds(with_long.with_chunk(0, shares[short], False))
    begin = DEVICE.seconds(work)
    assert DEVICE.seconds(with_long) - begin == pytest.approx((0.1 - begin) / 2, rel=0.05)
    assert total <= 0.1 < total + 2 * (DEVICE.seconds(Work().with_chunk(0, 2, False)) - 0.0102)
    assert shares[short] > 2 * shares[long]


def test_what_a_long_prompt_lends_and_nobody_needs_is_its_own() -> None:
    long, tiny, longer = prompt(0, 100_000), prompt(1, 3, arrival=-2.0), prompt(2, 150_000, ttft=50.0)
    chunker = Chunker(make_policy("ilrs", 1.0), DEVICE, Chunking(False, BUDGET))
    shares = tokens_of(chunker, [long, longer], [], 5.0)
    assert shares == {long: BUDGET}  # those that need more do not borrow
    long.deadline = 0.5  # by far the most urgent
    assert tokens_of(chunker, [long, tiny, longer], [], 5.0) == {long: BUDGET - 3, tiny: 3}


def test_a_policy_of_ones_own() -> None:
    class LastComeFirstServed:
        def urgency(self, sequence: Sequence, now: float) -> float:
            return -sequence.arrival

        def share(self, sequence: Sequence, now: float) -> float:
            return 0.0

    requests = [WorkloadRequest(0.01 * i, 2000, 1, number=i) for i in range(5)]
    record, _ = serve(requests, policy=LastComeFirstServed())
    assert record.served[0].due > record.served[-1].due


def test_what_is_no_policy() -> None:
    class Undecided:
        def urgency(self, sequence: Sequence, now: float) -> float:
            return float("nan")

        def share(self, sequence: Sequence, now: float) -> float:
            return 0.0

    wrong = (Undecided(), "finite numbers, got nan from"), (Undecided, "policy must be a name or have")
    for policy, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            EngineConfig(policy=policy)


def test_a_device_that_takes_no_time() -> None:
    chunker = Chunker(
        make_policy("ilrs", 0.5), CurvePredictor((1, 2), (0.0, 0.0), 0.0, 0.0, 0.0), Chunking(True, BUDGET)
    )
    decode = Chunk(Sequence("d", 2, 10, 100, tpot_target=0.1), 0, 19, 1, True, True)
    assert tokens_of(chunker, [prompt(0, 100)], [decode], 0.0).popitem()[1] == 100


def test_settings_of_the_papers() -> None:
    """A long prompt, a decode and short prompts: whole prompts, static chunks, and steps within a target."""
    requests = [WorkloadRequest(0.0, 100, 400), WorkloadRequest(0.1, 60_000, 1, number=1)]
    requests += [WorkloadRequest(2.0 + 2.0 * i, 200, 1, number=i + 2) for i in range(10)]
    settings = {
        "medha": (EngineConfig.medha, ParallelPlan.medha(context=2, rank_tokens=16_384)),
        "sarathi": (functools.partial(EngineConfig.sarathi, 1024), ParallelPlan()),
        # The device has no links, which algorithm 1 asks for.
        "meta": (functools.partial(EngineConfig.meta, 30_016), ParallelPlan.meta(context=2, exchange="pass_kv")),
    }
    longest, short = {}, {}
    for name, (make, plan) in settings.items():
        config = make(page_size=64, num_pages=2048, prefix_cache=False)
        record = Simulation([Instance(MODEL.config, config, DEVICE, plan)]).run(requests)
        assert len(record.served) == len(requests)
        mixed = [step for step in record.steps if step.decodes and step.chunks]
        longest[name] = max(step.seconds for step in mixed)
        short[name] = max(x.ttft for x in record.served if x.metrics.prompt_tokens == 200)
        if name == "sarathi":
            assert max(step.prompt_tokens + step.decodes for step in record.steps) == 1024
        if name == "meta":
            assert (0, 60_000) in [chunk for step in record.steps for chunk in step.chunks]
    assert longest["medha"] < longest["sarathi"] < longest["meta"]
    assert short["medha"] < 0.5 < short["sarathi"]
    assert EngineConfig.medha(policy="srpf", slo=Slo()) == EngineConfig(
        policy="srpf", chunking="adaptive", token_budget=4096
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunks'"):
        EngineConfig.medha(chunks=5)
    with pytest.raises(ValueError, match="token_budget must have a row for each of max_running=64, got 32"):
        EngineConfig.sarathi(32)


# What is promised.


def test_defaults_follow_the_length() -> None:
    record, _ = serve([WorkloadRequest(0.0, n, 3, number=n) for n in (10, 50_000)], slo=Slo(3.0, 0.5, 0.07))
    short, long = of_length(record, 0, 10)[0], of_length(record, 50_000)[0]
    assert (short.ttft_deadline, short.tpot_target) == (0.5, 0.07)
    assert long.ttft_deadline == pytest.approx(3.0 * DEVICE.prefill_seconds(0, 50_000, BUDGET))
    assert short.kept_ttft
    assert short.longest_gap > 0
    assert short.slack == pytest.approx(1 - DEVICE.prefill_seconds(0, 10, BUDGET) / 0.5)


def test_what_cannot_be_met_is_refused() -> None:
    engine = make_engine()
    prompt = [1] * 50_000
    long = SamplingParams(max_tokens=1000)
    with pytest.raises(ValueError, match=r"tpot_target=0.01505 can't be met: a token after 50,998 others takes"):
        engine.submit(Request(prompt, long, tpot_target=0.01505))
    with pytest.raises(ValueError, match=r"ttft_deadline=1.0 can't be met: 50,000 tokens take 23.* s even alone"):
        engine.submit(Request(prompt, ttft_deadline=1.0))
    with pytest.raises(ValueError, match=r"tpot_target=0.001 can't be met: a token after 50,014 others takes"):
        engine.submit(Request(prompt, tpot_target=0.001))
    engine.generate([prompt])
    engine.submit(Request(prompt, ttft_deadline=1.0))  # now it is in the cache
    with pytest.raises(ValueError, match="50,000 tokens take"):  # but all of it is asked about
        engine.submit(Request(prompt, SamplingParams(prompt_logprobs=0), ttft_deadline=1.0))
    (output,) = make_engine(slo=Slo(tpot=0.001)).generate([[1] * 10])  # a default is what the device can keep
    assert output.metrics.tpot_target == pytest.approx(2 * DEVICE.seconds(Work.of([(10, 1, True)])), rel=0.05)
    assert output.metrics.kept_tpot
    for change in ({"ttft_deadline": 0.0}, {"tpot_target": -1.0}, {"ttft_deadline": float("inf")}, {"priority": -2}):
        with pytest.raises(ValueError, match=next(iter(change))):
            Request([1], **change)  # type: ignore[arg-type]
    wrong = {"ttft_factor": 0.5, "ttft_least": -1.0, "tpot": float("nan"), "step_seconds": 0.0, "tpot_scope": "stage"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name} must be"):
            Slo(**{name: value})  # type: ignore[arg-type]
