"""Requests from submission to their end: in which order they run, what is cancelled, and how text ends."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
from fake_device import VOCAB, expected_tokens, make_engine

from longctx.models import ByteTokenizer
from longctx.serving import EngineConfig, Request, SamplingParams
from longctx.serving.request.completion import Detokenizer
from longctx.serving.scheduler.sequence import Sequence, State

PROMPT = np.random.default_rng(1).integers(0, VOCAB, 30).tolist()
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)


def test_default_buckets_double_and_end_at_the_budget() -> None:
    assert EngineConfig(token_budget=100, max_running=9).row_buckets == (8, 16, 32, 64, 100)
    assert EngineConfig(token_budget=8, max_running=8).row_buckets == (8,)


@pytest.mark.parametrize("samples", [1, 3])
def test_requests_can_be_cancelled_at_any_moment(samples: int) -> None:
    """The request is waiting, prefilling, decoding, or has a result in flight."""
    for steps in range(12):
        engine = make_engine(max_running=samples)
        params = SamplingParams(max_tokens=9, temperature=float(samples > 1), n=samples, seed=0)
        first, waiting = (engine.submit(Request(PROMPT, params)) for _ in range(2))
        events = [event for _ in range(steps) for event in engine.step()]
        cancelled = {request: engine.cancel(request) for request in (waiting, first)}
        events += engine.step()
        reasons = {event.request_id: event.output.finish_reason for event in events if event.output is not None}
        assert {request: reason == "cancelled" for request, reason in reasons.items()} == cancelled
        assert not engine.cancel(first)
        assert engine.scheduler.pool.num_held == 0
        (after,) = engine.generate(PROMPT, FIVE)
        assert after.token_ids == expected_tokens(PROMPT, FIVE)


def test_leaving_a_stream_cancels_its_request() -> None:
    engine = make_engine()
    for event in engine.stream([PROMPT, PROMPT[:4]], FIVE):
        assert event.token_ids
        break
    assert not engine.has_work
    assert engine.scheduler.pool.num_held == 0


def test_streams_may_be_read_late_closed_or_never_read() -> None:
    engine = make_engine()
    late = engine.stream(PROMPT, FIVE)
    engine.generate(PROMPT[:3], SamplingParams(max_tokens=20, ignore_eos=True))
    assert [t for event in late for t in event.token_ids] == expected_tokens(PROMPT, FIVE)
    never, closed = engine.stream(PROMPT, FIVE), engine.stream(PROMPT, FIVE)
    del never
    closed.close()
    assert list(closed) == []
    assert not engine.has_work
    # An old stream that is left cancels its own request only, not a later one of the same id.
    old = engine.stream(Request(PROMPT, FIVE, request_id="x"))
    while engine.has_work:
        engine.step()
    engine.submit(Request(PROMPT, FIVE, request_id="x"))
    old.close()
    assert engine.has_work


def test_generated_ids_avoid_given_ones() -> None:
    engine = make_engine()
    engine.submit(Request(PROMPT, FIVE, request_id="request-1"))
    assert [engine.submit(Request(PROMPT, FIVE)) for _ in range(2)] == ["request-0", "request-2"]


def test_refused_requests_change_no_seed() -> None:
    draw = SamplingParams(max_tokens=9, temperature=1.0, ignore_eos=True)
    seeds = []
    for is_disturbed in (False, True):
        engine = make_engine()
        if is_disturbed:
            with pytest.raises(ValueError, match=r"prompts\[1\]: .* need 25 pages"):
                engine.generate([[1], [1] * 80], SamplingParams(max_tokens=20, temperature=1.0))
        engine.submit(Request(PROMPT, draw))
        seeds.append(engine.scheduler.waiting[0].completion.seed)
    assert seeds[0] == seeds[1]


def test_any_thread_may_call_any_method() -> None:
    engine = make_engine(num_pages=64)

    def use(thread: int) -> None:
        rng = np.random.default_rng(thread)
        for _ in range(15):
            prompts = [PROMPT[: rng.integers(1, 30)] for _ in range(2)]
            outputs = engine.generate(prompts, FIVE)
            assert [x.token_ids for x in outputs] == [expected_tokens(prompt, FIVE) for prompt in prompts]
            stream = engine.stream(prompts, FIVE)
            next(stream)
            request_id = engine.submit(Request(PROMPT, FIVE))
            assert engine.cancel(request_id) in (True, False)
            engine.stats()

    with ThreadPoolExecutor(4) as threads:
        for result in [threads.submit(use, i) for i in range(4)]:
            result.result(timeout=60)
    while engine.has_work:
        engine.step()
    assert engine.scheduler.pool.num_held == 0


def test_streams_take_turns() -> None:
    """Each stream gets its own events, whichever of them runs the steps."""
    engine = make_engine()
    streams = [engine.stream(PROMPT[:length], FIVE) for length in (3, 30)]
    tokens: list[list[int]] = [[], []]
    for _ in range(5):
        for stream, seen in zip(streams, tokens, strict=True):
            seen.extend(next(stream).token_ids)
    assert tokens == [expected_tokens(PROMPT[:length], FIVE) for length in (3, 30)]


def test_fcfs_serves_in_order_of_arrival() -> None:
    """Admissions and first tokens are in order, as a long prompt takes all rows of its steps."""
    engine = make_engine(num_pages=64, max_running=3, policy="fcfs")
    requests = [Request(prompt, FIVE) for prompt in (PROMPT * 6, PROMPT[1:9], PROMPT[2:11], [3])]
    outputs = engine.generate(requests)
    first = [x.metrics.first_token for x in outputs]
    assert first == sorted(first)  # type: ignore[type-var]
    admitted = [x.metrics.admitted for x in outputs]
    assert admitted == sorted(admitted)  # type: ignore[type-var]
    assert outputs[3].metrics.admitted > 0  # type: ignore[operator]
    assert [x.token_ids for x in outputs] == [expected_tokens(list(x.prompt), FIVE) for x in requests]


def test_who_becomes_more_urgent_while_another_waits_for_memory_goes_first() -> None:
    class ByTime:
        """The long prompt is more urgent at first, the short one later."""

        def urgency(self, sequence: Sequence, now: float) -> float:
            return {100: 0.0 if now < 0.01 else 10.0, 8: 5.0}.get(sequence.prompt_length, -1.0)

        def share(self, sequence: Sequence, now: float) -> float:
            return 0.0

    engine = make_engine(60, 4, policy=ByTime(), max_running=4, prefix_cache=False)
    lengths = ((40, 150), (100, 80), (8, 8))
    requests = [Request([i] * n, SamplingParams(max_tokens=m, ignore_eos=True)) for i, (n, m) in enumerate(lengths)]
    first, long, short = (x.metrics for x in engine.generate(requests))
    assert first.finished is not None
    assert long.admitted is not None
    assert short.admitted is not None
    assert short.admitted < 0.12 < first.finished <= long.admitted


def test_a_lone_prompt_takes_the_whole_budget() -> None:
    engine = make_engine(num_pages=64)
    engine.submit(Request(PROMPT * 2, FIVE))
    batch = engine.scheduler.schedule(0.0)
    assert batch is not None
    assert batch.num_tokens == 16


def test_a_failed_engine_refuses_requests() -> None:
    engine = make_engine()
    engine.executor.submit = lambda batch: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPT, FIVE)
    with pytest.raises(RuntimeError, match="the engine has failed"):
        engine.submit(Request(PROMPT))


def test_sequence_states_only_change_in_order() -> None:
    sequence = Sequence("s", 0, 3, 4)
    with pytest.raises(AssertionError, match="waiting can't become decoding"):
        sequence.to(State.DECODING)
    sequence.to(State.FINISHED)
    for state in State:
        with pytest.raises(AssertionError):
            sequence.to(state)


def stream_text(text: str, *stop: str) -> tuple[list[str], bool]:
    stream = Detokenizer(ByteTokenizer(), stop)
    pieces = []
    for byte in text.encode():
        pieces.append(stream.push(byte))
        if stream.stopped:
            return pieces, True
    return [*pieces, stream.finish()], stream.stopped


def test_text_ends_before_the_first_stop_string() -> None:
    """Text that may begin a stop string is held back until it is clear."""
    assert stream_text("abcab!", "cab") == (["a", "b", "", "", ""], True)
    assert stream_text("abcax", "cab") == (["a", "b", "", "", "cax", ""], False)
    assert stream_text("aaab", "aab") == (["", "", "a", ""], True)
    assert stream_text("ab", "abc", "b") == (["", "a"], True)
    assert "".join(stream_text("größe", "ße")[0]) == "grö"
    assert stream_text("ab", "bc") == (["a", "", "b"], False)


def test_requests_may_be_prepared_in_another_process() -> None:
    """Input processor and prepared requests can be pickled, so that a server can prepare long prompts elsewhere."""
    engine = make_engine()
    with pytest.raises(ValueError, match="prompt has tokens"):
        engine.prepare(Request([VOCAB]))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        prepared = processes.submit(engine.input_processor.prepare, Request(PROMPT, FIVE)).result(timeout=60)
    assert prepared.tokens.tolist() == PROMPT
    for cached in (0, len(PROMPT) // 4 * 4):
        engine.submit(prepared)
        outputs = []
        while engine.has_work:
            outputs += [event.output for event in engine.step() if event.output is not None]
        assert outputs[0].token_ids == expected_tokens(PROMPT, FIVE)
        assert outputs[0].metrics.cached_tokens == cached


def test_requests_prepared_for_another_engine_are_refused() -> None:
    prepared = make_engine(page_size=8, num_pages=64).prepare(Request(PROMPT, FIVE))
    for options in ({"page_size": 4}, {"page_size": 8, "max_length": 40}, {"page_size": 8, "hash_key": b"x" * 16}):
        with pytest.raises(ValueError, match="request must be prepared for this engine, and was for another"):
            make_engine(**options).submit(prepared)  # type: ignore[arg-type]
    assert make_engine(page_size=8).submit(prepared)


def test_numpy_numbers_become_python_numbers() -> None:
    """Requests are sent to other processes as JSON."""
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), top_p=np.float64(0.5))
    request = Request([1], params, priority=np.int64(2), ttft_deadline=np.float32(1.5), tpot_target=1)
    numbers = [params.max_tokens, params.temperature, params.top_p, request.priority]
    assert [type(x) for x in (*numbers, request.ttft_deadline, request.tpot_target)] == [
        int,
        float,
        float,
        int,
        float,
        float,
    ]
