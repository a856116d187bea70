"""Sessions of agents: those of files in AIPerf's format, and those that are drawn with published statistics."""

import dataclasses
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents import row, simulate
from longctx.simulation.workloads import (
    AgentTraces,
    WorkloadRequest,
    ideal_hit_rate,
    make_agent_sessions,
    read_workload,
)
from longctx.simulation.workloads.request import check_arrivals


def turn(t: float, prompt: int, output: int, blocks: list[int], seconds: float | None = 1.0, **more: Any) -> dict:
    timed = {} if seconds is None else {"api_time": seconds}
    return {"t": t, "type": "s", "model": "m", "in": prompt, "out": output, "hash_ids": blocks} | timed | more


def session(*requests: dict, **more: Any) -> dict[str, Any]:
    return {"id": "s", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": [*requests]} | more


def order(requests: list[WorkloadRequest]) -> list[tuple[int | None, float]]:
    return [(request.after, round(request.delay, 6)) for request in requests]


def test_turns_follow_each_other_as_long_after_the_answer_as_recorded() -> None:
    requests = AgentTraces().read(
        session(turn(0, 100, 20, [1, 2], 2.0), turn(5, 200, 9, [1, 3, 4, 5], 1.5), turn(6.75, 300, 9, [1, 3, 4, 5, 6]))
    )
    assert order(requests) == [(None, 0.0), (0, 3.0), (1, 0.25)]
    assert [request.prompt_tokens for request in requests] == [100, 200, 300]
    assert {request.session for request in requests} == {"s"}
    check_arrivals(requests)


@pytest.mark.parametrize("offset", [0.0, 10.0])  # from the entry's beginning, or from the session's
def test_subagents_run_side_by_side_and_are_waited_for(offset: float) -> None:
    one, two = ([turn(t + offset, 64, 5, [20 + n], 3.0)] for n, t in enumerate((0.5, 1.0)))
    requests = AgentTraces().read(
        session(
            turn(0, 128, 5, [1, 2], 9.0),
            {"t": 10.0, "type": "subagent", "agent_id": "a", "requests": one},
            {"t": 10.0, "type": "subagent", "agent_id": "b", "requests": two},
            turn(15.0, 192, 5, [1, 2, 3]),
        )
    )
    # The second subagent ends last, one second before the parent goes on.
    assert order(requests) == [(None, 0.0), (0, 1.5), (0, 2.0), (2, 1.0)]


def test_requests_that_overlap_are_branches() -> None:
    flat = [turn(0, 64, 1, [1], 1.0), turn(2, 64, 1, [1], 5.0), turn(3, 64, 1, [1], 1.0), turn(8, 64, 1, [1], 1.0)]
    assert order(AgentTraces().read(session(*flat))) == [(None, 0.0), (0, 1.0), (0, 2.0), (1, 1.0)]


def test_without_times_of_answers_think_time_counts() -> None:
    requests = AgentTraces().read(
        session(turn(0, 64, 1, [1], None), turn(7, 64, 1, [1], None, think_time=2.0), turn(9, 64, 1, [1], None))
    )
    assert order(requests) == [(None, 0.0), (0, 5.0), (1, 4.0)]


def test_blocks_are_of_the_session_or_of_all() -> None:
    traces = AgentTraces()
    own = [traces.read(session(turn(0, 128, 1, [1, 2])))[0].blocks for _ in range(2)]
    assert not {*own[0]} & {*own[1]}
    shared = [traces.read(session(turn(0, 128, 1, [1, 2]), hash_id_scope="global"))[0].blocks for _ in range(2)]
    assert shared[0] == shared[1]


def test_the_next_turn_begins_with_prompt_and_answer() -> None:
    first, second = AgentTraces().read(session(turn(0, 150, 100, [1, 2, 3]), turn(2, 300, 1, [1, 2, 7, 8, 9])))
    # Of 250 tokens three whole blocks are known: two of the prompt, and the one that ends in the answer.
    assert first.blocks == second.blocks[:3]
    assert ideal_hit_rate([first, second]) == pytest.approx(192 / 450)
    a, b = (request.tokens(1000) for request in (first, second))
    assert (a == b[:150]).all()
    assert len(a) == 150


def test_files_and_folders_are_read(tmp_path: Path) -> None:
    sessions = [session(turn(0, 100 + n, 5, [1, 2]), turn(2, 200, 5, [1, 3, 4, 5]), id=f"s{n}") for n in range(3)]
    for number, each in enumerate(sessions):
        (tmp_path / f"trace_{number}.json").write_text(json.dumps(each, indent=1))
    lines = tmp_path / "traces.jsonl"
    lines.write_text("".join(json.dumps(each) + "\n" for each in sessions))
    requests = read_workload(tmp_path)
    assert requests == read_workload(lines)
    assert [x.number for x in read_workload(tmp_path / "trace_1.json")] == [0, 1]
    assert sorted(Counter(request.session for request in requests).items()) == [("s0", 2), ("s1", 2), ("s2", 2)]
    assert len(read_workload(tmp_path, limit=3)) == 3
    check_arrivals(requests)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"requests": []}, "requests must have some"),
        ({"requests": {}}, "'requests' must be a list"),
        ({"requests": [3]}, "requests must be objects"),
        ({"requests": [{"in": 3, "out": 1}]}, "t must"),
        ({"requests": [turn(-1, 3, 1, [])]}, "t must"),
        ({"requests": [turn(0, 0, 1, [])]}, "in must"),
        ({"requests": [turn(0, 2, -1, [])]}, "out must"),
        ({"requests": [turn(0, 2, 1, [-3])]}, "hash_ids must"),
        ({"requests": [turn(0, 2, 1, 3)]}, "'hash_ids' must be a list"),  # type: ignore[arg-type]
        ({"requests": [turn(0, 2, 1, [], "x")]}, "api_time must"),  # type: ignore[arg-type]
        ({"requests": [{"type": "subagent", "t": 0}]}, "'requests' must be a list"),
        ({"block_size": 0}, "block_size must"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_field(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(session(turn(0, 2, 1, [])) | changes))
    with pytest.raises(ValueError, match=match) as caught:
        read_workload(path)
    assert str(path) in str(caught.value)
    lines = tmp_path / "trace.jsonl"
    lines.write_text(json.dumps(session(turn(0, 2, 1, []))) + "\n" + path.read_text())
    with pytest.raises(ValueError, match=rf"jsonl:2: {match}"):
        read_workload(lines)


def test_drawn_sessions_have_the_published_statistics() -> None:
    requests = make_agent_sessions(100, seed=1)
    turns = Counter(request.session for request in requests)
    assert len(turns) == 100
    assert statistics.median(turns.values()) == pytest.approx(43, rel=0.2)
    assert statistics.median(request.prompt_tokens for request in requests) == pytest.approx(142_000, rel=0.05)
    assert statistics.median(request.output_tokens for request in requests) == pytest.approx(444, rel=0.05)
    assert 0.96 < ideal_hit_rate(requests) < 0.98
    assert max(request.prompt_tokens for request in requests) <= 200_000
    check_arrivals(requests)
    assert requests == make_agent_sessions(100, seed=1)
    for request in requests[:300]:
        if request.after is not None:
            before = requests[request.after]
            assert before.session == request.session
            if request.prompt_tokens > before.length:  # not compacted
                whole = before.length // 64
                assert request.blocks[:whole] == before.blocks[:whole]


def test_the_ideal_is_of_whole_blocks_and_never_all() -> None:
    request = WorkloadRequest(0.0, 128, 1, (0, 1), 64)
    again = dataclasses.replace(request, number=1)
    longer = dataclasses.replace(request, number=2, prompt_tokens=129)
    assert ideal_hit_rate([request]) == 0
    assert ideal_hit_rate([request, again]) == 64 / 256
    assert ideal_hit_rate([request, again, longer]) == (64 + 128) / (256 + 129)


def test_the_benchmark_has_a_line_for_each_cluster() -> None:
    requests = [request for request in make_agent_sessions(4, seed=3) if request.number < 12]
    name = "1 prefill, 1 decode, 1 TB"
    record = simulate(requests, name)
    assert len(record.served) == 12
    cells = [cell.strip() for cell in row(name, requests, record).strip("|").split("|")]
    assert cells[:2] == [name, "12"]
    assert all(cell.endswith(" s") for cell in cells[2:6])
    # Pages of 512 tokens: an answer is computed again by the instance that reads the next prompt.
    assert 80 < float(cells[7].rstrip("%")) <= 100
