"""What a stranger on the network can't do: end a run, read it, or take part in it."""

import contextlib
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from process_threads import free_port, in_threads, meet, run_processes

from longctx.serving.distributed import ProcessGroup, initialize
from longctx.serving.distributed.connections import ControlServer
from longctx.serving.distributed.environment import make_group_secret
from longctx.serving.distributed.network import Key, Network, derive_key, make_key

SECRET = make_group_secret()
KINDS = [zmq.SUB, zmq.PAIR, zmq.DEALER, zmq.ROUTER, zmq.REQ]


def knock(port: int, data: bytes) -> None:
    """Connect, send bytes, and close."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(data)


def speak(
    port: int,
    kind: int,
    key: Key | None = None,
    server: bytes = b"",
    seconds: float = 0.5,
    said: bytes = b'["failed", "I am process 1"]',
) -> list[bytes]:
    """Connect a ZeroMQ socket, say something, and return what comes within some time."""
    with zmq.Context() as context, context.socket(kind) as mine:
        mine.setsockopt(zmq.LINGER, 0)
        if key is not None:
            mine.curve_publickey, mine.curve_secretkey = key
            mine.curve_serverkey = server
        mine.connect(f"tcp://127.0.0.1:{port}")
        if kind == zmq.SUB:
            mine.subscribe(b"")
        else:
            mine.setsockopt(zmq.SNDTIMEO, 100)
            with contextlib.suppress(zmq.ZMQError):
                mine.send_multipart([said] if kind == zmq.DEALER else [b"", said])
        return mine.recv_multipart() if mine.poll(int(1000 * seconds)) else []


def undisturbed(act: Any, no_exit: list[int], caplog: pytest.LogCaptureFixture, secret: str | None = None) -> None:
    """Run a group while process 0 also calls `act` with each of its ports; afterwards the group still works."""

    def run(group: ProcessGroup) -> Any:
        group.barrier("that it has begun")
        if group.is_first:
            for port in group.ports:
                act(port)
                time.sleep(0.1)
            group.broadcast(b"step")
        else:
            assert group.receive() == b"step"
        return group.gather("number", group.process_id)

    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert run_processes(2, run, group_secret=secret) == [[0, 1]] * 2
    assert no_exit == []
    assert 1 <= len(caplog.records) <= 2 + time.monotonic() - began  # a line a second, however many there are
    assert "strangers" in caplog.text


def test_bytes_on_a_port_are_dropped(no_exit: list[int], caplog: pytest.LogCaptureFixture) -> None:
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\3\0NULL"
    texts = [b"", b"\xff", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40, greeting]
    undisturbed(lambda port: [knock(port, data) for data in texts * 5], no_exit, caplog)


def test_sockets_without_the_key_are_dropped(no_exit: list[int], caplog: pytest.LogCaptureFixture) -> None:
    def act(port: int) -> None:
        assert in_threads([lambda kind=kind: speak(port, kind) for kind in KINDS]) == [[]] * len(KINDS)

    undisturbed(act, no_exit, caplog)


def test_sockets_with_another_key_are_dropped(no_exit: list[int], caplog: pytest.LogCaptureFixture) -> None:
    wrong, group, everybody = derive_key(make_group_secret()), derive_key(SECRET), derive_key("")
    pairs = [(wrong, wrong.public), (everybody, everybody.public), (make_key(), group.public)]

    def act(port: int) -> None:
        acts = [lambda pair=pair: speak(port, zmq.DEALER, *pair) for pair in pairs]
        assert in_threads(acts) == [[]] * len(pairs)

    undisturbed(act, no_exit, caplog, SECRET)


def test_step_messages_are_for_processes_of_the_group_alone() -> None:
    """Even a process with the group's secret that is not in it does not have the key of the run."""

    def run(group: ProcessGroup) -> Any:
        group.barrier("that it has begun")
        if not group.is_first:
            return group.receive()
        key = derive_key(SECRET)
        acts = [lambda: speak(group.ports[1], zmq.SUB, key, key.public, 1.5), lambda: send_later(group)]
        return in_threads(acts)[0]

    assert run_processes(2, run, group_secret=SECRET) == [[], b"step"]


def send_later(group: ProcessGroup) -> None:
    time.sleep(0.7)
    group.broadcast(b"step")


def test_messages_without_pause_are_dropped(no_exit: list[int]) -> None:
    """Of a process with the secret that is not in the group. Process 0 takes messages faster than one process sends."""
    ended, many = threading.Event(), threading.Event()

    def flood(port: int, key: Key) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as mine:
            mine.setsockopt(zmq.LINGER, 0)
            mine.curve_publickey, mine.curve_secretkey = key
            mine.curve_serverkey = key.public
            mine.connect(f"tcp://127.0.0.1:{port}")
            sent = 0
            while not ended.is_set():
                with contextlib.suppress(zmq.Again):
                    mine.send(b'["x", 1]', zmq.NOBLOCK)
                    sent += 1
                if sent == 2000:
                    many.set()

    def run(group: ProcessGroup) -> Any:
        group.barrier("that it has begun")
        if group.is_first:
            thread = threading.Thread(target=flood, args=(group.ports[0], derive_key(SECRET)))
            thread.start()
            assert many.wait(30)
        try:
            return group.gather("number", group.process_id, 30)
        finally:
            ended.set()
            if group.is_first:
                thread.join()

    assert run_processes(2, run, group_secret=SECRET) == [[0, 1]] * 2
    assert no_exit == []


def test_a_peer_may_leave_while_its_messages_wait() -> None:
    """ZeroMQ aborts if a heartbeat is due on a broken connection whose messages it held back at a limit."""
    key, network = derive_key(SECRET), Network("127.0.0.1", failure_timeout=2.5)
    control = ControlServer(network, key, free_port())
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.SNDHWM, 0)
        peer.curve_publickey, peer.curve_secretkey = key
        peer.curve_serverkey = key.public
        peer.connect(f"tcp://{control.address}")
        for _ in range(20_000):
            peer.send(b'["x", 1]')
        assert control.socket.poll(10_000)
        time.sleep(0.1)
    time.sleep(1.2)  # heartbeats are due every 0.5 s
    assert [message.kind for message in control.receive()] == ["x"] * 100
    network.close()


def test_a_late_process_is_refused_and_disturbs_nobody(no_exit: list[int]) -> None:
    def run(group: ProcessGroup) -> Any:
        group.barrier("that it has begun")
        if group.is_first:
            with pytest.raises(ValueError, match="all processes have come already"):
                meet(f"127.0.0.1:{group.ports[0]}", 2, 1)
        return group.gather("number", group.process_id)

    assert run_processes(2, run) == [[0, 1]] * 2
    assert no_exit == []


def test_only_holders_of_the_secret_meet() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    secrets = [SECRET, None, make_group_secret()]
    acts = [
        lambda i=i, s=secret: meet(coordinator, 2, min(i, 1), join=1, group_secret=s)
        for i, secret in enumerate(secrets)
    ]
    errors = in_threads(acts)
    assert [type(error) for error in errors] == [TimeoutError] * 3
    assert "by this user without a group_secret" in str(errors[1])
    assert run_processes(2, lambda group: group.gather("id", group.process_id), group_secret=SECRET) == [[0, 1]] * 2


def test_processes_of_one_user_meet_by_a_secret_of_his_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a secret they did by a key that everybody has: a script joined, and got the key of the steps."""
    monkeypatch.delenv("LONGCTX_GROUP_SECRET", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    file = tmp_path / "mine/longctx/group-secret"
    assert run_processes(2, lambda group: group.gather("id", group.process_id)) == [[0, 1]] * 2
    own = file.read_text()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777, len(own)) == (0o600, 0o700, 64)
    coordinator = f"127.0.0.1:{free_port()}"
    everybody, port = derive_key(""), int(coordinator.rpartition(":")[2])

    def join_as_process_1() -> list[bytes]:
        time.sleep(0.3)
        return speak(port, zmq.DEALER, everybody, everybody.public, 1.0, b'["hello", [1, "script"]]')

    first, answers = in_threads([lambda: meet(coordinator, 2, 0, join=2), join_as_process_1])
    assert isinstance(first, TimeoutError)
    assert answers == [], "it is not told who waits there"
    assert run_processes(2, lambda group: group.gather("id", group.process_id)) == [[0, 1]] * 2
    assert file.read_text() == own


def test_a_secret_that_others_can_read_or_that_can_not_be_kept_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LONGCTX_GROUP_SECRET", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "longctx").mkdir()
    (tmp_path / "longctx/group-secret").write_text("0" * 64)
    (tmp_path / "longctx/group-secret").chmod(0o644)
    with pytest.raises(ValueError, match=r"can't keep one: .*others than its owner.*--group-secret-file FILE"):
        initialize("127.0.0.1:9", 2, 0, join_timeout=1)
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    with pytest.raises(ValueError, match=r"/proc/none/longctx/group-secret can't keep one: .*--group-secret-file FILE"):
        initialize("127.0.0.1:9", 2, 0, join_timeout=1)


def test_sockets_are_bound_to_the_address_of_the_coordinator() -> None:
    def run(group: ProcessGroup) -> Any:
        group.barrier("that it has begun")
        if not group.is_first:
            return []
        for port in group.ports:
            with pytest.raises(ConnectionRefusedError):
                knock(port, b"")
        return group.ports

    assert len(run_processes(2, run, host="127.0.0.2")[0]) == 2


@pytest.mark.parametrize("process", [0, 1])
def test_other_interfaces_need_a_secret(process: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGCTX_GROUP_SECRET", raising=False)
    with pytest.raises(ValueError, match=r"192\.0\.2\.1:9 can be reached from other machines.* group-secret > FILE`"):
        initialize("192.0.2.1:9", 2, process, join_timeout=1)
    monkeypatch.setenv("LONGCTX_GROUP_SECRET", SECRET)
    with pytest.raises((ValueError, TimeoutError), match=r"can't listen on 192|did not answer within"):
        initialize("192.0.2.1:9", 2, process, join_timeout=1)


@pytest.mark.parametrize(
    ("secret", "error"), [("short", "at least 32 characters, got 5"), (7, "must be text, got int")]
)
def test_secrets_that_can_be_guessed_are_refused(secret: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        initialize("127.0.0.1:9", 2, 0, group_secret=secret)
