"""One tenant keeps no other from its answer: in the queue, in the bodies that are read, in the processes that read."""

import asyncio
import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from served import NAME, Served, fake_engine, served

from longctx.serving.config import AdmissionLimits
from longctx.serving.server.preparer import LONG_BYTES, Bodies, FairSlots
from longctx.serving.server.settings import ServerSettings, read_keys

ALICE, BOB = "alice-has-this-key", "bob-has-another-one"
BODY = {"model": NAME, "prompt": "ABCD" * 5, "max_tokens": 4, "ignore_eos": True}
KEYS = read_keys([f"alice {ALICE}", f"bob {BOB}"], "api")
MIB = 2**20


def key(value: str) -> dict[str, str]:
    return {"authorization": f"Bearer {value}"}


def post(running: Served, who: str, body: dict[str, Any] = BODY, path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(running.url + path, json=body, headers=key(who), timeout=30)


def send(running: Served, who: str, body: bytes, length: int, path: str = "/tokenize") -> socket.socket:
    """Send the beginning of a body of a length, or all of it."""
    connection = socket.create_connection(("127.0.0.1", running.port), 10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {who}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
    return connection


def test_two_calls_of_a_thousand_prompts_leave_room_for_another_tenant() -> None:
    settings = ServerSettings(prepare_processes=0, api_keys=KEYS)
    with served(fake_engine(max_running=1), settings) as running, ThreadPoolExecutor(3) as pool:
        running.executor.go.clear()
        many = BODY | {"prompt": ["AB"] * 512, "max_tokens": 1}
        calls = [pool.submit(post, running, ALICE, many) for _ in range(2)]
        control = running.server.thread.control
        running.wait_until("the queue is full", lambda: control.num_waiting >= control.limits.max_waiting - 1)
        refused = post(running, ALICE, many)
        assert (refused.status_code, refused.headers["x-llm-d-request-dropped-reason"]) == (429, "queue")
        other = pool.submit(post, running, BOB)
        running.wait_until("the other tenant waits too", lambda: len(running.server.calls) == 3 or other.done())
        running.executor.go.set()
        assert other.result().status_code == 200
        assert [call.result().status_code for call in calls] == [200, 200]


@pytest.mark.parametrize("limits", [{"max_waiting": 4}, {"max_waiting_tokens": 80}])
def test_a_tenant_has_its_share_of_a_full_queue_and_no_more(limits: dict[str, int]) -> None:
    """Half of the limit where two tenants wait, whoever came first."""
    settings = ServerSettings(prepare_processes=0, api_keys=KEYS)
    with (
        served(fake_engine(max_running=1), settings, AdmissionLimits(**limits)) as running,
        ThreadPoolExecutor(8) as pool,
    ):
        running.executor.go.clear()
        control, answers = running.server.thread.control, []
        answers.append(pool.submit(post, running, ALICE))
        running.wait_until("one runs", lambda: running.server.engine.stats().running == 1)
        for number, who in enumerate([ALICE] * 4 + [BOB] * 2, 1):
            answers.append(pool.submit(post, running, who))
            running.wait_until("it waits", lambda count=number: control.num_waiting == count)
        assert [post(running, who).status_code for who in (ALICE, BOB)] == [429, 429]
        running.executor.go.set()
        assert [answer.result().status_code for answer in answers] == [200] * 7


def test_stalled_bodies_of_one_tenant_leave_room_for_another() -> None:
    settings = ServerSettings(prepare_processes=0, max_body_bytes=1000, api_keys=KEYS)
    with served(fake_engine(), settings) as running:
        stalled = [send(running, ALICE, b" " * 990, 1000) for _ in range(4)]
        body = BODY | {"user": "x" * 600}
        running.wait_until("there is no room", lambda: post(running, ALICE, body).status_code == 429)
        assert post(running, BOB, body).status_code == 200
        for connection in stalled:
            connection.close()
        running.wait_until("there is room", lambda: post(running, ALICE, body).status_code == 200)
        running.wait_until("nothing is held", lambda: not running.server.bodies.num_held)


@pytest.fixture
def stopped() -> Iterator[tuple[Served, int]]:
    """A server whose one process that reads long prompts is stopped, and its id."""
    before = {*multiprocessing.active_children()}
    settings = ServerSettings(prepare_processes=1, max_body_bytes=16 * MIB, api_keys=KEYS)
    with served(fake_engine(), settings) as running:
        assert post(running, BOB, {"prompt": "AB", "padding": "x" * LONG_BYTES}, "/tokenize").status_code == 200
        (child,) = {*multiprocessing.active_children()} - before
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        try:
            yield running, child.pid
        finally:
            if child.is_alive():  # otherwise nothing ends
                os.kill(child.pid, signal.SIGCONT)


def test_long_prompts_of_clients_that_have_left_delay_no_other(stopped: tuple[Served, int]) -> None:
    """The stopped process never answers: another tenant is answered, since what was abandoned is ended or not begun."""
    running, _ = stopped
    processes = running.server.preparer.processes
    large = json.dumps({"prompt": "AB", "padding": "x" * 8 * MIB}).encode()
    abandoned = [send(running, ALICE, large, len(large)) for _ in range(4)]
    running.wait_until("one is read, one is sent, two wait", lambda: processes.num_waiting == 2)
    for connection in abandoned:
        connection.close()
    answer = post(running, BOB, {"prompt": "AB", "padding": "x" * 34_000}, "/tokenize")
    assert (answer.status_code, answer.json()["count"]) == (200, 2)
    assert processes.num_waiting == 0
    running.wait_until("nothing is held", lambda: not running.server.bodies.num_held)


def test_tenants_take_turns_at_the_process(stopped: tuple[Served, int]) -> None:
    """One that waits behind five long prompts of another tenant is next after the one that is read and the one sent."""
    running, pid = stopped
    processes, order = running.server.preparer.processes, list[str]()

    def ask(who: str) -> None:
        assert post(running, who, {"prompt": "AB", "padding": "x" * MIB}, "/tokenize").status_code == 200
        order.append(who)

    with ThreadPoolExecutor(6) as pool:
        asked = []
        for number, who in enumerate([ALICE] * 5 + [BOB]):
            asked.append(pool.submit(ask, who))
            running.wait_until("it waits", lambda count=number: processes.num_waiting == max(0, count - 1))
        os.kill(pid, signal.SIGCONT)
        for each in asked:
            each.result()
    assert order.index(BOB) <= 3  # clients may hear of ends that are close in another order


def test_the_process_that_is_least_busy_is_next() -> None:
    async def check() -> None:
        slots = FairSlots(["first", "second"] * 2)
        taken = [await slots.take("alice"), await slots.take("alice")]
        slots.give("alice", taken[1])
        assert [*taken, await slots.take("alice")] == ["first", "second", "second"]

    asyncio.run(check())


def test_a_body_is_as_large_as_the_longest_sequence_needs() -> None:
    assert Bodies(ServerSettings(), 131_072).most == 3 * MIB
    assert Bodies(ServerSettings(max_body_bytes=5), 131_072).most == 5
    with served(fake_engine()) as running, running.http_client() as client:
        answer = client.post("/tokenize", json={"prompt": "1", "padding": "x" * 2 * MIB})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
