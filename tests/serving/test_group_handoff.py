"""Requests that move to and from an engine of several processes, on fake devices: all processes decide alike."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_device import MODEL, VOCAB
from fake_store import FakeStore, LeaseSource, StoringExecutor
from hypothesis import given, settings
from hypothesis import strategies as st
from process_threads import run_processes
from test_handoff import beginning, random_request, run, take_over, tokens
from test_page_loads import storing_engine

from longctx.serving import Engine, EngineConfig, Output, ParallelPlan, Request, SamplingParams
from longctx.serving.distributed import ProcessGroup
from longctx.serving.distributed.lockstep import Lockstep
from longctx.serving.distributed.orders import Located
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.kv_cache.leases import LeaseGone
from longctx.serving.request.handoff import Handoff


class SharedSources:
    """`LocatedSources` of threads: what the first process has, the others have too."""

    def __init__(self, of_all: dict[str, Any]) -> None:
        self.of_all = of_all
        self.opened: list[str] = []
        self.located: list[Located] = []
        self.dropped: list[str] = []

    def open(self, lease_id: str) -> Any:
        self.opened.append(lease_id)
        return self.of_all[lease_id]

    def locate(self, lease_id: str, place: dict[str, Any] | None) -> None:
        self.located.append(Located(lease_id, place))

    def drop(self, lease_id: str) -> None:
        self.dropped.append(lease_id)


def member(group: ProcessGroup, plan: ParallelPlan, loses: float = 0.0) -> Engine:
    """An engine in each process of a group, which loses other pages and is slow at other times than the others."""
    config = EngineConfig(num_pages=40, max_running=6, token_budget=16, hash_key=bytes(16), page_size=4)
    executor = StoringExecutor(config, plan, 40, FakeStore(loses, group.process_id))
    return Engine(MODEL, None, config, executor=executor, clock=executor.clock, plan=plan, process_group=group)


@given(
    seed=st.integers(0, 2**32),
    processes=st.integers(2, 3),
    plan=st.sampled_from([ParallelPlan(stage=2), ParallelPlan(context=2), ParallelPlan(stage=3)]),
    loses=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=3)
def test_requests_move_in_and_out(seed: int, processes: int, plan: ParallelPlan, loses: float) -> None:
    random = np.random.default_rng(seed)
    requests = [random_request(random, i, 9) for i in range(4)]
    counts = random.integers(1, 5, 2).tolist()
    alone, before, after = (storing_engine(FakeStore(), 400, each) for each in (plan, ParallelPlan(), ParallelPlan()))
    expected: dict[str, list[Output]] = {}
    for request in requests:
        alone.submit(request)
        before.submit(beginning(request, counts[0], f"before {request.request_id}"))
    run(alone, expected)
    outputs: dict[str, list[Output]] = {}
    run(before, outputs)
    leases = [x.lease.lease_id for each in outputs.values() for x in each if x.lease is not None]
    pages = {lease_id: LeaseSource(before, lease_id) for lease_id in leases}
    sources = [SharedSources(pages) for _ in range(processes)]

    def act(group: ProcessGroup) -> Any:
        engine = member(group, plan, loses)
        if group.is_first:
            for request in requests:
                there = sorted(outputs[str(request.request_id)], key=lambda output: output.index)
                own = {x.lease.lease_id: pages[x.lease.lease_id] for x in there if x.lease is not None}
                part = beginning(request, sum(counts), f"then {request.request_id}")
                engine.submit(part, None, Handoff.of(there), own)
            then, final = dict[str, list[Output]](), dict[str, list[Output]]()
            run(engine, then)
            for request in requests:
                take_over(after, engine, request, then[str(request.request_id)])
            run(after, final)
            assert [tokens(final[name]) for name in expected] == [tokens(there) for there in expected.values()]
            engine.step()
        else:
            engine.follow(sources[group.process_id])
        assert not engine.executor.sources
        assert len(engine.core.leases) == engine.core.pool.num_held == 0
        return engine.stats()

    first, *others = run_processes(processes, act)
    assert not isinstance(first, Exception), first
    assert others == [first] * len(others)
    for each in sources[1:]:
        assert sorted(each.opened) == sorted(each.dropped) == sorted(leases)


def test_pages_may_be_asked_for_in_every_process_once_the_engine_is_idle() -> None:
    """The last step ends in all of them; only the first one ends a lease."""
    engines: list[Engine] = []
    plan, prompt = ParallelPlan(stage=2), [i % VOCAB for i in range(30)]

    def act(group: ProcessGroup) -> None:
        engine = member(group, plan)
        if not group.is_first:
            engines.append(engine)
            engine.follow()
            return
        engine.submit(Request(prompt, SamplingParams(max_tokens=1), lease="a"))
        run(engine, {})
        [follower] = engines
        wait_until(lambda: _is_over(follower, "a"))
        lease = follower.pages.lease("a")
        assert (lease.pages, lease.length) == (engine.pages.lease("a").pages, 30)
        [block] = follower.pages.read("a", 0, len(lease.pages), (0, 1)).result()
        assert block.data[:, 0].reshape(-1)[:30].tolist() == prompt
        follower.pages.release("a")
        assert follower.pages.lease("a")
        engine.pages.release("a")
        with pytest.raises(LeaseGone):
            engine.pages.lease("a")
        engine.submit(Request(prompt, SamplingParams(max_tokens=1)))
        run(engine, {})

    assert run_processes(2, act) == [None, None]
    assert len(engines[0].core.leases) == 0


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def _is_over(engine: Engine, lease_id: str) -> bool:
    try:
        return engine.pages.lease(lease_id).is_over
    except LeaseGone:
        return False


def test_others_hear_where_pages_are_and_which_leave() -> None:
    place = {"addresses": ["127.0.0.1:1", "127.0.0.1:2"], "deadline": 1.0, "lease_timeout": 0.0}
    sources = SharedSources({})
    prompt = list(range(20))

    def act(group: ProcessGroup) -> int:
        engine = member(group, ParallelPlan())
        if group.is_first:
            engine.submit(Request(prompt, SamplingParams(max_tokens=1)))
            run(engine, {})
            engine.pages.locate("a", place)
            assert engine.pages.evict("device", lambda key: True).result() > 0
            engine.pages.locate("a", None)
            engine.submit(Request(prompt, SamplingParams(max_tokens=1)))
            run(engine, {})
        else:
            engine.follow(sources)
        return engine.core.pool.num_evicted

    first, other = run_processes(2, act)
    assert first == other > 0
    assert sources.located == [Located("a", place), Located("a", None)]


def test_leases_that_are_asked_for_elsewhere() -> None:
    """They are told apart from the ends of loads."""

    def act(group: ProcessGroup) -> Any:
        ends = Lockstep(group)
        if not group.is_first:
            ends.report_asked("a")
            ends.report_loads([Loaded("x", 3, 2.0)])
            ends.report_asked("b")
            group.barrier("all is told")
            return None
        group.barrier("all is told")
        return ends.take_asked(), ends.complete_loads([Loaded("x", 4, 1.0)], {"x"}), ends.take_asked()

    assert run_processes(2, act)[0] == ({"a", "b"}, [Loaded("x", 3, 2.0)], set())
