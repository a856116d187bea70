"""Updates from which an engine's decisions follow besides results, the orders to plan steps, and their wire format.

All that apply the same updates in the same order decide the same: another process (`lockstep`), or a replay
(`recording`).
"""

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as List
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from longctx.serving.executor.submit_queue import EndedStep
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Event
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence


class Arrival(NamedTuple):
    """Request that the engine has accepted.

    Attributes:
      request: as it was submitted, or with its prompt as tokens.
      tokens: of the prompt, int32 `[T]`; None: `request.prompt`.
      request_id: that it got.
      now: its time of arrival.
      available: leading tokens of its prompt that could be loaded then.
      handoff: what another engine has computed of it, taken up at the time `resumed`.
    """

    request: Request
    request_id: str
    now: float
    available: int = 0
    handoff: Handoff | None = None
    resumed: float = 0.0
    tokens: np.ndarray | None = None


class Cancel(NamedTuple):
    """Request that the engine has cancelled at a time."""

    request_id: str
    now: float = 0.0


class Release(NamedTuple):
    """Lease that is no longer needed."""

    lease_id: str


class Pin(NamedTuple):
    """Pages that tiers keep for some seconds; 0: they may go."""

    keys: list[bytes]
    seconds: float


class Evict(NamedTuple):
    """Pages that leave a tier, `"device"` or `"host"`, unless a sequence uses them."""

    tier: str
    keys: list[bytes]


class Located(NamedTuple):
    """Place from which each process fetches its part of the pages of a lease, as the first one's transfers say.

    `place` is plain data; None: nowhere else, the first process has what it will get.
    """

    lease_id: str
    place: dict[str, Any] | None


RequestUpdate = Arrival | Cancel | Loaded | Release | Pin | Evict | Located


class StepOrder(NamedTuple):
    """Plan a step at time `now`, after these updates."""

    now: float
    seconds: float | None  # how long the last step that was waited for took; None: unknown
    updates: list[RequestUpdate]


class SettleOrder(NamedTuple):
    """End the last step and apply these updates now: no other step is in sight, but pages may be asked for."""

    now: float
    seconds: float | None
    updates: list[RequestUpdate]


class WarmUpOrder(NamedTuple):
    """Compile and run all programs."""


@runtime_checkable
class DecisionLog(Protocol):
    """Receives decisions as they are made."""

    def note_plan(self, batch: Batch) -> None:
        """A batch has been planned; there may be none or several in a step."""
        ...

    def note_draw(self, batch: Batch, tokens: List[int]) -> None:
        """The tokens sampled from a batch have come."""
        ...


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

    def note_clear(self) -> None:
        """The cache has forgotten what it held."""
        ...

    def note_failure(self, cause: str) -> None:
        """The engine has failed; nothing comes after it."""
        ...


# The prompt travels as bytes, sampling as a dictionary, and the id is the one that the engine has chosen.
_REQUEST_FIELDS = [x.name for x in dataclasses.fields(Request) if x.name not in ("prompt", "sampling", "request_id")]


def request_to_fields(request: Request) -> dict[str, Any]:
    """Encode a request as plain data, but for its prompt and its id."""
    fields = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    return fields | {"sampling": dataclasses.asdict(request.sampling)}


def request_from_fields(fields: dict[str, Any], tokens: bytes, request_id: str) -> Request:
    """Decode a request; its prompt is `tokens`, int32 `[T]`, little-endian.

    Raises:
      KeyError, TypeError, ValueError: they are no request's.
    """
    sampling = SamplingParams(**fields["sampling"])
    prompt: Any = np.frombuffer(tokens, "<i4")
    return Request(prompt, sampling, request_id, **{name: fields[name] for name in _REQUEST_FIELDS})


def encode_update(update: RequestUpdate) -> tuple[dict[str, Any], list[bytes]]:
    """Encode an update as plain data, and the bytes that travel beside it: the tokens of an arrival."""
    match update:
        case Arrival(request, request_id, now, available, handoff, resumed, tokens):
            fields = request_to_fields(request) | {"id": request_id, "now": now, "available": available}
            if handoff is not None:
                fields |= {"handoff": handoff.to_dict(), "resumed": resumed}
            return fields, [np.asarray(request.prompt if tokens is None else tokens).astype("<i4").tobytes()]
        case Cancel():
            return {"id": update.request_id}, []
        case Loaded():
            return {"loaded": update}, []
        case Release():
            return {"released": update.lease_id}, []
        case Pin():
            return {"pinned": [key.hex() for key in update.keys], "seconds": update.seconds}, []
        case Evict():
            return {"evicted": [key.hex() for key in update.keys], "tier": update.tier}, []
        case Located():
            return {"located": update.lease_id, "place": update.place}, []


def decode_update(fields: dict[str, Any], tokens: Iterator[bytes]) -> RequestUpdate:
    """Decode an update; an arrival takes the next of `tokens`."""
    match fields:
        case {"sampling": _, "id": request_id, "now": now, "available": available}:
            request = request_from_fields(fields, next(tokens), request_id)
            handoff = Handoff.from_dict(fields["handoff"]) if "handoff" in fields else None
            return Arrival(request, request_id, now, available, handoff, fields.get("resumed", 0.0))
        case {"loaded": loaded}:
            return Loaded(*loaded)
        case {"released": lease_id}:
            return Release(lease_id)
        case {"evicted": keys, "tier": tier}:
            return Evict(tier, [bytes.fromhex(key) for key in keys])
        case {"located": lease_id, "place": place}:
            return Located(lease_id, place)
        case {"pinned": keys, "seconds": seconds}:
            return Pin([bytes.fromhex(key) for key in keys], seconds)
    return Cancel(fields["id"])
