"""`InstanceClient`: HTTP requests of the router to an instance, whose answers are checked."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from longctx.cluster.conductor.costs import PredictorCosts
from longctx.cluster.http_stream import Head, HttpStream
from longctx.models.validation import check_real
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.file import predictor_from_dict
from longctx.serving.server.auth import make_grant
from longctx.serving.server.relay import EventLine, LineSplitter, decode_events
from longctx.serving.server.tls import Tls

_LOOK, _JOIN = 2.0, 10.0  # seconds
_SILENCE = 60.0  # seconds; it says every few seconds that it lives
_MOST_SAID = 100_000  # bytes of an answer that is an error
_T = TypeVar("_T")
_SHOWN = 300  # characters of an answer that is an error
_LEAST_FACTOR, _MOST_FACTOR = 1e-6, 1e6  # of a correction


class ProtocolError(ValueError):
    """An answer of an instance that can't be: it is not to be trusted."""


class Refused(RuntimeError):
    """Refusal of a request by an instance: its status and its message.

    `retry_after`: seconds; None: it does not say.
    """

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"it answers {status}: {message}")
        self.status, self.message, self.retry_after = status, message, retry_after


class KvEventsInfo(msgspec.Struct):
    """Endpoints at which an instance publishes its KV events."""

    endpoint: str
    replay: str | None = None
    topic: str = ""
    is_encrypted: bool = False


class KvTransferInfo(msgspec.Struct):
    """`fingerprint`: of weights and form of pages. `kv_dtype`: of keys and values in them."""

    fingerprint: str
    kv_dtype: str


class TiersInfo(msgspec.Struct):
    """Bytes of pages beyond an instance's devices."""

    host_bytes: int


class EngineInfo(msgspec.Struct):
    """`tiers`: None: there are none."""

    tiers: TiersInfo | None = None


class ServerInfo(msgspec.Struct):
    """`/server_info` of an instance, as far as the router needs it.

    Attributes:
      time: seconds since 1970 by its clock.
      instance: another one whenever it is started.
      keys: a fingerprint of the secret of page keys; None: it shares no pages.
    """

    page_size: int
    max_running: int
    max_total_num_tokens: int
    kv_bytes_per_token: float
    max_model_len: int
    vocab_size: int
    token_budget: int
    plan: ParallelPlan
    time: float
    instance: str
    keys: str | None
    kv_transfer: KvTransferInfo
    engine: EngineInfo
    kv_events: KvEventsInfo | None = None

    @property
    def cache_blocks(self) -> tuple[int, int, int]:
        """Blocks that each tier has room for; 0 where only the instance itself evicts.

        Without tiers, what leaves the devices is gone, and the instance knows best when it needs room. Files on a disk
        are removed by itself alone.
        """
        tiers = self.engine.tiers
        if tiers is None:
            return 0, 0, 0
        page_bytes = self.kv_bytes_per_token * self.page_size
        return self.max_total_num_tokens // self.page_size, int(tiers.host_bytes / page_bytes), 0


class _Status(msgspec.Struct):
    status: str


class _Evicted(msgspec.Struct):
    evicted: int


class LoadInfo(msgspec.Struct):
    """`/load` of an instance.

    Attributes:
      problem: why it answers no requests.
      factors: by which its predictor is corrected, of prompts and of decodes.
      kept_streams: names of those that another router may ask for.
    """

    backlog_seconds: float
    decoding: int
    decode_tokens: int
    request_ids: list[str]
    token_usage: float = 0.0
    draining: bool = False
    problem: str | None = None
    factors: tuple[float, float] | None = None
    kept_streams: list[str] = []


class InstanceClient:
    """HTTP client of one instance. For the event loop.

    Args:
      url: of its HTTP.
      key: of an administrator of the instance; None: it needs none.
      tls: of the router.
    """

    def __init__(self, url: str, key: str | None, tls: Tls | None = None) -> None:
        self.url = url.rstrip("/")
        self._stream = HttpStream(self.url, _SILENCE, tls)
        self._key, self._headers = key, {} if key is None else {"authorization": f"Bearer {key}"}

    def grant(self, tenant: str) -> str | None:
        """Return what lets another instance read prompts of a tenant there; None: there are no keys."""
        return None if self._key is None else make_grant(self._key, tenant)

    async def info(self) -> ServerInfo:
        """Ask for `ServerInfo`. ProtocolError; httpx.HTTPError: it is not there."""
        return _decode(ServerInfo, await self._ask("GET", "/server_info", _JOIN))

    async def costs(self, info: ServerInfo) -> PredictorCosts:
        """Ask for its predictor, which it corrects while its steps run. ProtocolError, httpx.HTTPError."""
        content = await self._ask("GET", "/predictor", _JOIN)
        try:
            fields: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
            predictor = Corrected(predictor_from_dict(fields["predictor"]))
            costs = PredictorCosts(predictor, info.token_budget, info.kv_bytes_per_token, info.plan)
            costs = corrected(costs, (fields["prompt_factor"], fields["decode_factor"]))
            costs.decode_seconds(1, 1)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"its predictor can't be: {type(error).__name__}: {error}") from None
        return costs

    async def load(self) -> LoadInfo:
        """Ask for `LoadInfo`. ProtocolError; httpx.HTTPError: it is not there."""
        return _decode(LoadInfo, await self._ask("GET", "/load", _LOOK))

    async def follow_load(self, seconds: float, take: Callable[[LoadInfo], bool]) -> None:
        """Ask for `LoadInfo` whenever it changes, at most once in some seconds, until it says no more or `take` True.

        ProtocolError; httpx.HTTPError: it is not there, or says nothing for too long.
        """
        headers = self._headers | {"accept": "application/x-ndjson"}
        status, lines = 0, LineSplitter()

        def read(part: Head | bytes) -> bool:
            nonlocal status
            if isinstance(part, Head):
                status = part.status
                return False
            if status != 200:
                raise ProtocolError(f"it answers /load with status {status}: {_shown(part)}")
            return any(take(_decode(LoadInfo, line)) for line in lines.push(part))

        await self._stream.send("GET", f"/load?every={min(seconds, 1.0):g}", headers, b"", read, _LOOK)
        for line in lines.push(b"\n"):  # of one that answers once
            take(_decode(LoadInfo, line))

    async def ready(self) -> str | None:
        """Ask why it takes no requests now; None: it does. httpx.HTTPError: it is not there."""
        status, content = await self._stream.fetch("GET", "/ready", {}, _LOOK)
        if status == 200:
            return None
        try:
            return msgspec.json.decode(content, type=_Status).status[:_SHOWN]
        except (msgspec.DecodeError, ValueError):
            return f"it is not ready: {_shown(content)}"

    async def swap(self, keys: list[int], tier: str) -> int:
        """Have it evict blocks of a tier; returns how many it did. ProtocolError, httpx.HTTPError."""
        body = msgspec.json.encode({"keys": keys, "tier": tier})
        headers = self._headers | {"content-type": "application/json"}
        return _decode(_Evicted, await self._ask("POST", "/kv_swap", _JOIN, body, headers)).evicted

    async def resume(self, body: bytes, request_id: str, take: Callable[[list[EventLine]], bool]) -> None:
        """Have it go on with a request.

        Args:
          take: is called with no events once the instance has taken the request, then with those of each step; True:
            these were the last ones.

        Raises:
          Refused: it does not take it.
          ProtocolError: it answers what is none.
          httpx.HTTPError: its connection breaks.
        """
        headers = self._headers | {"content-type": "application/json", "x-request-id": request_id}
        head, lines, said = Head(0, {}), LineSplitter(), bytearray()

        def read(part: Head | bytes) -> bool:
            nonlocal head
            if isinstance(part, Head):
                head = part
                return head.status == 200 and take([])
            if head.status != 200:
                said.extend(part[: _MOST_SAID - len(said)])
                return False
            return any(take(_events(line)) for line in lines.push(part))  # none after the last one

        await self._stream.send("POST", "/resume", headers, body, read)
        if head.status != 200:
            raise _refused(head, bytes(said))

    def close(self) -> None:
        """Close connections that are idle."""
        self._stream.close()

    async def _ask(
        self, method: str, path: str, seconds: float, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> bytes:
        status, content = await self._stream.fetch(method, path, headers or self._headers, seconds, body)
        if status != 200:
            raise ProtocolError(f"it answers {path} with status {status}: {_shown(content)}")
        return content


def corrected(costs: PredictorCosts, factors: tuple[Any, Any]) -> PredictorCosts:
    """Return costs with other factors of prompts and of decodes; TypeError, ValueError: they can't be."""
    assert isinstance(costs.predictor, Corrected)
    predictor = Corrected(costs.predictor.predictor)
    predictor.prompt_factor = check_real("prompt_factor", factors[0], _LEAST_FACTOR, _MOST_FACTOR)
    predictor.decode_factor = check_real("decode_factor", factors[1], _LEAST_FACTOR, _MOST_FACTOR)
    return dataclasses.replace(costs, predictor=predictor)


def _shown(content: bytes) -> str:
    return content[: 4 * _SHOWN].decode("utf-8", "replace")[:_SHOWN]


def _decode(kind: type[_T], content: bytes) -> _T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"{kind.__name__} of it can't be: {error}") from None


def _events(line: bytes) -> list[EventLine]:
    try:
        return decode_events(line)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"its events are none: {error}") from None


def _refused(head: Head, said: bytes) -> Refused:
    text = said.decode("utf-8", "replace")
    try:
        message = str(msgspec.json.decode(text)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = text
    try:
        retry_after = float(head.headers["retry-after-ms"]) / 1000
    except (KeyError, ValueError):
        retry_after = None
    return Refused(head.status, message[:_SHOWN], retry_after)
