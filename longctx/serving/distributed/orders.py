"""Updates from which an engine's decisions follow besides results, the orders to plan steps, and their wire format.

All that apply the same updates in the same order decide the same: another process (`lockstep`), or a replay
(`recording`).
"""

from collections.abc import Sequence as List
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from longctx.serving.executor.submit_queue import EndedStep
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Event
from longctx.serving.request.request import Request
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence


class Update(msgspec.Struct, array_like=True, tag=True):
    """Base of updates."""


class Arrival(Update):
    """Request that the engine has accepted.

    Attributes:
      request: as it was submitted; to other processes it travels without its prompt.
      request_id: that it got.
      now: its time of arrival.
      tokens: of the prompt, int32 `[T]`.
      available: leading tokens of its prompt that could be loaded then.
      handoff: what another engine has computed of it, taken up at the time `resumed`.
    """

    request: Request
    request_id: str
    now: float
    tokens: np.ndarray
    available: int = 0
    handoff: Handoff | None = None
    resumed: float = 0.0


class Cancel(Update):
    """Request that the engine has cancelled at a time."""

    request_id: str
    now: float


class LoadEnd(Update):
    """Load that has ended in every process."""

    loaded: Loaded


class Release(Update):
    """Lease that is no longer needed."""

    lease_id: str


class Pin(Update):
    """Pages that tiers keep for some seconds; 0: they may go."""

    keys: list[bytes]
    seconds: float


class Evict(Update):
    """Pages that leave a tier, `"device"` or `"host"`, unless a sequence uses them."""

    tier: str
    keys: list[bytes]


class Located(Update):
    """Place from which each process fetches its part of the pages of a lease, as the first one's transfers say.

    `place` is plain data; None: nowhere else, the first process has what it will get.
    """

    lease_id: str
    place: dict[str, Any] | None


RequestUpdate = Arrival | Cancel | LoadEnd | Release | Pin | Evict | Located


class Order(msgspec.Struct, array_like=True, frozen=True):
    """Message of process 0 to the others.

    Attributes:
      kind: `"step"`: apply the updates and plan a step. `"settle"`: end the last step and apply the updates now, as no
        other step is in sight, but pages may be asked for. `"warm_up"`: compile and run all programs.
      now: time at which the step is planned.
      seconds: that the last step that was waited for took; None: unknown.
      updates: since the last order.
      digest: of the decisions so far, in some of the orders.
    """

    kind: Literal["step", "settle", "warm_up"]
    now: float = 0.0
    seconds: float | None = None
    updates: list[RequestUpdate] = []
    digest: bytes | None = None


_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda tokens: tokens.astype("<i4").tobytes())
_DECODER = msgspec.msgpack.Decoder(Order, dec_hook=lambda kind, data: np.frombuffer(data, "<i4"))


def encode_order(order: Order) -> bytes:
    """Encode an order."""
    return _ENCODER.encode(order)


def decode_order(data: bytes) -> Order:
    """Decode an order."""
    return _DECODER.decode(data)


@runtime_checkable
class DecisionLog(Protocol):
    """Receives decisions as they are made."""

    def note_plan(self, batch: Batch) -> None:
        """A batch has been planned; there may be none or several in a step."""
        ...

    def note_draw(self, batch: Batch, tokens: List[int]) -> None:
        """The tokens sampled from a batch have come. By default nothing is done."""
        return


@runtime_checkable
class Journal(DecisionLog, Protocol):
    """Receives an engine's updates and decisions in order, from one thread at a time, under the engine's lock.

    `Lockstep` sends them to other processes, `Recorder` writes them to a file.
    """

    def note(self, update: RequestUpdate, sequences: List[Sequence] = ()) -> None:
        """Something is about to happen; `sequences` are those of an arrival, which are not in the core yet."""
        ...

    def note_step(self, now: float) -> None:
        """A step is about to be planned."""
        ...

    def note_end(self, step: EndedStep | None, events: list[Event]) -> None:
        """The core has taken the results of the step's oldest batch, and made these events; None: none had begun."""
        ...

    def note_failure(self, cause: str) -> None:
        """The engine has failed; nothing comes after it."""
        ...
