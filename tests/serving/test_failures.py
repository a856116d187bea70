"""What an engine owes its requests when something goes wrong, or when its user calls back."""

import threading

import numpy as np
import pytest
from fake_device import VOCAB, expected_tokens, make_engine

from longctx.serving import Event, Request, SamplingParams, StepMetrics

PROMPT = np.random.default_rng(1).integers(0, VOCAB, 30).tolist()
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)


def test_a_failed_step_ends_every_request_with_an_event() -> None:
    """The one that runs, one that waits, and one whose tokens go to a stream that another thread reads."""
    engine = make_engine(max_running=2)
    ids = [engine.submit(Request(PROMPT, FIVE)) for _ in range(3)]
    stream = engine.stream(PROMPT[:3], FIVE)
    events = [engine.step() for _ in range(4)]
    known = [t for each in events for event in each for t in event.token_ids if event.request_id == ids[0]]
    engine.executor.submit = lambda batch: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert engine.has_work
    ends = {event.request_id: event.output for event in engine.step()}
    assert [ends[i].finish_reason for i in ids] == ["error"] * 3  # type: ignore[union-attr]
    output = ends[ids[0]]
    assert output is not None
    assert output.token_ids[: len(known)] == known
    (last,) = (event for event in stream if event.output is not None)
    assert last.output is not None
    assert last.output.finish_reason == "error"
    with pytest.raises(RuntimeError, match="the engine has failed"):
        engine.step()
    with pytest.raises(RuntimeError, match="the engine has failed"):
        assert engine.has_work
    with pytest.raises(RuntimeError, match="the engine has failed"):
        engine.cancel(ids[0])


def test_a_failure_in_the_midst_of_results_ends_every_request() -> None:
    """Also one whose last token was taken in the same step, before the failure."""
    engine = make_engine()
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    ids = [engine.submit(Request(PROMPT[: i + 1], one if i == 0 else FIVE)) for i in range(3)]
    detokenizer = engine.core.scheduler.waiting[1].completion.detokenizer  # type: ignore[union-attr]
    detokenizer.push = lambda token: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        [engine.step() for _ in range(5)]
    events = engine.step()
    assert sorted(event.request_id for event in events if event.output is not None) == sorted(ids)


def test_generate_in_another_thread_raises_when_the_engine_fails() -> None:
    engine = make_engine(num_pages=64)
    stream = engine.stream(PROMPT, FIVE)
    errors: list[BaseException] = []

    def fail(event: Event) -> None:
        engine.executor.wait = lambda pending: 1 / 0  # type: ignore[method-assign, assignment, return-value]

    def generate() -> None:
        try:
            engine.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True), progress=fail)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    thread.join(timeout=20)
    assert isinstance(errors[0], ZeroDivisionError)
    assert [event.output.finish_reason for event in stream if event.output is not None] == ["error"]
    with pytest.raises(RuntimeError, match="the engine has failed"):
        engine.generate(PROMPT, FIVE)


def test_warm_up_is_refused_while_requests_are_there() -> None:
    engine = make_engine()
    stream = engine.stream(PROMPT, FIVE)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="warm_up must be called before requests, and 1 have not ended"):
            engine.warm_up()
        engine.step()
    assert [t for event in stream for t in event.token_ids] == expected_tokens(PROMPT, FIVE)
    engine.warm_up()
    assert engine.generate(PROMPT, FIVE)[0].token_ids == expected_tokens(PROMPT, FIVE)


def test_promised_pages_count_when_memory_runs_out() -> None:
    """Whoever is promised pages is preempted before one of higher priority that has computed some."""
    options = {"num_pages": 26, "admission": "optimistic", "chunking": "static:6", "policy": "fcfs"}
    engine = make_engine(page_size=4, prefix_cache=False, **options)  # type: ignore[arg-type]
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    for i in range(3):
        engine.submit(Request(PROMPT[i : i + 4], long, priority=2))
    engine.step()
    high = engine.submit(Request(PROMPT, FIVE, priority=1))
    low = engine.submit(Request(PROMPT, FIVE, priority=0))
    preempted: dict[str, int] = {}
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                preempted[event.request_id] = event.output.metrics.preemptions
    assert preempted[low] > 0
    assert preempted[high] == 0


def test_a_monitor_may_call_the_engine() -> None:
    """After the step's results are taken: it cancels, submits, and another thread may too."""
    calls: list[StepMetrics] = []
    threads: list[threading.Thread] = []

    def monitor(step: StepMetrics) -> None:
        calls.append(step)
        if step.number == 3:
            assert engine.cancel("a")
        if step.number == 4:
            engine.submit(Request(PROMPT[:5], FIVE, request_id="c"))
            threads.append(threading.Thread(target=lambda: engine.cancel("b")))
            threads[0].start()
            threads[0].join(timeout=10)
            assert not threads[0].is_alive()

    engine = make_engine(monitor=monitor)
    long = SamplingParams(max_tokens=30, ignore_eos=True)
    for name in "ab":
        engine.submit(Request(PROMPT[:5], long, request_id=name))
    outputs = {}
    while engine.has_work:
        outputs |= {event.request_id: event.output for event in engine.step() if event.output is not None}
    assert {name: output.finish_reason for name, output in outputs.items()} == {
        "a": "cancelled",
        "b": "cancelled",
        "c": "length",
    }
    assert [step.number for step in calls] == sorted(step.number for step in calls)
