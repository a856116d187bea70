"""Requests at the door and through their lives: what is refused, what is cancelled, who goes first."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
from fake_device import MODEL, VOCAB, continuation, make_engine

from longctx.models import ByteTokenizer
from longctx.serving import Engine, EngineConfig, Request, SamplingParams
from longctx.serving.request.detokenizer import Detokenizer
from longctx.serving.scheduler.sequence import Sequence, State

PROMPT = np.random.default_rng(1).integers(0, VOCAB, 30).tolist()
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer of 1 to 2147483647, got 0"),
        ({"max_tokens": 2.5}, "max_tokens must be an integer"),
        ({"n": 0}, "n must be an integer of 1 to"),
        ({"temperature": -1}, "temperature must be finite and 0 to 1e\\+06, got -1"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be an integer of 1 to"),
        ({"temperature": 1.0, "top_p": 0}, "top_p must be finite and 1e-06 to 1"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p must be finite and 1e-06 to 1"),
        ({"temperature": 1.0, "min_p": -0.1}, "min_p must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be finite"),
        ({"presence_penalty": 3}, "presence_penalty must be finite and -2 to 2"),
        ({"seed": 2**31}, "seed must be an integer of 0 to 2147483647"),
        ({"stop": ("",)}, "stop must be strings, none of them empty"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must be an integer of 0 to"),
        ({"top_p": 0.5}, "contradict temperature=0"),
        ({"top_k": 3}, "contradict temperature=0"),
        ({"n": 2}, "n=2 contradicts temperature=0"),
        ({"logprobs": -1}, "logprobs must be an integer of 0 to"),
        ({"temperature": 1e-30}, "temperature must be 0, or 1e-6"),
        ({"stop": None}, "stop must be a string or some in a tuple"),
        ({"stop_token_ids": 5}, "stop_token_ids a tuple of integers"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
    ],
)
def test_sampling_refuses(options: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt must be one sequence of at least one token"),
        ([[1, 2]], {}, "prompt must be one sequence"),
        ([[1], [2, 3]], {}, "prompt must be one sequence"),
        ([0.5], {}, "prompt must be text or integers"),
        ([VOCAB], {}, "prompt has tokens from 50 to 50; the vocabulary is 0 to 49"),
        ([-1], {}, "prompt has tokens from -1"),
        ("text", {}, "the engine has no tokenizer"),
        ([1] * 250, {"max_tokens": 10}, r"make 250 \+ 10 tokens, more than the 256"),
        ([1] * 80, {"max_tokens": 20}, "need 25 pages of 4 tokens, more than the 24 that the engine has"),
        ([1], {"stop": ("x",)}, "stop strings need a tokenizer"),
        ([1], {"stop_token_ids": (50,)}, "stop_token_ids must be in the vocabulary"),
        ([1], {"logprobs": 6}, "logprobs must be at most max_logprobs=5"),
        ([1], {"temperature": 1, "n": 7}, "n=7 completions are more than the max_running=6"),
    ],
)
def test_bad_requests_harm_nobody(prompt: object, options: dict, message: str) -> None:
    engine = make_engine()
    running = engine.submit(Request(PROMPT, FIVE))
    engine.step()
    good = Request(PROMPT[:3], FIVE)
    with pytest.raises((TypeError, ValueError), match=message):
        engine.submit(Request(prompt, SamplingParams(**options)))  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match=rf"prompts\[1\]: .*{message}"):
        engine.generate([good, Request(prompt, SamplingParams(**options))])  # type: ignore[arg-type]
    events = []
    while engine.has_work:
        events += engine.step()
    (output,) = (event.output for event in events if event.output is not None)
    assert output.request_id == running
    assert output.token_ids == continuation(PROMPT, FIVE)


def test_requests_refuse() -> None:
    for options, message in (
        ({"request_id": 3}, "request_id must be a string"),
        ({"ttft_deadline": 0}, "ttft_deadline must be finite and 1e-06"),
        ({"tpot_target": -1}, "tpot_target must be"),
        ({"priority": -1}, "priority must be an integer of 0 to"),
        ({"sampling": {}}, "sampling must be SamplingParams"),
        ({"session_id": "\ud800"}, "session_id must be valid Unicode"),
        ({"tenant": "\ud800"}, "tenant must be valid Unicode"),
        ({"tenant": None}, "tenant must be a string"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            Request([1], **options)  # type: ignore[arg-type]
    engine = make_engine(prefix_cache=False)
    with pytest.raises(ValueError, match="session_id needs prefix_cache=True"):
        engine.submit(Request([1], session_id="s"))
    engine.submit(Request([1], request_id="same"))
    with pytest.raises(ValueError, match="'same' has not ended yet"):
        engine.submit(Request([1], request_id="same"))
    with pytest.raises(ValueError, match="one for all prompts or 2 of them, got 1"):
        engine.generate([[1], [2]], [FIVE])
    with pytest.raises(TypeError, match="prompts must be text, token ids, a Request"):
        engine.generate(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sampling must be SamplingParams or a list"):
        engine.generate([[1]], 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampling must be None for a Request"):
        engine.generate([Request([1])], FIVE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size must be an integer of at least 1"),
        ({"run_ahead": 9}, "run_ahead must be at most 8"),
        ({"token_budget": 4}, "token_budget must have a row for each of max_running=6"),
        ({"policy": "fifo"}, "policy must be one of fcfs, edf, srpf, lrs, ilrs, got 'fifo'"),
        ({"policy": 3}, "policy must be a name or have `urgency` and `share`"),
        ({"chunking": "static:17"}, "chunking must have max_running=6 to token_budget=16 tokens"),
        ({"chunking": "static:5"}, "chunking must have max_running=6 to token_budget=16 tokens"),
        ({"chunking": "static:-3"}, "chunking must be"),
        ({"chunking": "dynamic"}, 'chunking must be "static", "static:N" or "adaptive"'),
        ({"chunking": "adaptive:5"}, 'chunking must be "static", "static:N" or "adaptive"'),
        ({"chunking": 512}, "chunking must be a string"),
        ({"max_share": 1.5}, "max_share must be finite and 0 to 1"),
        ({"slo": 5.0}, "slo must be an Slo"),
        ({"admission": "hopeful"}, "admission must be"),
        ({"buckets": (4, 8)}, "buckets must end at token_budget=16"),
        ({"buckets": 16}, "buckets must be a tuple of integers"),
        ({"buckets": (8.5, 16)}, "buckets must be an integer"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"hash_key": b""}, "hash_key must be None or 16 to 64 bytes"),
        ({"max_length": 300}, "max_length must be at most the model's context of 256"),
        ({"hash_key": b"short"}, "hash_key must be None or 16 to 64 bytes"),
    ],
)
def test_config_refuses(options: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make_engine(**options)


def test_an_engine_needs_parameters() -> None:
    with pytest.raises(ValueError, match="params must be given"):
        Engine(MODEL, None, EngineConfig(num_pages=4))


def test_default_buckets_double_and_end_at_the_budget() -> None:
    assert EngineConfig(token_budget=100, max_running=9).row_buckets == (8, 16, 32, 64, 100)
    assert EngineConfig(token_budget=8, max_running=8).row_buckets == (8,)


@pytest.mark.parametrize("samples", [1, 3])
def test_cancel_at_any_moment(samples: int) -> None:
    """Waiting, being read, when samples fork, decoding, and after a result that is still under way."""
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
        assert after.token_ids == continuation(PROMPT, FIVE)


def test_leaving_a_stream_cancels() -> None:
    engine = make_engine()
    for event in engine.stream([PROMPT, PROMPT[:4]], FIVE):
        assert event.token_ids
        break
    assert not engine.has_work
    assert engine.scheduler.pool.num_held == 0


def test_a_stream_may_be_read_late_closed_or_never() -> None:
    engine = make_engine()
    late = engine.stream(PROMPT, FIVE)
    engine.generate(PROMPT[:3], SamplingParams(max_tokens=20, ignore_eos=True))
    assert [t for event in late for t in event.token_ids] == continuation(PROMPT, FIVE)
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


def test_ids_that_the_engine_makes_are_free() -> None:
    engine = make_engine()
    engine.submit(Request(PROMPT, FIVE, request_id="request-1"))
    assert [engine.submit(Request(PROMPT, FIVE)) for _ in range(2)] == ["request-0", "request-2"]


def test_what_is_refused_changes_no_seed() -> None:
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
            assert [x.token_ids for x in outputs] == [continuation(prompt, FIVE) for prompt in prompts]
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
    """Each gets its own events, whoever runs the steps."""
    engine = make_engine()
    streams = [engine.stream(PROMPT[:length], FIVE) for length in (3, 30)]
    tokens: list[list[int]] = [[], []]
    for _ in range(5):
        for stream, seen in zip(streams, tokens, strict=True):
            seen.extend(next(stream).token_ids)
    assert tokens == [continuation(PROMPT[:length], FIVE) for length in (3, 30)]


def test_first_come_first_served() -> None:
    """In order, admission and first tokens: a long prompt leaves nobody a row of its steps."""
    engine = make_engine(num_pages=64, max_running=3, policy="fcfs")
    requests = [Request(prompt, FIVE) for prompt in (PROMPT * 6, PROMPT[1:9], PROMPT[2:11], [3])]
    outputs = engine.generate(requests)
    first = [x.metrics.first_token for x in outputs]
    assert first == sorted(first)  # type: ignore[type-var]
    admitted = [x.metrics.admitted for x in outputs]
    assert admitted == sorted(admitted)  # type: ignore[type-var]
    assert outputs[3].metrics.admitted > 0  # type: ignore[operator]
    assert [x.token_ids for x in outputs] == [continuation(list(x.prompt), FIVE) for x in requests]


def test_a_lone_prompt_takes_the_whole_budget() -> None:
    engine = make_engine(num_pages=64)
    engine.submit(Request(PROMPT * 2, FIVE))
    batch = engine.scheduler.schedule(0.0)
    assert batch is not None
    assert batch.num_tokens == 16


def test_an_engine_that_failed_says_so() -> None:
    engine = make_engine()
    engine._executor.submit = lambda batch: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPT, FIVE)
    with pytest.raises(RuntimeError, match="the engine has failed"):
        engine.submit(Request(PROMPT))


def test_states_change_as_they_may() -> None:
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


def test_stop_strings() -> None:
    """The text ends before the first, and nothing that may begin one is given out before it is clear."""
    assert stream_text("abcab!", "cab") == (["a", "b", "", "", ""], True)
    assert stream_text("abcax", "cab") == (["a", "b", "", "", "cax", ""], False)
    assert stream_text("aaab", "aab") == (["", "", "a", ""], True)
    assert stream_text("ab", "abc", "b") == (["", "a"], True)
    assert "".join(stream_text("größe", "ße")[0]) == "grö"
    assert stream_text("ab", "bc") == (["a", "", "b"], False)


def test_requests_may_be_prepared_elsewhere() -> None:
    """In another process, as a server does with long prompts: what prepares them, and what comes of it, travel."""
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
        assert outputs[0].token_ids == continuation(PROMPT, FIVE)
        assert outputs[0].metrics.cached_tokens == cached


def test_numbers_become_those_of_python() -> None:
    """A request goes to other processes as JSON."""
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), top_p=np.float64(0.5))
    request = Request([1], params, priority=np.int64(2), ttft_deadline=np.float32(1.5), tpot_target=1)
    told = [params.max_tokens, params.temperature, params.top_p, request.priority]
    assert [type(x) for x in (*told, request.ttft_deadline, request.tpot_target)] == [
        int,
        float,
        float,
        int,
        float,
        float,
    ]
