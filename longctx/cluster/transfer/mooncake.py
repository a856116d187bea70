"""Pages over Mooncake's transfer engine: receivers read blocks from registered memory of the sender, by TCP or RDMA.

Headers and checksums go over ZeroMQ all the same. The engine itself has neither encryption nor access control: any
process that reaches its port can read the memory that is registered, which holds staged blocks only. So it is for
trusted networks.

Source: Mooncake, section 3 (an RDMA messenger); its transfer engine is the one that the authors published.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from longctx import extras
from longctx.cluster.transfer.messages import Place
from longctx.serving.validation import check_integer

_LOG = logging.getLogger(__name__)
_WAIT_SECONDS = 0.1  # between two looks at whether a transfer was closed
_CLOSE_SECONDS = 5.0
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
        self._changed = threading.Condition()
        self._free = list(range(num_slots))
        self.num_slots, self.slot_bytes = num_slots, slot_bytes

    def put(self, data: np.ndarray, is_closed: Callable[[], bool]) -> Place | None:
        """Wait for a slot, and copy a block `[bytes]` uint8 there; None: closed."""
        if data.nbytes > self.slot_bytes:
            raise ValueError(f"a block of {data.nbytes} bytes does not fit a slot of {self.slot_bytes}")
        with self._changed:
            while not self._free:
                if is_closed():
                    return None
                self._changed.wait(_WAIT_SECONDS)
            slot = self._free.pop()
        self._slots.slot(slot, data.nbytes)[:] = data
        return Place(self._segment, self._slots.address_of(slot), slot)

    def free(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    @property
    def num_free(self) -> int:
        return len(self._free)

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
