"""Bytes per second of each way that pages go from one engine to another: `python -m benchmarks.transfer`.

Pages of Llama-3-8B's shape go from a process to this one over loopback, by ZeroMQ (plain, and with CURVE) and by
Mooncake's transfer engine over TCP; and within this process ("local"). The receiver copies blocks into one array, as
an engine places them on its devices. What bounds them: a plain copy of the same bytes in memory, measured in turns with
them in the same run; and a bare TCP connection over loopback that sends the same bytes.

Each process is pinned to a core of its own, where there are two.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from longctx.cluster.transfer.lease import LeaseGone
from longctx.cluster.transfer.local import LocalReceiver
from longctx.cluster.transfer.mooncake import MooncakePuller, MooncakeStaging, make_engine
from longctx.cluster.transfer.options import TransferOptions
from longctx.cluster.transfer.zmq_receiver import PageReceiver
from longctx.cluster.transfer.zmq_sender import PageSender
from longctx.serving.kv_cache.connector import PageBlock, assemble
from longctx.serving.kv_cache.leases import LeasedPages
from longctx.serving.kv_cache.page_layout import PageLayout

LAYOUT = PageLayout(num_layers=32, num_kv_heads=8, head_dim=128, page_size=64, dtype="bfloat16")
SECRET, LEASE = "0123456789abcdef" * 4, "0" * 32
OPTIONS = TransferOptions()
WAYS = ("local", "zmq", "zmq, CURVE", "mooncake, TCP")


class MemoryExporter:
    """An `Exporter` whose lease is an array, complete, which is never released."""

    def __init__(self, num_pages: int) -> None:
        self.pages = np.random.default_rng(0).integers(0, 2**16, (num_pages, *LAYOUT.shape)).astype(LAYOUT.bits)
        self.keys = keys_of(num_pages)

    def lease(self, lease_id: str) -> LeasedPages:
        if lease_id != LEASE:
            raise LeaseGone(lease_id)
        count = len(self.keys)
        return LeasedPages(None, self.keys, [*range(count)], count * LAYOUT.page_size, count * LAYOUT.page_size)

    def read(self, lease_id: str, first: int, stop: int, layers: tuple[int, int]) -> Any:
        return _Read([PageBlock(0, LAYOUT.whole, self.pages[first:stop])])

    def release(self, lease_id: str) -> None:
        pass


class _Read:
    def __init__(self, blocks: list[PageBlock]) -> None:
        self._blocks = blocks

    def result(self) -> list[PageBlock]:
        return self._blocks


def keys_of(num_pages: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(num_pages)]


def receive(source: Any, out: np.ndarray) -> None:
    """Fetch all pages into an array."""
    woken = threading.Event()
    fetch = source.fetch(keys_of(len(out)), woken.set)
    while not fetch.is_over:
        woken.wait(1.0)
        woken.clear()
        while blocks := fetch.take(1 << 40):
            assemble(blocks, out, LAYOUT.whole)
    assert fetch.num_pages == len(out), "pages did not come"
    fetch.close()


def serve(way: str, num_pages: int) -> None:
    """The sending process: prints where it is, and sends until its input ends."""
    exporter, staging = MemoryExporter(num_pages), None
    if way == "bare TCP":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            print(json.dumps(f"127.0.0.1:{listener.getsockname()[1]}"), flush=True)
            with listener.accept()[0] as connection:
                while connection.recv(1):
                    connection.sendall(memoryview(exporter.pages).cast("B"))
            return
    if way == "mooncake, TCP":
        staging = MooncakeStaging(make_engine("127.0.0.1"), "127.0.0.1", OPTIONS.max_blocks, OPTIONS.block_bytes)
    secret = SECRET if way == "zmq, CURVE" else None
    with PageSender(exporter, LAYOUT, secret=secret, options=OPTIONS, staging=staging) as sender:
        print(json.dumps(sender.address), flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def sender(way: str, num_pages: int) -> Iterator[str]:
    """A sending process, and its address."""
    command = [sys.executable, "-m", "benchmarks.transfer", "--serve", way, "--pages", str(num_pages)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def contender(way: str, num_pages: int, out: np.ndarray) -> Iterator[Callable[[], None]]:
    """What moves all pages once."""
    if way == "memory copy":
        source = np.random.default_rng(1).integers(0, 2**16, out.shape).astype(out.dtype)
        yield lambda: np.copyto(out, source)
    elif way == "local":
        local, exporter = LocalReceiver(LAYOUT, options=OPTIONS), MemoryExporter(num_pages)
        yield lambda: receive(local.source(exporter, LEASE, LAYOUT), out)
    elif way == "bare TCP":
        with sender(way, num_pages) as address:
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port))) as connection:
                yield lambda: _read_bare(connection, out)
    else:
        puller = MooncakePuller(make_engine("127.0.0.1"), OPTIONS.block_bytes) if way.startswith("mooncake") else None
        secret = SECRET if way == "zmq, CURVE" else None
        with (
            sender(way, num_pages) as address,
            PageReceiver(LAYOUT, secret=secret, options=OPTIONS, puller=puller) as receiver,
        ):
            yield lambda: receive(receiver.source(address, LEASE, release=False), out)


def _read_bare(connection: socket.socket, out: np.ndarray) -> None:
    view = memoryview(out).cast("B")
    connection.sendall(b"x")
    count = 0
    while count < len(view):
        count += connection.recv_into(view[count : count + (1 << 20)])


def pin(core: int) -> None:
    if (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {core})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        pin(1)
        serve(options.serve, options.pages)
        return
    pin(0)
    load = os.getloadavg()[0]
    out = np.zeros((options.pages, *LAYOUT.shape), LAYOUT.bits)
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        moves = {}
        for way in ("memory copy", "bare TCP", *WAYS):
            try:
                moves[way] = stack.enter_context(contender(way, options.pages, out))
            except ImportError as error:
                print(f"{way}: {error}")
        for round_number in range(options.rounds + 1):  # the first one warms up
            for way, move in moves.items():
                start = time.perf_counter()
                move()
                if round_number:
                    seconds.setdefault(way, []).append(time.perf_counter() - start)
    size, copy = out.nbytes / 1e9, statistics.median(seconds["memory copy"])
    print(f"{options.pages} pages, {size:.2f} GB, {os.cpu_count()} cores, load {load:.1f} before\n")
    print("| way | GB/s, median | best | worst | of a memory copy | of bare TCP |\n|---|---|---|---|---|---|")
    bare = statistics.median(seconds["bare TCP"])
    for way, times in seconds.items():
        median = statistics.median(times)
        figures = f"{size / median:.2f} | {size / min(times):.2f} | {size / max(times):.2f}"
        print(f"| {way} | {figures} | {copy / median:.2f} | {bare / median:.2f} |")


if __name__ == "__main__":
    main()
