"""What an engine's decisions follow from besides results: requests, cancels, and when each step is planned.

Whoever hears them in the same order decides the same: another process (`lockstep`), or a replay (`recording`).
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams


class Arrival(NamedTuple):
    """A request that the engine has accepted, the id that it got, and its time of arrival.

    `available`: leading tokens of its prompt that could be loaded then.
    """

    request: Request
    request_id: str
    now: float
    available: int = 0


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


RequestUpdate = Arrival | Cancel | Loaded | Release | Forget | Pin


class StepOrder(NamedTuple):
    """Plan a step at time `now`, after these updates."""

    now: float
    seconds: float | None  # how long the last step that was waited for took; None: unknown
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
