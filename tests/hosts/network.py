"""Several hosts on one machine: network namespaces, and the switch between them (`switch.py`)."""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from switch import Counts, Rules

NETWORK = "10.77.0.0/24"
_NAMES, _NETWORK = 0x04000000, 0x40000000  # CLONE_NEWUTS and CLONE_NEWNET of <sched.h>
_SET_INTERFACE, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000  # <linux/if_tun.h>
_SET_FLAGS, _SET_ADDRESS, _SET_MASK = 0x8914, 0x8916, 0x891C  # <linux/sockios.h>
_UP = 0x1 | 0x40  # IFF_UP and IFF_RUNNING
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. OSError: it fails."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _namespaces_of_this_thread() -> tuple[int, int]:
    names, network = (os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY) for kind in ("uts", "net"))
    return names, network


def _enter(namespaces: tuple[int, int]) -> None:
    for each in namespaces:
        _call("setns", each, 0)


def missing() -> str | None:
    """Return why this machine gives us no hosts; None: it does."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    try:
        Host(1).close()
    except OSError as error:
        if error.filename == "/dev/net/tun":
            return f"/dev/net/tun can't be opened: {error.strerror}"
        if error.errno == errno.EPERM:
            return "no right to make network namespaces: run as root, or with CAP_SYS_ADMIN and CAP_NET_ADMIN"
        return f"no network namespace can be made: {error}"
    return None


def processes_with(**variables: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the process id and the environment of each process that was started with these variables."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            text = (path / "environ").read_bytes().decode(errors="replace")
            found = dict(line.partition("=")[::2] for line in text.split("\0"))
            if variables.items() <= found.items():
                yield int(path.name), found


def end_all_with(**variables: str) -> None:
    """Kill each process that was started with these variables, and what they still start."""
    while left := [pid for pid, _ in processes_with(**variables)]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


class Host:
    """Namespaces of a network with loopback and one device, which are up, and of a name, which is the address.

    Gloo takes the host's name for an address at which others reach it.

    Args:
      number: the last part of its address.
    """

    def __init__(self, number: int) -> None:
        self.address = f"10.77.0.{number}"
        with ThreadPoolExecutor(1) as pool:  # a thread that has the namespaces first, and ends
            self._namespaces, self.device = pool.submit(self._make).result()

    def _make(self) -> tuple[tuple[int, int], int]:
        _call("unshare", _NAMES | _NETWORK)
        _call("sethostname", self.address.encode(), len(self.address))
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)  # it belongs to the network of the thread
        try:
            fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", b"eth0", _TUN | _NO_HEADER))
        except OSError:
            os.close(device)
            raise
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            for request, text in ((_SET_ADDRESS, self.address), (_SET_MASK, "255.255.255.0")):
                address = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))
                fcntl.ioctl(control, request, struct.pack("16s16s8x", b"eth0", address))
            for name in (b"lo", b"eth0"):
                fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH22x", name, _UP))
        return _namespaces_of_this_thread(), device

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Give this thread the host's network: sockets that it opens, threads and processes that it starts have it."""
        before = _namespaces_of_this_thread()
        _enter(self._namespaces)
        try:
            yield
        finally:
            _enter(before)
            for each in before:
                os.close(each)

    def close(self) -> None:
        """Remove the device, and the namespaces once no process is in them."""
        for each in (self.device, *self._namespaces):
            os.close(each)


class Network:
    """A context manager: hosts 10.77.0.1, 10.77.0.2 and so on, and a switch between them.

    Attributes:
      hosts: numbered from 0 in `Rules.blocked`.
    """

    def __init__(self, num_hosts: int) -> None:
        self._num_hosts = num_hosts

    def __enter__(self) -> Self:
        self.hosts = [Host(number) for number in range(1, self._num_hosts + 1)]
        devices = [host.device for host in self.hosts]
        command = [sys.executable, str(Path(__file__).with_name("switch.py")), *map(str, devices)]
        pipe = subprocess.PIPE
        self._switch = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=devices)
        self.set()
        return self

    def __exit__(self, *error: object) -> None:
        self._switch.communicate(timeout=10)
        for host in self.hosts:
            host.close()

    def set(self, rules: Rules | None = None) -> Counts:
        """Have the switch obey rules (none: no faults); returns what has passed until now."""
        stdin, stdout = self._switch.stdin, self._switch.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(asdict(rules or Rules())) + "\n")
        stdin.flush()
        return Counts(**json.loads(stdout.readline()))

    def without(self, host: int) -> Rules:
        """Return rules by which a host reaches no other one, and none reaches it."""
        others = [other for other in range(len(self.hosts)) if other != host]
        return Rules(blocked=[pair for other in others for pair in ((host, other), (other, host))])


class OnNetwork(ABC):
    """A context manager of programs on the hosts of a network; if they can't be started, nothing is left of them.

    Attributes:
      network: of the hosts.
    """

    def __init__(self, num_hosts: int) -> None:
        self.network = Network(num_hosts)

    def __enter__(self) -> Self:
        self.network.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None:
        """End the programs and the network."""

    @abstractmethod
    def _start(self) -> None:
        """Start the programs; the hosts are there."""
