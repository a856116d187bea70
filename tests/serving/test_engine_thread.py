"""The engine's thread: events are pushed, nobody waits for a step, and every request ends once, whatever happens."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from fake_device import EOS, expected_tokens, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.serving import Engine, Event, Request, SamplingParams
from longctx.serving.config import AdmissionLimits
from longctx.serving.engine.admission_control import AdmissionControl, Refused
from longctx.serving.engine.metrics import Load, StepMetrics
from longctx.serving.engine.thread import EngineThread, Received
from longctx.serving.kv_cache.connector import LeasedSource
from longctx.serving.request.handoff import Handoff, Progress

GREEDY = SamplingParams(max_tokens=6)
ENDLESS = SamplingParams(max_tokens=80, ignore_eos=True)


class Sink:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self.calls: list[list[Event]] = []
        self.ended = threading.Event()

    def __call__(self, events: list[Event]) -> None:
        self.calls.append(events)
        if any(event.output is not None for event in events):
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for events in self.calls for event in events for token in event.token_ids]

    def output(self) -> Any:
        assert self.ended.wait(10)
        (output,) = [event.output for events in self.calls for event in events if event.output is not None]
        return output


def submit(thread: EngineThread, prompt: list[int], params: SamplingParams = GREEDY, **fields: Any) -> tuple[str, Sink]:
    sink = Sink()
    return thread.submit(thread.engine.prepare(Request(prompt, params, **fields)), sink), sink


def hold(engine: Engine) -> threading.Event:
    """Let the engine's steps wait until the event is set."""
    go, executor = threading.Event(), engine.executor
    wait = executor.wait
    executor.wait = lambda pending: (go.wait(10), wait(pending))[1]  # type: ignore[method-assign]
    return go


class Coming:
    """Pages that come to host memory, and a first token."""

    def __init__(self) -> None:
        self.ready: Future[None] = Future()
        self.handoff: Handoff | None = None
        self.sources: Mapping[str, LeasedSource] = {}
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


def test_a_request_whose_pages_are_coming_takes_no_slot() -> None:
    """There is one slot, and a request that comes later has it meanwhile (Mooncake, section 3, step 4)."""
    coming, late = Coming(), Sink()
    with EngineThread(make_engine(max_running=1)) as thread:
        prepared = thread.engine.prepare(Request([5] * 20, GREEDY, request_id="late"))
        thread.submit(prepared, late, received=Received(None, {}, coming))
        _, other = submit(thread, [7, 8, 9])
        assert other.output().finish_reason in ("stop", "length")
        assert not late.ended.is_set()
        assert not thread.wait_idle(0.0)
        with pytest.raises(ValueError, match="request_id must be unique"):
            thread.submit(prepared, late)
        coming.ready.set_result(None)
        assert late.output().finish_reason in ("stop", "length")
        assert late.tokens == expected_tokens([5] * 20, GREEDY, eos=EOS)
        assert thread.wait_idle(10)


def test_a_first_token_that_comes_is_told_before_a_step_has_ended() -> None:
    expected = expected_tokens([5] * 16, ENDLESS)
    coming, sink = Coming(), Sink()
    engine = make_engine()
    go = hold(engine)
    with EngineThread(engine) as thread:
        prepared = engine.prepare(Request([5] * 16, ENDLESS))
        thread.submit(prepared, sink, received=Received(Handoff(0, (Progress(None, 0, ()),)), {}, coming))
        coming.handoff = Handoff(0, (Progress(None, 0, (expected[0],)),))
        coming.ready.set_result(None)
        deadline = time.monotonic() + 10
        while not sink.calls:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert sink.tokens == expected[:1]
        go.set()
        assert sink.output().token_ids == sink.tokens == expected


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_request_whose_pages_are_coming_can_end(how: str) -> None:
    coming, sink = Coming(), Sink()
    with EngineThread(make_engine()) as thread:
        prepared = thread.engine.prepare(Request([5] * 20, GREEDY, request_id="late"))
        thread.submit(prepared, sink, received=Received(None, {}, coming))
        if how == "cancel":
            assert thread.cancel("late")
            assert sink.output().finish_reason == "cancelled"
            assert thread.wait_idle(10)
        else:
            thread.close()
            assert sink.output().finish_reason == "error"
        coming.ready.set_result(None)
        assert len(sink.calls) == 1
        assert not thread.cancel("late")


def test_tokens_are_pushed_as_they_come() -> None:
    flushes: list[int] = []
    engine = make_engine(prefix_cache=False)
    with EngineThread(engine, flush=lambda: flushes.append(engine.stats().steps)) as thread:
        sinks = [submit(thread, [i, 2, 3])[1] for i in range(20)]
        for i, sink in enumerate(sinks):
            assert sink.output().token_ids == sink.tokens == expected_tokens([i, 2, 3], GREEDY, eos=EOS)
            assert all(len(events) == 1 for events in sink.calls)  # once a step
        assert thread.wait_idle(5)
        assert len(flushes) <= engine.stats().steps  # once a step, whatever the number of requests
    assert thread.failure.result(5) is None


def test_nothing_waits_for_a_step() -> None:
    engine = make_engine()
    go = hold(engine)
    with EngineThread(engine) as thread:
        first, sink = submit(thread, [1, 2], ENDLESS)
        time.sleep(0.05)
        assert 0 < thread.stalled_seconds < 5
        second, other = submit(thread, [3, 4])
        assert thread.cancel(first)
        assert thread.cancel(second)
        assert not thread.cancel("unknown")
        assert thread.load.running + thread.load.waiting <= 1
        go.set()
        assert sink.output().finish_reason == other.output().finish_reason == "cancelled"
        assert thread.wait_idle(5)
        assert engine.stats().pages_held == 0
        assert thread.stalled_seconds == 0


def test_it_sleeps_when_there_is_nothing_to_do() -> None:
    looks: list[int] = []

    class Watched(Engine):
        @property
        def has_work(self) -> bool:
            looks.append(1)
            return super().has_work

    engine = make_engine()
    engine.__class__ = Watched
    with EngineThread(engine) as thread:
        submit(thread, [1, 2])[1].output()
        assert thread.wait_idle(5)
        time.sleep(0.02)  # until it has looked for the last time
        before = len(looks)
        time.sleep(0.1)
        assert len(looks) == before
        assert submit(thread, [3, 4])[1].output().finish_reason in ("stop", "length")


def test_reports_say_whose_rows_a_step_has() -> None:
    reports: list[tuple[StepMetrics, Load]] = []
    with EngineThread(make_engine(prefix_cache=False)) as thread:
        thread.on_step.append(lambda step, load: 1 / 0)  # is logged, and not called again
        thread.on_step.append(lambda *report: reports.append(report))
        request_id, sink = submit(thread, [1] * 40)
        sink.output()
        thread.wait_idle(5)
    rows = [row for step, _ in reports for row in step.rows]
    assert {row[0] for row in rows} == {request_id}
    assert [count for _, count, decodes in rows if not decodes] == [16, 16, 8]
    step, load = reports[0]
    assert step.admitted == (request_id,)
    assert load.running == 1
    assert load.pages_held == sum(load.pages_by_rank) > 0
    assert len(thread.on_step) == 1


@pytest.mark.parametrize("when", ["queued", "running"])
def test_a_failure_reaches_everybody(when: str) -> None:
    engine = make_engine(max_running=1, token_budget=16)
    go = hold(engine)
    with EngineThread(engine) as thread:
        sinks = [submit(thread, [i, 2], ENDLESS)[1] for i in range(3)]
        if when == "running":
            time.sleep(0.05)
        engine.executor.wait = engine.executor.submit = broken  # type: ignore[method-assign]
        go.set()
        for sink in sinks:
            output = sink.output()
            assert output.finish_reason == "error"
            assert "the device is gone" in output.error
        assert isinstance(thread.failure.exception(5), OSError)
        with pytest.raises(RuntimeError, match="has failed"):
            submit(thread, [1, 2])
        assert not thread.cancel("request-0")
        assert thread.wait_idle(5)


def broken(*_: object) -> None:
    raise OSError("the device is gone")


def test_a_sink_that_raises_ends_its_request_alone() -> None:
    with EngineThread(make_engine()) as thread:
        thread.submit(thread.engine.prepare(Request([1, 2], ENDLESS)), broken)
        assert submit(thread, [3, 4])[1].output().finish_reason in ("stop", "length")
        assert thread.wait_idle(5)
        assert thread.engine.stats().pages_held == 0


def test_draining_refuses_and_ends() -> None:
    with EngineThread(make_engine()) as thread:
        _, sink = submit(thread, [1, 2], ENDLESS)
        thread.drain()
        with pytest.raises(Refused, match="shutting down") as caught:
            submit(thread, [1, 2])
        assert caught.value.reason == "draining"
        assert thread.wait_idle(10)
        assert sink.output().finish_reason == "length"


def test_closing_cancels_what_is_left() -> None:
    engine = make_engine(max_running=2)
    with EngineThread(engine) as thread:
        sinks = [submit(thread, [i, 2], ENDLESS)[1] for i in range(5)]
    assert {sink.output().finish_reason for sink in sinks} <= {"cancelled", "length"}
    assert engine.stats().pages_held == 0
    with pytest.raises((Refused, RuntimeError)):
        submit(thread, [1, 2])


def test_arrival_is_when_the_request_came() -> None:
    engine = make_engine()
    with EngineThread(engine) as thread:
        submit(thread, [1, 2])[1].output()
        sink, now = Sink(), engine.now()
        thread.submit(engine.prepare(Request([5, 6])), sink, arrival=now - 1.0)
        metrics = sink.output().metrics
        assert metrics.arrival == now - 1.0
        assert metrics.ttft > 1.0
        with pytest.raises(ValueError, match="arrival"):
            thread.submit(engine.prepare(Request([5, 6])), Sink(), arrival=engine.now() + 100)
        assert thread.wait_idle(5)


# Admission control.


def controlled(**limits: Any) -> Callable[[Engine], EngineThread]:
    return lambda engine: EngineThread(engine, AdmissionControl(engine, AdmissionLimits(**limits)))


def test_the_queue_is_bounded_and_says_why() -> None:
    engine = make_engine(max_running=1)
    go = hold(engine)
    with controlled(max_waiting=3)(engine) as thread:
        submit(thread, [9, 2], ENDLESS)
        while not engine.stats().running:
            time.sleep(0.01)
        # One step is held, so none of these gets a slot.
        refusals = []
        for i in range(10):
            try:
                submit(thread, [i, 2])
            except Refused as refused:
                refusals.append(refused)
        assert len(refusals) >= 7
        assert {refused.reason for refused in refusals} == {"queue"}
        assert "room for 3 requests" in str(refusals[0])
        assert 0.5 <= refusals[0].retry_after <= 120
        go.set()
        assert thread.wait_idle(10)
        assert thread.control.num_waiting == 0
        assert submit(thread, [1, 2])[1].output().finish_reason in ("stop", "length")


def test_a_burst_is_counted_before_it_is_planned() -> None:
    engine = make_engine()
    thread = controlled(max_waiting=5, max_waiting_tokens=1000)(engine)  # no step runs
    prepared = [engine.prepare(Request([i, 2])) for i in range(8)]
    results = []
    for each in prepared:
        try:
            results.append(thread.submit(each, Sink()))
        except Refused as refused:
            results.append(refused.reason)
    assert results[5:] == ["queue"] * 3
    assert thread.control.num_waiting == 5
    thread.start()
    thread.close()


def test_tokens_that_wait_are_bounded() -> None:
    engine = make_engine()
    thread = controlled(max_waiting_tokens=50)(engine)
    thread.submit(engine.prepare(Request([1] * 60)), Sink())  # alone, it may
    with pytest.raises(Refused) as caught:
        thread.submit(engine.prepare(Request([1] * 2)), Sink())
    assert caught.value.reason == "tokens"
    thread.start()
    thread.close()


def test_a_storm_of_retries_changes_nothing() -> None:
    engine = make_engine(max_running=1)
    thread = controlled(max_waiting=2)(engine)
    for i in range(2):
        thread.submit(engine.prepare(Request([i, 2], ENDLESS)), Sink())
    prepared = engine.prepare(Request([7, 2], GREEDY))
    estimates = set()
    for _ in range(500):
        with pytest.raises(Refused) as caught:
            thread.submit(prepared, Sink())
        estimates.add(caught.value.estimate)
    assert thread.control.num_waiting == 2
    assert None not in estimates
    assert len(thread.engine.scheduler.waiting) == 2
    thread.start()
    thread.close()


def test_deadlines_that_cannot_be_kept_are_refused() -> None:
    engine = make_engine(max_running=1)
    thread = controlled()(engine)
    thread.submit(engine.prepare(Request([1, 2], ENDLESS)), Sink())
    engine.step()  # a step that nobody has seen
    late, loose = (engine.prepare(Request([3, 4], GREEDY, ttft_deadline=x)) for x in (1e-4, 1e4))
    with pytest.raises(Refused, match=r"the first token is due in 0\.0001 s, and would come") as caught:
        thread.submit(late, Sink())
    assert caught.value.reason == "deadline"
    assert caught.value.estimate is not None
    thread.submit(loose, Sink())
    thread.start()
    thread.close()


def test_a_burst_of_deadlines_is_not_let_in_against_one_estimate() -> None:
    """Those that came before count, though no step has seen them."""
    engine = make_engine(policy="fcfs", prefix_cache=False)
    thread = controlled()(engine)
    prompts = [[i + 1] * 80 for i in range(16)]
    alone = engine.scheduler.forecast.time.prefill_seconds(0, 80)
    refusals = []
    for prompt in prompts:
        prepared = engine.prepare(Request(prompt, SamplingParams(max_tokens=1), ttft_deadline=4 * alone))
        try:
            thread.submit(prepared, Sink())
        except Refused as refused:
            refusals.append(refused.reason)
    assert 12 <= len(refusals) <= 15
    assert set(refusals) == {"deadline"}
    thread.start()
    thread.close()


def test_an_estimate_is_not_of_hours_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_running=1)
    thread = controlled()(engine)
    prepared = engine.prepare(Request([1, 2], ENDLESS, ttft_deadline=1e4))
    assert thread.control.estimator.of(prepared, {}, 1e4) is not None
    engine.submit(prepared)
    go = hold(engine)
    stepping = threading.Thread(target=engine.step)
    stepping.start()
    while not engine.stats().running:
        time.sleep(0.01)
    later = time.monotonic() + 3600
    monkeypatch.setattr("longctx.serving.engine.admission_control.time.monotonic", lambda: later)
    assert thread.control.estimator.of(prepared, {}, 1e4) is None
    go.set()
    stepping.join()


def test_what_can_never_fit_is_no_refusal() -> None:
    engine = make_engine(num_pages=8)
    thread = controlled(max_waiting=1)(engine)
    thread.submit(engine.prepare(Request([1, 2], ENDLESS.__class__(max_tokens=5))), Sink())
    with pytest.raises(ValueError, match="more than the 8 that the engine has"):
        thread.submit(engine.prepare(Request([1] * 100, GREEDY)), Sink())
    thread.start()
    thread.close()


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**20), limit=st.sampled_from([1, 4, 1000]), fails=st.booleans())
def test_every_request_ends_once(seed: int, limit: int, fails: bool) -> None:
    """Six threads submit and cancel; the engine may fail in the midst of it."""
    engine = make_engine()
    sinks: list[Sink] = []

    def client(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        for i in range(15):
            sink = Sink()
            params = SamplingParams(max_tokens=int(rng.integers(1, 20)))
            prepared = engine.prepare(Request(rng.integers(0, 50, int(rng.integers(1, 30))).tolist(), params))
            try:
                request_id = thread.submit(prepared, sink)
            except RuntimeError:  # `Refused` too
                continue
            sinks.append(sink)
            if rng.random() < 0.3:
                thread.cancel(request_id)
            if fails and number == 0 and i == 7:
                engine.executor.wait = broken  # type: ignore[method-assign]

    with controlled(max_waiting=limit)(engine) as thread:
        threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert thread.wait_idle(10)
        assert thread.control.num_waiting == 0
        for sink in sinks:
            assert sink.output().finish_reason in ("stop", "length", "cancelled", *(["error"] if fails else []))
        assert fails or engine.stats().pages_held == 0
