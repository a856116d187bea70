"""Calls of an engine from within its own steps, from other threads during a step, and Ctrl-C at any moment."""

import contextlib
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_device import VOCAB, expected_tokens, make_engine

from longctx.serving import Engine, Event, Output, Request, SamplingParams, StepMetrics

RNG = np.random.default_rng(2)
PROMPTS = [RNG.integers(0, VOCAB, length).tolist() for length in (3, 30, 11)]
SIX = SamplingParams(max_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
EXPECTED = [expected_tokens(prompt, SIX) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    """As in a program: a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def on_signal(action: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def signal_at_line(number: int, kind: signal.Signals, times: int = 1) -> Iterator[None]:
    """Raise a signal, or several, before the line of this number that the serving package executes."""
    count = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        if "/longctx/serving/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == number:
                sys.settrace(None)
                for _ in range(times):
                    signal.raise_signal(kind)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def within_a_step(engine: Engine, number: int, action: Callable[[], object]) -> None:
    """Let the engine's executor call `action` as it begins the step of this number."""
    executor: Any = engine.executor
    submit = executor.submit

    def submit_and_act(batch: Any) -> Any:
        if batch.index == number:
            action()
        return submit(batch)

    executor.submit = submit_and_act


def block_first_step(engine: Engine) -> tuple[threading.Event, threading.Event]:
    """Let the first step wait, as when it compiles for a minute; (it has begun; it may go on)."""
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        leave.wait(30)

    within_a_step(engine, 0, block)
    return entered, leave


def check_works(engine: Engine) -> None:
    """It is idle, holds nothing, and gives the right tokens."""
    assert not engine.has_work
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_held) == (0, 0, 0)
    assert [output.token_ids for output in engine.generate(PROMPTS, SIX)] == EXPECTED


@pytest.mark.parametrize("call", ["step", "generate", "next", "lend_executor"])
def test_a_step_within_a_step_is_refused(call: str) -> None:
    engine = make_engine(num_pages=40)
    stream = engine.stream(PROMPTS[0], SIX)
    calls: dict[str, Callable[[], object]] = {
        "step": engine.step,
        "generate": lambda: engine.generate([1, 2], SIX),
        "next": lambda: next(stream),
        "lend_executor": lambda: engine.lend_executor().__enter__(),
    }
    refused: list[RuntimeError] = []

    def act() -> None:
        with pytest.raises(
            RuntimeError, match=f"{'next' if call == 'generate' else call} was called from within another call"
        ) as e:
            calls[call]()
        refused.append(e.value)

    within_a_step(engine, 1, act)
    assert [x.token_ids for x in engine.generate(PROMPTS, SIX)] == EXPECTED
    assert len(refused) == 1
    assert [t for event in stream for t in event.token_ids] == EXPECTED[0]
    check_works(engine)


def test_requests_may_come_and_go_within_a_step() -> None:
    engine = make_engine(num_pages=60)
    victim, dropped = engine.submit(Request(PROMPTS[0], LONG)), engine.stream(PROMPTS[1], LONG)
    born: list[str] = []

    def act() -> None:
        born.append(engine.submit(Request(PROMPTS[2], SIX)))
        assert engine.cancel(victim)
        dropped.close()
        assert engine.stats().running == 2

    within_a_step(engine, 2, act)
    outputs: dict[str, Output] = {}
    while engine.has_work:
        outputs |= {event.request_id: event.output for event in engine.step() if event.output is not None}
    assert outputs[victim].finish_reason == "cancelled"
    assert outputs[victim].token_ids == expected_tokens(PROMPTS[0], LONG)[: len(outputs[victim].token_ids)]
    assert outputs[born[0]].token_ids == EXPECTED[2]
    check_works(engine)


def test_signal_handlers_may_call_at_any_line() -> None:
    rng, refused = random.Random(0), []
    for _ in range(12):
        engine = make_engine(num_pages=60, max_running=4)
        victim = engine.submit(Request(PROMPTS[1], SIX))
        begun: list[str] = []
        events: list[Event] = []

        def act(engine: Engine = engine, victim: str = victim, begun: list[str] = begun, events: Any = events) -> None:
            begun.append(engine.submit(Request(PROMPTS[2], SIX)))
            engine.cancel(victim)
            engine.stats()
            engine.stream(PROMPTS[0], SIX).close()
            try:
                events += engine.step()
            except RuntimeError as error:
                assert "step was called from within another call" in str(error)  # noqa: PT017
                refused.append(victim)

        with on_signal(act), signal_at_line(rng.randrange(1, 3_000), signal.SIGUSR1):
            engine.generate(PROMPTS[:2], SIX)
        while engine.has_work:
            events += engine.step()
        tokens: dict[str, list[int]] = {victim: []}
        for event in events:
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
        assert EXPECTED[1][: len(tokens[victim])] == tokens[victim]
        assert [tokens[name] for name in begun] == [EXPECTED[2]] * len(begun)
        check_works(engine)
    assert len(refused) > 4


def test_ctrl_c_at_any_line_cancels_the_call_and_leaves_the_engine_alive() -> None:
    rng = random.Random(1)
    num_interrupted = 0
    engine = make_engine(num_pages=60)
    for _ in range(24):
        try:
            with signal_at_line(rng.randrange(1, 4_000), signal.SIGINT):
                outputs = engine.generate(PROMPTS, SIX)
        except KeyboardInterrupt:
            num_interrupted += 1
        else:
            assert [x.token_ids for x in outputs] == EXPECTED
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        check_works(engine)
    assert num_interrupted > 8


# Python ignores what is raised in a finaliser, and pytest warns of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_twice_at_any_line_ends_the_engine_or_nothing() -> None:
    """No request is left over that nobody will end, and nobody hangs."""
    rng = random.Random(2)
    engine = make_engine(num_pages=60)
    num_dead = 0
    for _ in range(25):
        with contextlib.suppress(KeyboardInterrupt), signal_at_line(rng.randrange(1, 4_000), signal.SIGINT, times=2):
            engine.generate(PROMPTS, SIX)
        try:
            check_works(engine)
        except RuntimeError as error:
            assert "the engine has failed" in str(error)  # noqa: PT017
            num_dead += 1
            engine = make_engine(num_pages=60)
    assert 0 < num_dead < 25


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_twice_at_each_line_of_a_turn_does_not_leave_it_taken() -> None:
    engine = make_engine(num_pages=60)
    for number in range(1, 60):
        with contextlib.suppress(KeyboardInterrupt), signal_at_line(number, signal.SIGINT, times=2):
            engine.stats()
        try:
            check_works(engine)
        except RuntimeError as error:
            assert "the engine has failed" in str(error)  # noqa: PT017
            engine = make_engine(num_pages=60)


def test_a_request_may_be_cancelled_before_it_has_entered() -> None:
    engine = make_engine()
    claim = engine.requests.claim
    outcomes: list[bool] = []

    def claim_and_cancel(*arguments: Any) -> None:
        claim(*arguments)
        thread = threading.Thread(target=lambda: outcomes.append(engine.cancel("mine")))
        thread.start()
        thread.join(30)

    engine.requests.claim = claim_and_cancel  # type: ignore[method-assign]
    engine.submit(Request(PROMPTS[0], SIX, request_id="mine"))
    (event,) = engine.step()
    assert outcomes == [True]
    assert event.output is not None
    assert event.output.finish_reason == "cancelled"
    check_works(engine)


def test_ctrl_c_takes_no_event_from_whoever_steps() -> None:
    for number in range(1, 1_500, 43):
        engine = make_engine()
        engine.submit(Request(PROMPTS[0], SamplingParams(max_tokens=1, ignore_eos=True)))
        events: list[Event] = []
        with contextlib.suppress(KeyboardInterrupt), signal_at_line(number, signal.SIGINT):
            events += engine.step()
        while engine.has_work:
            events += engine.step()
        assert [t for event in events for t in event.token_ids] == EXPECTED[0][:1]


def test_a_handler_that_a_monitor_sets_stays() -> None:
    def handler(number: int, frame: object) -> None: ...

    engine = make_engine(monitor=lambda step: signal.signal(signal.SIGINT, handler))
    try:
        engine.generate(PROMPTS[0], SIX)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_second_ctrl_c_does_not_wait_for_the_step() -> None:
    engine = make_engine()

    def act() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    within_a_step(engine, 1, act)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, SIX)
    with pytest.raises(RuntimeError, match="the engine has failed"):
        engine.generate(PROMPTS, SIX)


def test_ctrl_c_does_not_wait_for_all_programs_to_be_compiled() -> None:
    engine = make_engine()
    ended: list[bool] = []

    def compile_all(progress: object) -> None:
        signal.raise_signal(signal.SIGINT)
        ended.append(True)

    engine.executor.compile = compile_all  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.warm_up()
    assert not ended
    check_works(engine)


def test_ctrl_c_ends_the_wait_for_another_threads_step() -> None:
    engine = make_engine(num_pages=60)
    entered, leave = block_first_step(engine)
    outputs: list[Output] = []
    thread = threading.Thread(target=lambda: outputs.extend(engine.generate(PROMPTS[0], SIX)))
    thread.start()
    entered.wait(30)
    interrupt = threading.Timer(0.3, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[1], SIX)
    assert not leave.is_set()
    leave.set()
    thread.join(30)
    assert outputs[0].token_ids == EXPECTED[0]
    check_works(engine)


def test_nobody_waits_for_a_step_to_submit_cancel_or_ask() -> None:
    engine = make_engine(num_pages=60)
    entered, leave = block_first_step(engine)
    first = engine.submit(Request(PROMPTS[0], LONG))
    outputs: dict[str, Output] = {}

    def drive() -> None:
        while engine.has_work:
            outputs.update({event.request_id: event.output for event in engine.step() if event.output is not None})

    thread = threading.Thread(target=drive)
    thread.start()
    entered.wait(30)
    second = engine.submit(Request(PROMPTS[1], SIX))
    third = engine.stream(PROMPTS[2], SIX)
    assert engine.requests[second].progress == (0, 30)
    assert engine.cancel(first)
    assert engine.stats().running == 1
    third.close()
    with pytest.raises(ValueError, match=f"request_id must be unique, and '{first}' has not ended"):
        engine.submit(Request(PROMPTS[0], SIX, request_id=first))
    assert not leave.is_set()
    leave.set()
    thread.join(30)
    assert outputs[first].finish_reason == "cancelled"
    assert outputs[second].token_ids == EXPECTED[1]
    check_works(engine)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_stream_that_is_gone_holds_nothing(how: str) -> None:
    engine = make_engine(num_pages=40)
    gc.freeze()  # what earlier tests left is not gone through again
    for _ in range(3):
        stream = engine.stream(Request(PROMPTS[1], LONG, request_id="mine"))
        next(stream)
        assert engine.stats().pages_held > 0
        if how == "close":
            stream.close()
        del stream
        gc.collect()
        assert engine.stats().pages_held == 0
    stream = engine.stream(Request(PROMPTS[1], LONG, request_id="mine"))
    next(stream)
    del stream
    gc.collect()
    assert not engine.cancel("mine")
    assert engine.submit(Request(PROMPTS[1], SIX, request_id="mine")) == "mine"
    assert [t for _ in range(30) for event in engine.step() for t in event.token_ids] == EXPECTED[1]
    check_works(engine)


def test_a_monitor_that_raises_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def monitor(step: StepMetrics) -> None:
        calls.append(step.number)
        if step.number == 2:
            engine.step()

    engine = make_engine(monitor=monitor)
    assert [output.token_ids for output in engine.generate(PROMPTS, SIX)] == EXPECTED
    assert calls == [0, 1, 2]
    (record,) = caplog.records
    assert record.message == "an observer of the engine raised, and is not called any more"
    assert "step was called from within another call" in record.exc_text  # type: ignore[operator]
    check_works(engine)


def test_nothing_runs_in_an_engine_that_has_failed() -> None:
    engine = make_engine(max_running=2)
    within_a_step(engine, 3, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS, SIX)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_held) == (0, 0, 0)
    assert stats.prompt_tokens > 0
