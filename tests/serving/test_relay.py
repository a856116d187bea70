"""JAX's coordination service is reached through the group's own connections, and by nobody else."""

import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from process_threads import run_processes

from longctx.serving.distributed import ProcessGroup


def path_of(group: ProcessGroup) -> str:
    return group.watchdog.relay.address.removeprefix("unix:")


def echo(path: str, ready: threading.Event) -> None:
    """Answer two connections, of which each ends first."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        ready.set()
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                while data := connection.recv(1000):
                    connection.sendall(data[::-1])


@pytest.mark.parametrize("num_bytes", [1, 1000, 1_000_000])
def test_bytes_reach_the_service_and_return(num_bytes: int) -> None:
    """The service starts after its clients, which is why what they said has to wait."""
    sent = bytes(i % 251 for i in range(num_bytes))

    def run(group: ProcessGroup) -> Any:
        if group.is_first:
            ready = threading.Event()
            group.barrier("that all have sent")
            thread = threading.Thread(target=echo, args=(path_of(group), ready))
            thread.start()
            ready.wait()
            group.barrier("that all have received")
            thread.join()
            return True
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(path_of(group))
            sender = threading.Thread(target=client.sendall, args=(sent,))
            sender.start()
            group.barrier("that all have sent")
            received = b""
            while len(received) < len(sent):
                received += client.recv(1 << 16)
            sender.join()
        group.barrier("that all have received")
        return sorted(received) == sorted(sent)

    assert run_processes(3, run) == [True] * 3


def test_a_connection_ends_where_the_service_ends_it() -> None:
    def run(group: ProcessGroup) -> Any:
        if group.is_first:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path_of(group))
                listener.listen()
                listener.accept()[0].close()
            return group.gather("what came", None)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(path_of(group))
            client.sendall(b"hello")
            return group.gather("what came", client.recv(10).decode())

    assert run_processes(2, run) == [[None, ""]] * 2


def test_only_the_same_user_reaches_the_sockets_which_are_removed_at_the_end() -> None:
    def run(group: ProcessGroup) -> Any:
        folder = Path(path_of(group)).parent
        return folder, stat.S_IMODE(os.stat(folder).st_mode)

    for folder, mode in run_processes(2, run):
        assert mode == 0o700
        assert not folder.exists()
