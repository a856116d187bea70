"""Pages over Mooncake: its transfer engine as a way of transfer, and its distributed store as a tier.

By the engine, receivers read blocks from registered memory of the sender, by TCP or RDMA. Headers and checksums go over
ZeroMQ all the same. The engine itself has neither encryption nor access control: any process that reaches its port can
read the memory that is registered, which holds staged blocks only. So it is for trusted networks.

Each engine gives a segment of its memory to the store; a master knows where values are and evicts them. The store has
neither encryption nor access control, either.

Source: Mooncake, section 3 (an RDMA messenger), and section 4 of its later versions (Mooncake Store); both are the
implementations that the authors published.
"""

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from longctx import extras
from longctx.cluster.transfer.messages import Place
from longctx.models.validation import check_integer

_LOG = logging.getLogger(__name__)
_WAIT_SECONDS = 0.1  # between two looks at whether a transfer was closed
_CLOSE_SECONDS = 5.0
_REACH_SECONDS = 3.0
_OPTIONS = {"segment_bytes": 1 << 30, "buffer_bytes": 64 << 20}
_TEXTS = {"protocol": "tcp", "devices": "", "ip": ""}
LIBRARIES = "Debian's libibverbs1, libnl-3-200 and libnl-route-3-200"


@contextlib.contextmanager
def mooncake_loaded(what: str) -> Iterator[None]:
    """Make imports of Mooncake within it say what `what` lacks: the extra, or libraries of the system."""
    try:
        with extras.needed("mooncake", what):
            yield
    except extras.MissingExtra:
        raise
    except ImportError as error:
        raise extras.MissingExtra(f"{what} needs {LIBRARIES}: {error}") from error


def make_engine(ip: str, protocol: str = "tcp", devices: str = "") -> Any:
    """Start Mooncake's transfer engine in this process.

    Args:
      ip: of this machine, for the other side.
      protocol: `"tcp"` or `"rdma"`. devices: RDMA devices with commas between them; empty: all.

    Raises:
      MissingExtra: it is not installed, or libraries of the system are missing.
      RuntimeError: it does not start.
    """
    with mooncake_loaded("Mooncake's transfer engine"):
        from mooncake.engine import TransferEngine
    engine = TransferEngine()
    if engine.initialize(ip, "P2PHANDSHAKE", protocol, devices) != 0:
        raise RuntimeError(f"Mooncake's transfer engine did not start on {ip} with {protocol} {devices}")
    return engine


class RegisteredSlots:
    """Memory that a transfer engine may read or write, in slots of equal size; released by `close`.

    Raises:
      RuntimeError: it can't be registered.
    """

    def __init__(self, engine: Any, num_slots: int, slot_bytes: int) -> None:
        check_integer("num_slots", num_slots, 1)
        check_integer("slot_bytes", slot_bytes, 1)
        self._engine = engine
        self._memory = np.zeros((num_slots, slot_bytes), np.uint8)
        self.address = self._memory.ctypes.data
        if engine.register_memory(self.address, self._memory.nbytes) != 0:
            raise RuntimeError(f"{self._memory.nbytes} bytes can't be registered with Mooncake's transfer engine")

    def slot(self, number: int, num_bytes: int) -> np.ndarray:
        """Return the first bytes of a slot."""
        return self._memory[number, :num_bytes]

    def address_of(self, number: int) -> int:
        return self.address + number * self._memory.shape[1]

    def close(self) -> None:
        self._engine.unregister_memory(self.address)


class MooncakeStaging:
    """Memory of a sender that receivers read blocks from, see `PageSender`.

    Args:
      engine: of `make_engine`. ip: where receivers reach it.
      num_slots, slot_bytes: of the memory; a slot holds a block.
    """

    def __init__(self, engine: Any, ip: str, num_slots: int, slot_bytes: int) -> None:
        self._slots = RegisteredSlots(engine, num_slots, slot_bytes)
        self._segment = f"{ip}:{engine.get_rpc_port()}"
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(num_slots):
            self._free.put(slot)
        self.num_slots, self.slot_bytes = num_slots, slot_bytes

    def put(self, data: np.ndarray, is_closed: Callable[[], bool]) -> Place | None:
        """Wait for a slot, and copy a block `[bytes]` uint8 there; None: closed."""
        if data.nbytes > self.slot_bytes:
            raise ValueError(f"a block of {data.nbytes} bytes does not fit a slot of {self.slot_bytes}")
        while True:
            try:
                slot = self._free.get(timeout=_WAIT_SECONDS)
                break
            except queue.Empty:
                if is_closed():
                    return None
        self._slots.slot(slot, data.nbytes)[:] = data
        return Place(self._segment, self._slots.address_of(slot), slot)

    def free(self, slot: int) -> None:
        """Let another block use a slot."""
        self._free.put(slot)

    @property
    def num_free(self) -> int:
        """Number of slots without a block."""
        return self._free.qsize()

    def close(self) -> None:
        """Release the memory, after the sender was closed."""
        self._slots.close()


class MooncakePuller:
    """Reader of blocks from senders' memory, one after the other in a thread of its own; see `PageReceiver`.

    Args:
      engine: of `make_engine`. block_bytes: the most that a block has.
    """

    def __init__(self, engine: Any, block_bytes: int) -> None:
        self._engine = engine
        self._slots = RegisteredSlots(engine, 1, block_bytes)
        self._block_bytes = block_bytes
        self._jobs: queue.SimpleQueue[tuple[Place, int, Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="longctx mooncake reads", daemon=True)
        self._thread.start()

    def pull(self, place: Place, num_bytes: int, done: Callable[[Any], None]) -> None:
        self._jobs.put((place, num_bytes, done))

    def close(self) -> None:
        """End the thread; a read that is not answered is not waited for long."""
        self._jobs.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._slots.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            place, num_bytes, done = job
            done(self._read(place, num_bytes))

    def _read(self, place: Place, num_bytes: int) -> bytes | None:
        if num_bytes > self._block_bytes or not 0 <= place.address < 2**64:
            return None
        try:
            failed = self._engine.transfer_sync_read(place.segment, self._slots.address, place.address, num_bytes)
        except Exception:
            _LOG.exception("longctx: Mooncake's transfer engine failed")
            return None
        return None if failed else self._slots.slot(0, num_bytes).tobytes()


class MooncakeStore:
    """A `RemoteStore` behind `MooncakeDistributedStore`. Several threads may wait for it.

    Args:
      store: that was set up.
      buffer_bytes: of its local buffer, which what is read at a time has to fit.
    """

    def __init__(self, store: Any, buffer_bytes: int) -> None:
        self._store, self._buffer_bytes = store, buffer_bytes
        self._reading = threading.Lock()  # of the buffer

    def exists(self, names: Sequence[bytes]) -> int:
        """Count leading names that it has."""
        found = self._store.batch_is_exist([name.hex() for name in names])
        return next((i for i, there in enumerate(found) if there != 1), len(names))

    def get(self, names: Sequence[bytes], out: np.ndarray) -> int:
        """Fill rows of `out` `[names, bytes]` uint8 with the values of leading names; returns how many."""
        count, group = 0, max(1, self._buffer_bytes // 2 // out.shape[1])
        while count < len(names):
            some = [name.hex() for name in names[count : count + group]]
            with self._reading:
                values = self._store.get_batch(some)
            for value in values:
                if len(value) != out.shape[1]:  # it is not there: the value is empty
                    return count
                out[count] = np.frombuffer(value, np.uint8)
                count += 1
        return count

    def put(self, name: bytes, value: bytes) -> bool:
        """Keep a value; returns whether it was kept."""
        return bool(self._store.put(name.hex(), value) == 0)


def open_store(url: str) -> MooncakeStore:
    """Open the store of a master, `mooncake://HOST:PORT`.

    Args:
      url: may end with options, as in `?segment_bytes=8589934592&protocol=rdma`: the bytes of memory that this
        process gives to the store (1 GiB) and those of its buffer (64 MiB), the protocol and its devices, and this
        machine's ip.

    Raises:
      MissingExtra: Mooncake is not installed, or libraries of the system are missing.
      ValueError: the URL is none, or there is no master.
    """
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None:
        raise ValueError(f"store must be mooncake://HOST:PORT, got {url!r}")
    texts, numbers = _read_options(url, parts.query)
    extras.check("mooncake", f"store {url}")
    try:  # its own client waits for a master for ever
        with socket.create_connection((host, port), _REACH_SECONDS) as reached:
            own_ip = reached.getsockname()[0]
    except OSError as error:
        raise ValueError(f"store {url} can't be reached: {error}") from None
    with mooncake_loaded("Mooncake's store"):
        from mooncake.store import MooncakeDistributedStore
    store = MooncakeDistributedStore()
    failed = store.setup(
        texts["ip"] or own_ip,
        "P2PHANDSHAKE",
        numbers["segment_bytes"],
        numbers["buffer_bytes"],
        texts["protocol"],
        texts["devices"],
        f"{host}:{port}",
    )
    if failed:
        raise ValueError(f"store {url} can't be set up: Mooncake's error {failed}")
    return MooncakeStore(store, numbers["buffer_bytes"])


def _read_options(url: str, query: str) -> tuple[dict[str, str], dict[str, int]]:
    texts, numbers = dict(_TEXTS), dict(_OPTIONS)
    for name, value in parse_qsl(query):
        if name in texts:
            texts[name] = value
        elif name in numbers and value.isdecimal():
            numbers[name] = int(value)
        else:
            raise ValueError(f"store {url} has no such option: {name}={value}")
    return texts, numbers
