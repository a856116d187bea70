"""What an engine's decisions follow from besides results: requests, cancels, and when each step is planned.

Whoever hears them in the same order decides the same: another process (`lockstep`), or a replay (`recording`).
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams


class Arrival(NamedTuple):
    """A request that the engine has accepted, the id that it got, and its time of arrival.

    `available`: leading tokens of its prompt that could be loaded then. `handoff`: what another engine has computed of
    it, which was taken up at the time `resumed`.
    """

    request: Request
    request_id: str
    now: float
    available: int = 0
    handoff: Handoff | None = None
    resumed: float = 0.0


class Cancel(NamedTuple):
    """A request that the engine has cancelled; or, with `lease`, ended for another engine, for which its pages are kept
    under this id, see `Request.lease`."""

    request_id: str
    lease: str | None = None


class Release(NamedTuple):
    """A lease that nobody needs any more."""

    lease_id: str


class Forget(NamedTuple):
    """Pages that are to be found no more: they were wrong."""

    keys: list[bytes]


class Pin(NamedTuple):
    """Pages that tiers keep for some seconds; 0: they may go."""

    keys: list[bytes]
    seconds: float


class Evict(NamedTuple):
    """Pages that leave a tier, `"device"` or `"host"`, if nobody uses them."""

    tier: str
    keys: list[bytes]


class Located(NamedTuple):
    """Where each process fetches its part of the pages of a lease, as the first one's transfers say it to the others'.

    `place` is plain data; None: nowhere else, the first process has what it will get.
    """

    lease_id: str
    place: dict[str, Any] | None


RequestUpdate = Arrival | Cancel | Loaded | Release | Forget | Pin | Evict | Located


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


# The prompt travels as bytes, sampling as a dictionary, and the id is the one that the engine has chosen.
_REQUEST_FIELDS = [x.name for x in dataclasses.fields(Request) if x.name not in ("prompt", "sampling", "request_id")]


def request_to_fields(request: Request) -> dict[str, Any]:
    """A request as plain data, but for its prompt and its id."""
    fields = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    return fields | {"sampling": dataclasses.asdict(request.sampling)}


def request_from_fields(fields: dict[str, Any], tokens: bytes, request_id: str) -> Request:
    """The request of such fields; its prompt is `tokens`, int32 `[T]`, little-endian.

    Raises:
      KeyError, TypeError, ValueError: they are no request's.
    """
    sampling = SamplingParams(**fields["sampling"])
    prompt: Any = np.frombuffer(tokens, "<i4")
    return Request(prompt, sampling, request_id, **{name: fields[name] for name in _REQUEST_FIELDS})
