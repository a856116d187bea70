"""Rendezvous of processes: who may join, what is refused, and the error that each process raises."""

import re
import time
from typing import Any

import pytest
from process_threads import free_port, in_threads, meet, run_processes

from longctx.serving.distributed import ProcessGroup, initialize, rendezvous
from longctx.serving.distributed.connections import PROCESS_0, ControlClient, ControlServer
from longctx.serving.distributed.environment import ClusterEnv
from longctx.serving.distributed.network import Network, derive_key, resolve
from longctx.serving.distributed.rendezvous import JoinRequest

SECRET = "0123456789abcdef" * 2


@pytest.fixture
def coordinator() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize("num_processes", [2, 3, 5])
def test_values_are_gathered_in_every_process(num_processes: int) -> None:
    def act(group: ProcessGroup) -> Any:
        assert group.num_processes == num_processes
        group.barrier("first")
        return group.is_first, group.gather("number", {"mine": group.process_id})

    numbers = [{"mine": i} for i in range(num_processes)]
    assert run_processes(num_processes, act) == [(i == 0, numbers) for i in range(num_processes)]


def test_a_group_of_one_process_gathers_its_own_value() -> None:
    with ProcessGroup.alone() as group:
        assert group.gather("number", 3) == [3]
        group.agree("number", {"a": 1})
        assert group.is_first


def test_every_process_raises_the_same_differences() -> None:
    def act(group: ProcessGroup) -> None:
        group.agree("sizes", {"same": [1, 2], "rows": 8 + (group.process_id == 2), "extra"[group.process_id :]: 1})

    for error in run_processes(3, act):
        assert isinstance(error, ValueError)
        assert re.search(
            "must have the same sizes.*rows: 8 in process 0, 9 in process 2.*tra: nothing in process 0", str(error)
        )


def test_different_barriers_are_an_error(no_exit: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    def act(group: ProcessGroup) -> None:
        group.barrier("here" if group.is_first else "there")

    error = run_processes(2, act, join=1.5)[0]
    assert isinstance(error, RuntimeError)
    assert "came to there, process 0 to here" in str(error)
    assert no_exit == [70]
    assert "process 1" in capsys.readouterr().err


def test_a_process_that_does_not_fit_is_refused_and_named(coordinator: str) -> None:
    first, second = in_threads([lambda: meet(coordinator, 2, 0, join=2), lambda: meet(coordinator, 3, 2)])
    assert isinstance(first, TimeoutError)
    assert isinstance(second, ValueError)
    assert all("process 2 (" in str(error) for error in (first, second))
    assert all("has a process_id that is not from 1 to 1" in str(error) for error in (first, second))


def test_a_refused_process_does_not_end_the_wait_for_the_right_one(coordinator: str) -> None:
    def late() -> int:
        with pytest.raises(ValueError, match="has a process_id that is not from 1 to 1"):
            meet(coordinator, 2, 7)
        return close_group(meet(coordinator, 2, 1))

    assert in_threads([lambda: close_group(meet(coordinator, 2, 0)), late]) == [0, 1]


def test_an_id_that_another_process_has_is_refused(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other() -> int:
        time.sleep(0.5)
        monkeypatch.setattr("platform.node", lambda: "elsewhere")
        with pytest.raises(
            ValueError, match=r"process 1 \(elsewhere\) has a process_id that another on .* has already"
        ):
            meet(coordinator, 3, 1)
        return close_group(meet(coordinator, 3, 2))

    acts = [lambda i=i: close_group(meet(coordinator, 3, i)) for i in (0, 1)]
    assert in_threads([*acts, other]) == [0, 1, 2]


def die_once_welcomed(coordinator: str) -> None:
    """Be process 1 until process 0 welcomes it."""
    network = Network("127.0.0.1", 5)
    control = ControlClient(network, derive_key(SECRET), resolve(coordinator), 1)
    answers: list[str] = []
    while "welcome" not in answers:
        control.send(PROCESS_0, "hello", JoinRequest(1, "alpha"))
        control.socket.poll(200)
        answers += [message.kind for message in control.receive()]
    network.close()


def test_a_process_that_dies_as_it_is_welcomed_is_noticed_at_once(
    coordinator: str, no_exit: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    in_threads([lambda: meet(coordinator, 2, 0, join=2, group_secret=SECRET), lambda: die_once_welcomed(coordinator)])
    assert no_exit == [70]
    assert "process 1 (alpha) is gone" in capsys.readouterr().err


def test_missing_processes_are_named(coordinator: str) -> None:
    errors = in_threads([lambda i=i: meet(coordinator, 4, i, join=1) for i in (0, 2)])
    assert all("process 1, 3 did not come within 1 s" in str(error) for error in errors)


def test_a_lost_last_word_is_repeated(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP drops what was sent if the connection is closed while the other end sends, so once is not enough."""
    send, lost = ControlServer.send, []

    def lossy(self: ControlServer, peer: bytes, kind: str, *rest: Any) -> bool:
        if kind == "refused" and not lost:
            lost.append(kind)
            return True
        return send(self, peer, kind, *rest)

    monkeypatch.setattr(ControlServer, "send", lossy)
    errors = in_threads([lambda i=i: meet(coordinator, 3, i, join=2) for i in (0, 2)])
    assert lost
    assert all("process 1 did not come within 2 s" in str(error) for error in errors)


@pytest.mark.parametrize("host", ["[::1]", "localhost"])
def test_coordinators_may_be_ipv6_addresses_or_names(host: str) -> None:
    coordinator = f"{host}:{free_port()}"
    first, second = in_threads([lambda i=i: close_group(meet(coordinator, 2, i)) for i in (0, 1)])
    assert (first, second) == (0, 1)


def close_group(group: ProcessGroup) -> int:
    group.close()
    return group.process_id


def test_process_0_may_start_last(coordinator: str) -> None:
    def late() -> int:
        time.sleep(1.5)
        return close_group(meet(coordinator, 2, 0))

    assert in_threads([late, lambda: close_group(meet(coordinator, 2, 1))]) == [0, 1]


def test_a_process_that_gave_up_may_join_again(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_RETRY_SECONDS", 0.2)

    def again() -> int:
        with pytest.raises(TimeoutError):
            meet(coordinator, 3, 1, join=-1.5)
        time.sleep(0.5)
        return close_group(meet(coordinator, 3, 1))

    def last() -> int:
        time.sleep(1.5)
        return close_group(meet(coordinator, 3, 2))

    assert in_threads([lambda: close_group(meet(coordinator, 3, 0)), again, last]) == [0, 1, 2]


def test_all_ports_are_in_the_given_range(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    low, bind, ports = free_port(), Network.bind, list[int]()
    monkeypatch.setattr(Network, "bind", lambda *arguments: (ports.append(bind(*arguments)), ports[-1])[1])

    def run(process: int) -> int:
        options = rendezvous.RendezvousOptions(5, 5, (low, low + 9))
        act = rendezvous.lead if process == 0 else rendezvous.join
        group, _ = act(ClusterEnv(coordinator, 2, process), options)
        return close_group(group)

    assert in_threads([lambda: run(0), lambda: run(1)]) == [0, 1]
    assert ports
    assert all(low <= port <= low + 9 for port in ports)


def test_a_coordinator_that_does_not_answer_times_out(coordinator: str) -> None:
    with pytest.raises(TimeoutError, match=f"coordinator {coordinator} did not answer within 0.5 s"):
        meet(coordinator, 2, 1, join=0.5)


def test_a_taken_coordinator_port_is_an_error(coordinator: str) -> None:
    first, second = in_threads([lambda: meet(coordinator, 2, 0, join=1)] * 2)
    assert {type(first), type(second)} == {TimeoutError, ValueError}
    assert "can't listen on 127.0.0.1:" in str(first) + str(second)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "coordinator must be host:port"),
        (("host:70000", 2, 0), "coordinator must be host:port"),
        ((7,), "coordinator must be host:port"),
        (("host:7",), "num_processes and process_id must be given"),
        (("host:7", 0, 0), "num_processes must be an integer of at least 1"),
        (("host:7", 2, 2), "process_id must be below num_processes=2, got 2"),
        (("host:7", 2, 1, 1.0), "failure_timeout must be finite and 2"),
        (("host:7", 2, 1, 30, 60, (9, 8)), "ports must be the first and the last"),
        (("host:7", 2, 1, 30, "long"), "join_timeout must be a number"),
        (("auto", 2), "num_processes and process_id must be None"),
        (("auto",), "found no Slurm"),
        (("no such host.invalid:7", 2, 1, 30, 0.5), "coordinator no such host.invalid:7: "),
    ],
)
def test_invalid_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        initialize(*arguments)


def test_a_slurm_environment_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    from longctx.serving.distributed.environment import detect

    environment = {"JOB_ID": "77", "STEP_NODELIST": "node[3-4]", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    cluster_env = detect()
    assert cluster_env.coordinator.startswith("node3:")
    assert cluster_env[1:] == (2, 1)
