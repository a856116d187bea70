"""Lockstep of engines on fake devices: they decide alike from small messages; all end when one decides otherwise."""

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from fake_device import make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from process_threads import run_processes
from workload import Workload

from longctx.serving import ParallelPlan, Request, SamplingParams
from longctx.serving.distributed import ProcessGroup
from longctx.serving.distributed.lockstep import Lockstep
from longctx.serving.distributed.orders import Arrival


@settings(max_examples=4)
@given(
    seed=st.integers(0, 2**20),
    processes=st.integers(2, 3),
    plan=st.sampled_from(
        [ParallelPlan(), ParallelPlan(3, rank_tokens=8), ParallelPlan(2, 2, exchange="kvp", rank_tokens=12)]
    ),
    admission=st.sampled_from(["reserve", "optimistic"]),
    policy=st.sampled_from(["fcfs", "ilrs", "lrs", "lrs_relative"]),
    chunking=st.sampled_from(["static", "adaptive"]),
    window=st.sampled_from([None, 6, 20]),
)
def test_all_processes_decide_alike(
    seed: int, processes: int, plan: ParallelPlan, admission: str, policy: str, chunking: str, window: int | None
) -> None:
    options: Any = {"plan": plan, "admission": admission, "policy": policy, "chunking": chunking, "window": window}

    def act(group: ProcessGroup) -> Any:
        engine = make_engine(40, group=group, **options)
        if group.is_first:
            Workload(engine, seed).run(80)
        else:
            engine.follow()
        # The first one's are cleared.
        return dataclasses.replace(engine.stats(), pages_cached=0, window_pages_cached=0)

    first, *others = run_processes(processes, act)
    assert not isinstance(first, Exception), first
    assert others == [first] * len(others)


def test_step_messages_do_not_grow_with_context() -> None:
    """Only the message that carries the prompt is longer for a longer prompt."""

    def act(group: ProcessGroup) -> Any:
        engine = make_engine(40, group=group)
        if not group.is_first:
            engine.follow()
            return None
        broadcast, sizes = group.broadcast, {2: [], 100: []}

        def record(data: bytes) -> None:
            sizes[length].append(len(data))
            broadcast(data)

        for length in sizes:
            group.broadcast = record  # type: ignore[method-assign]
            engine.submit(Request([i % 40 for i in range(length)], SamplingParams(max_tokens=12, ignore_eos=True)))
            while engine.has_work:
                engine.step()
        return sizes

    sizes = run_processes(2, act)[0]
    digest = 30  # bytes, in every 16th message: the first one too
    assert sizes[100][0] - sizes[2][0] >= 4 * 98 - digest
    assert max(sizes[100][1:]) < 60


def test_followers_get_requests_whole() -> None:
    """What travels is what was submitted, to the last bit and type."""
    params = SamplingParams(
        frequency_penalty=0.1, logit_bias=((3, 1 / 3), (4, -100)), stop_token_ids=(5,), stop=("x",), seed=3
    )
    request = Request([1, 2, 3], params, "mine", tenant="t", cache_salt="salt", priority=2, ttft_deadline=0.1)

    def act(group: ProcessGroup) -> Any:
        lockstep = Lockstep(group)
        if group.is_first:
            lockstep.note(Arrival(request, "mine", 0.5, np.array([1, 2, 3], np.int32)))
            lockstep.note_step(1.0)
            return None
        ((arrival,),) = (order.updates for order in lockstep.orders())
        return arrival

    arrival = run_processes(2, act)[1]
    assert arrival.request.sampling == params
    assert hash(arrival.request.sampling) == hash(params)
    assert arrival.tokens.dtype == np.int32
    assert arrival.tokens.tolist() == [1, 2, 3]
    assert dataclasses.replace(arrival.request, prompt=request.prompt) == request


def test_a_process_that_decides_otherwise_ends_all(no_exit: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    def act(group: ProcessGroup) -> None:
        engine = make_engine(group=group)
        if group.process_id == 2:
            engine.scheduler.pool.allocate(0, reserved=False)
        if group.is_first:
            engine.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=60, ignore_eos=True))
            time.sleep(1)
        else:
            engine.follow()

    run_processes(3, act, join=3)
    assert no_exit.count(70) == 3
    logged = capsys.readouterr().err
    assert logged.count("process 2") >= 3
    for process in (0, 1, 2):
        (mine,) = [text for text in logged.split("longctx: ") if text.startswith(f"process {process} ")]
        assert "decided otherwise than process 0 within 16 steps" in mine
        assert mine.count("computes slot") >= 4  # its own decisions, and those of process 0 or 2


def test_different_configurations_are_refused_in_every_process() -> None:
    def act(group: ProcessGroup) -> None:
        make_engine(group=group, policy=("ilrs", "fcfs")[group.process_id], run_ahead=2 + group.process_id)

    for error in run_processes(2, act):
        assert isinstance(error, ValueError)
        assert "policy: 'ilrs' in process 0, 'fcfs' in process 1; run_ahead: 2 in process 0, 3" in str(error)


def test_followers_take_no_requests() -> None:
    def act(group: ProcessGroup) -> None:
        engine = make_engine(group=group)
        if group.is_first:
            with pytest.raises(RuntimeError, match="follow is for"):
                engine.follow()
            with pytest.raises(RuntimeError, match="in one process alone"), engine.lend_executor():
                pass
        else:
            with pytest.raises(RuntimeError, match="process 1 follows process 0"):
                engine.submit(Request([1]))
            with pytest.raises(RuntimeError, match="process 1 follows process 0"):
                engine.cancel("request-0")
            engine.follow()

    assert run_processes(2, act) == [None, None]


class SlowCompiler:
    """An executor that compiles for some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.is_warm = seconds, False

    def compile(self, progress: object) -> None:
        time.sleep(self.seconds)

    def warm_up(self) -> None:
        self.is_warm = True


def test_a_process_may_compile_for_longer_than_the_join_timeout() -> None:
    def act(group: ProcessGroup) -> bool:
        executor: Any = SlowCompiler(2.5 * group.process_id)
        Lockstep(group).warm_up(executor)
        group.join_timeout = 60.0  # for the end, to which they come one after the other
        return executor.is_warm

    assert run_processes(2, act, join=1) == [True, True]
