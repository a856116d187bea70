"""Requests that move between engines of different plans, on fake devices that check what each row sees."""

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
from fake_device import VOCAB
from fake_store import FakeStore, LeaseSource
from hypothesis import given, settings
from hypothesis import strategies as st
from test_page_loads import PLANS, storing_engine

from longctx.serving import Engine, Output, ParallelPlan, Request, SamplingParams
from longctx.serving.request.handoff import Handoff, Progress
from longctx.serving.request.output import TokenLogprob


def run(engine: Engine, outputs: dict[str, list[Output]], events: dict[str, list[int]] | None = None) -> None:
    """Run steps until all has ended."""
    while engine.has_work:
        note(engine, outputs, events)


def note(engine: Engine, outputs: dict[str, list[Output]], events: dict[str, list[int]] | None = None) -> None:
    for event in engine.step():
        if events is not None:
            events.setdefault(f"{event.request_id}/{event.index}", []).extend(event.token_ids)
        if event.output is not None:
            outputs.setdefault(event.request_id, []).append(event.output)


def take_over(engine: Engine, other: Engine, request: Request, outputs: list[Output]) -> str:
    """Let an engine go on with a request of another one; as JSON would carry it."""
    handoff = Handoff.from_dict(Handoff.of(sorted(outputs, key=lambda output: output.index)).to_dict())
    leases = [each.lease for each in handoff.completions if each.lease is not None]
    return engine.submit(request, None, handoff, {lease: LeaseSource(other, lease) for lease in leases})


def beginning(request: Request, count: int, lease: str) -> Request:
    """The first tokens of a request, after which another engine goes on with the pages that are kept."""
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, max_tokens=count), lease=lease)


def random_request(random: np.random.Generator, number: int, max_tokens: int) -> Request:
    n = int(random.integers(1, 4))
    sampling: dict[str, Any] = {"temperature": 1.0, "n": n, "seed": number} if random.random() < 0.5 else {}
    prompt = random.integers(0, VOCAB, random.integers(1, 30)).tolist()
    sampling |= {"max_tokens": max_tokens, "repetition_penalty": 1.5 if random.random() < 0.3 else 1.0}
    return Request(prompt, SamplingParams(**sampling), f"r{number}")


WINDOWS = st.sampled_from([None, 1, 6, 20])


@given(st.integers(0, 2**32), st.sampled_from(PLANS), st.sampled_from(PLANS), st.sampled_from([0.0, 0.3]), WINDOWS)
@settings(max_examples=12)
def test_requests_move_after_any_number_of_tokens(
    seed: int, plan: ParallelPlan, other: ParallelPlan, loses: float, window: int | None
) -> None:
    random = np.random.default_rng(seed)
    requests = [random_request(random, i, 9) for i in range(4)]
    expected: dict[str, list[Output]] = {}
    engine = storing_engine(None, 400, plan)
    for request in requests:
        engine.submit(request)
    run(engine, expected)
    first = storing_engine(FakeStore(), 40, plan, window)
    second = storing_engine(FakeStore(loses, seed), 40, other, window)
    outputs: dict[str, list[Output]] = {}
    for request in requests:
        first.submit(beginning(request, int(random.integers(1, 9)), f"lease-{request.request_id}"))
    run(first, outputs)
    final: dict[str, list[Output]] = {}
    events: dict[str, list[int]] = {}
    for request in requests:
        take_over(second, first, request, outputs[str(request.request_id)])
    run(second, final, events)
    for name, there in expected.items():
        assert tokens(final[name]) == tokens(there)
        assert [events[f"{name}/{i}"] for i in range(len(there))] == tokens(there)
    for engine in (first, second):
        engine.step()
        assert engine.core.pool.num_held == 0
        assert len(engine.core.leases) == 0
        assert not engine.executor.sources


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in sorted(outputs, key=lambda output: output.index)]


@given(st.integers(0, 2**32), st.sampled_from(PLANS), st.sampled_from(PLANS), WINDOWS)
@settings(max_examples=12)
def test_prefill_and_decode_apart(seed: int, plan: ParallelPlan, other: ParallelPlan, window: int | None) -> None:
    random = np.random.default_rng(seed)
    expected: dict[str, list[Output]] = {}
    engine = storing_engine(None, 400, plan)
    prefill, decode = (storing_engine(FakeStore(), 60, each, window) for each in (plan, other))
    outputs: dict[str, list[Output]] = {}
    requests = [random_request(random, i, 6) for i in range(5)]
    for request in requests:
        engine.submit(request)
        prefill.submit(beginning(request, 1, f"lease {request.request_id}"))
    run(engine, expected)
    run(prefill, outputs)
    final: dict[str, list[Output]] = {}
    for request in requests:
        take_over(decode, prefill, request, outputs[str(request.request_id)])
    run(decode, final)
    for name, there in expected.items():
        assert tokens(final[name]) == tokens(there)
        if len(there) == 1 and len(there[0].token_ids) > 1:
            # Of the prompt nothing was computed again.
            assert final[name][0].metrics.loaded_tokens == there[0].metrics.prompt_tokens
    assert decode.stats().prompt_tokens == sum(len(output.token_ids) > 1 for each in final.values() for output in each)


def test_a_lease_grows_while_its_request_runs() -> None:
    engine = storing_engine(FakeStore(), 60, ParallelPlan(stage=3))
    engine.submit(Request(np.arange(40).tolist(), SamplingParams(max_tokens=1), lease="a"))
    lengths = []
    while engine.has_work:
        if "a" in engine.core.leases:
            lease = engine.pages.lease("a")
            lengths.append(lease.length)
            if lease.pages:
                for stage in range(3):
                    read = engine.pages.read("a", 0, len(lease.pages), (0, 1)).result()[0].data[:, stage]
                    assert read.reshape(-1)[: lease.length].tolist() == list(range(lease.length))
        engine.step()
    assert lengths == sorted(lengths)
    assert len({*lengths}) > 2
    assert lengths[-1] == 40


def test_a_cancelled_request_keeps_nothing() -> None:
    engine = storing_engine(FakeStore(), 60)
    name = engine.submit(Request(np.arange(40).tolist(), SamplingParams(max_tokens=1), lease="a"))
    engine.step()
    engine.cancel(name)
    assert len(engine.core.leases) == 0
    assert engine.core.pool.num_held == 0


def test_a_lease_that_is_released_while_its_request_runs_ends_with_it() -> None:
    engine = storing_engine(FakeStore(), 60)
    engine.submit(Request(np.arange(40).tolist(), SamplingParams(max_tokens=1), lease="a"))
    engine.step()
    engine.pages.release("a")
    assert "a" in engine.core.leases
    while engine.has_work:
        engine.step()
    assert len(engine.core.leases) == 0
    assert engine.core.pool.num_held == 0


def test_leases_end_that_nobody_asks_for() -> None:
    engine = storing_engine(FakeStore(), 60)
    engine.generate([Request(np.arange(40).tolist(), SamplingParams(max_tokens=1), lease="a")])
    executor: Any = engine.executor
    assert len(engine.core.leases) == 1
    for seconds in (50, 50, 70):
        engine.step()
        if len(engine.core.leases):
            engine.pages.lease("a")
        executor.now += seconds
    engine.step()
    assert len(engine.core.leases) == 0
    assert engine.core.pool.num_held == 0


def test_requests_wait_while_leases_hold_the_pages() -> None:
    engine = storing_engine(FakeStore(), 12)
    engine.generate([Request(np.arange(40).tolist(), SamplingParams(max_tokens=1), lease="a")])
    engine.submit(Request(np.arange(40).tolist()[::-1], SamplingParams(max_tokens=1)))
    for _ in range(5):
        assert engine.step() == []
    engine.pages.release("a")
    assert any(event.output for _ in range(5) for event in engine.step())


def test_a_handoff_is_checked() -> None:
    engine = storing_engine(FakeStore())
    request = Request([1, 2, 3], SamplingParams(max_tokens=2))
    for wrong, match in [
        (Handoff(0, ()), "n=1 completions"),
        (Handoff(0, (Progress(None, 0, (1, 2, 3)),)), "max_tokens=2"),
        (Handoff(0, (Progress("a", 4, (1,)),)), "fewer than the 3 . 1 tokens"),
        (Handoff(0, (Progress("a", 1, (VOCAB,)),)), "in the vocabulary"),
        (Handoff(0, (Progress(None, 0, (1,), (GOOD,)),)), "logprobs of 0 tokens, got 1"),
        (Handoff(0, (Progress(None, 0, (1,)),), (GOOD,)), "prompt_logprobs of up to 0 tokens, got 1"),
    ]:
        with pytest.raises(ValueError, match=match):
            engine.submit(request, None, wrong)


GOOD = TokenLogprob(-1.0, ((5, -1.0),))


@pytest.mark.parametrize(
    ("logprobs", "match"),
    [
        ((), "logprobs of 1 tokens, got 0"),
        ((GOOD, GOOD), "logprobs of 1 tokens, got 2"),
        ((GOOD._replace(logprob=float("nan")),), "logprobs that are finite"),
        ((GOOD._replace(logprob=float("-inf")),), "logprobs that are finite"),
        ((GOOD._replace(top=((5, float("inf")),)),), "logprobs that are finite"),
        ((GOOD._replace(top=((VOCAB, -1.0),)),), "logprobs of tokens in the vocabulary"),
        ((GOOD._replace(top=((10**12, -1.0),)),), "logprobs of tokens in the vocabulary"),
        ((GOOD._replace(top=((-1, -1.0),)),), "logprobs of tokens in the vocabulary"),
        ((GOOD._replace(top=((5, -1.0),) * 3),), "logprobs of up to 2 tokens each, got 3"),
    ],
)
def test_log_probabilities_of_a_handoff_are_checked(logprobs: tuple[TokenLogprob, ...], match: str) -> None:
    sampling = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=2)
    with pytest.raises(ValueError, match=match):
        Handoff(0, (Progress(None, 0, (1,), logprobs),)).check(3, sampling, VOCAB)
    Handoff(0, (Progress(None, 0, (1,), (GOOD,)),), (GOOD,)).check(3, sampling, VOCAB)
    if "of 1 tokens" not in match:
        with pytest.raises(ValueError, match=f"prompt_{match}"):
            Handoff(0, (Progress(None, 0, ()),), logprobs).check(3, sampling, VOCAB)


_TOKENS = st.sampled_from([*[0, 1, 5, VOCAB - 1] * 4, VOCAB, -1, 2**31, 2**70])
_REALS = st.sampled_from([*[-1.0, 0.0, -1e300] * 4, float("nan"), float("inf"), "nan", None])
_LOGPROBS = st.lists(st.tuples(_REALS, st.lists(st.tuples(_TOKENS, _REALS), max_size=3)), max_size=3)
_HOSTILE = st.fixed_dictionaries(
    {
        "seed": st.sampled_from([0, 7, 8, 9, -1, 2**31]),
        "completions": st.lists(
            st.fixed_dictionaries(
                {
                    "lease": st.sampled_from([None, "other"]),
                    "length": st.sampled_from([0, 1, 8, 11, 12, 13, 2**31]),
                    "tokens": st.lists(_TOKENS, max_size=4),
                    "logprobs": _LOGPROBS,
                }
            ),
            max_size=3,
        ),
        "prompt_logprobs": st.none() | _LOGPROBS,
    }
)


@pytest.fixture(scope="module")
def pair() -> tuple[LeaseSource, Engine]:
    """An engine, and the pages of another prompt in another one."""
    first = storing_engine(FakeStore(), 60)
    first.generate([Request([*range(20)], SamplingParams(max_tokens=1), lease="other")])
    return LeaseSource(first, "other"), storing_engine(FakeStore(), 60, max_logprobs=2)


@given(fields=_HOSTILE, logprobs=st.sampled_from([None, 0, 2]), n=st.sampled_from([1, 2]))
@settings(max_examples=40)
def test_hostile_handoffs_are_refused_or_answered(
    pair: tuple[LeaseSource, Engine], fields: Any, logprobs: int | None, n: int
) -> None:
    source, engine = pair
    sampling = SamplingParams(max_tokens=3, logprobs=logprobs, n=n, seed=1, temperature=1.0, ignore_eos=True)
    try:
        engine.submit(Request([*range(12)], sampling, "hostile"), None, Handoff.from_dict(fields), {"other": source})
    except ValueError:
        pass
    else:
        outputs: dict[str, list[Output]] = {}
        run(engine, outputs)
        assert [output.finish_reason for output in outputs["hostile"]] == ["length"] * n
        if logprobs is not None:
            assert all(np.isfinite(x.logprob) for output in outputs["hostile"] for x in output.logprobs or ())
    [output] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert output.finish_reason == "length"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["seed", "completions", "lease", "length", "tokens", "logprobs", "prompt_logprobs"]),
                inner,
            )
        ),
    )
)
@settings(max_examples=60)
def test_what_anybody_sends_is_a_handoff_or_a_clear_error(fields: Any) -> None:
    with contextlib.suppress(ValueError):
        handoff = Handoff.from_dict(fields)
        assert repr(Handoff.from_dict(handoff.to_dict())) == repr(handoff)
