"""Records of a log, as MessagePack by msgspec.

A step's record takes some microseconds to write and some hundred bytes; as JSON it would take twice as many of both,
and keys of pages are bytes.

Decisions follow from lengths, from the keys of pages, from times and from where completions end. So these are all that
a replay of decisions reads. Tokens and sampling parameters are there for a replay on the model, and left out of a
private log.
"""

from typing import Any, NamedTuple

import msgspec

from longctx.serving.distributed.orders import request_from_fields
from longctx.serving.kv_cache.prefix import KEY_BYTES
from longctx.serving.request.request import Request

PartialPage = tuple[bytes, int, int]
"""A session's last page: its key, its number in the sequence, and how many of its tokens count."""

STOP, NOT_FINITE = 1, 2
"""Why a completion ended, other than by its length."""


class Content(msgspec.Struct, array_like=True, frozen=True):
    """Contents that a private log leaves out of an arrival: the prompt, int32 little-endian, and the request's fields.

    `seed`: of its first completion, also where the engine has drawn it.
    """

    tokens: bytes
    fields: dict[str, Any]
    seed: int


class Arrived(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A request has entered. `keys`: of the full pages of its prompt, joined; `partial_page`: found of its session."""

    request_id: str
    now: float
    num_prompt: int
    max_tokens: int
    num_completions: int
    priority: int
    tenant: str
    ttft_deadline: float | None
    tpot_target: float | None
    may_share: bool
    has_session: bool
    keys: bytes
    partial_page: PartialPage | None
    content: Content | None
    available: int = 0  # leading tokens that could be loaded
    lease: str | None = None
    shares_pages: bool = True


class Cancelled(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """A request has been cancelled, or ended for another engine (`lease`); `left` as in `Ended`."""

    request_id: str
    now: float
    left: tuple[PartialPage | None, ...]
    lease: str | None = None


class Ended(msgspec.Struct, array_like=True, frozen=True):
    """The results of a step's oldest batch, taken at `finished`.

    `ends`: which of its samples, by number, ended their completions, and why. `keys`: of the pages that generated
    tokens filled, in order, joined. `left`: last pages of sessions whose turns ended. `tokens`: int32 little-endian.
    """

    finished: float
    duration: float
    is_exact: bool
    num_sampled: int
    ends: tuple[tuple[int, int], ...]
    keys: bytes
    left: tuple[PartialPage | None, ...]
    tokens: bytes | None


class Step(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """A step was planned at time `now`; `digest` is of all plans until then."""

    now: float
    digest: bytes
    ended: Ended | None


class Cleared(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """The cache has forgotten what it held."""


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """The engine has failed, in the step that was planned at `now` if that isn't None."""

    cause: str
    now: float | None


class Closed(msgspec.Struct, array_like=True, frozen=True, tag=6):
    """The recorder was closed in order, or stopped: `reason` says why."""

    reason: str


class LoadEnded(msgspec.Struct, array_like=True, frozen=True, tag=8):
    """A load has ended, see `Loaded`."""

    name: str
    num_pages: int
    seconds: float


class Released(msgspec.Struct, array_like=True, frozen=True, tag=9):
    """A lease has ended."""

    lease_id: str


class Forgotten(msgspec.Struct, array_like=True, frozen=True, tag=10):
    """Pages are found no more, as they were wrong; `keys` joined."""

    keys: bytes


LeftChunk = tuple[int, int, int, bool, bool, tuple[int, ...], bool]


class LeftBatch(msgspec.Struct, array_like=True, frozen=True):
    """A batch in flight whose sequences have all ended.

    Its chunks are (slot, start, tokens, samples, decodes, ranks, sharded), its work as in `Work`.
    """

    index: int
    predicted: float
    work: tuple[int, int, int, tuple[tuple[int, int], ...], int, int, int, int, str, int, int]
    chunks: tuple[LeftChunk, ...]


class Snapshot(msgspec.Struct, array_like=True, frozen=True, tag=7):
    """State of an engine without requests, with which a file of a log begins; decisions are hashed anew from there on.

    `slots`: free ones, and resting ones with the steps from which they are free. `pages`: of each rank, as in
    `RankState`, int32 little-endian and keys joined. `factor`, `windows`, `chunker`: what was measured and planned
    before. `tenants`: what they were served.
    """

    now: float
    steps: int
    slots: tuple[list[int], list[tuple[int, int]]]
    pages: list[tuple[bytes, bytes, bytes]]
    factor: float
    windows: list[list[tuple[float, float]]]
    chunker: tuple[list[int], int]
    tenants: tuple[dict[str, float], float]
    in_flight: list[LeftBatch]
    load_seconds: float | None = None  # of a page, in the mean


Record = Snapshot | Arrived | Cancelled | Step | Cleared | Failed | Closed | LoadEnded | Released | Forgotten

encode = msgspec.msgpack.Encoder().encode
_DECODER = msgspec.msgpack.Decoder(Record)


def decode(payload: bytes) -> Record:
    """A record.

    Raises:
      ValueError: it is none.
    """
    try:
        record: Record = _DECODER.decode(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"a record is not as this version of longctx writes it: {error}") from None
    return record


def split_keys(joined: bytes) -> list[bytes]:
    """Keys that were joined."""
    return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]


class RecordedRequest(NamedTuple):
    """A request, and the tokens of each of its completions, as far as they came."""

    request: Request
    tokens: list[list[int]]


def request_of(content: Content, request_id: str) -> Request:
    """A recorded request, with the seed that it had.

    Raises:
      ValueError: it is none.
    """
    try:
        sampling = content.fields["sampling"] | {"seed": content.seed}
        return request_from_fields(content.fields | {"sampling": sampling}, content.tokens, request_id)
    except (KeyError, TypeError) as error:
        raise ValueError(f"request {request_id!r} is not as this version of longctx records it: {error}") from None
