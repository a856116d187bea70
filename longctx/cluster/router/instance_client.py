"""`InstanceClient`: HTTP requests of the router to an instance, whose answers are checked."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import httpx
import msgspec

from longctx.cluster.conductor.costs import PredictorCosts
from longctx.cluster.router.http_stream import Head, HttpStream
from longctx.models.validation import check_real
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.file import predictor_from_dict
from longctx.serving.server.auth import make_grant
from longctx.serving.server.relay import EventLine, decode_events, split_lines
from longctx.serving.server.tls import Tls

_LOOK = httpx.Timeout(2.0)
_JOIN = httpx.Timeout(10.0)
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
    """`/load` of an instance."""

    backlog_seconds: float
    decoding: int
    decode_tokens: int
    request_ids: list[str]
    token_usage: float = 0.0
    draining: bool = False


class InstanceClient:
    """HTTP client of one instance. For the event loop.

    Args:
      url: of its HTTP.
      key: of an administrator of the instance; None: it needs none.
      tls: of the router, as `http` has it.
    """

    def __init__(self, http: httpx.AsyncClient, url: str, key: str | None, tls: Tls | None = None) -> None:
        self._http, self.url = http, url.rstrip("/")
        self._stream = HttpStream(self.url, _SILENCE, tls)
        self._key, self._headers = key, {} if key is None else {"authorization": f"Bearer {key}"}

    def grant(self, tenant: str) -> str | None:
        """Return what lets another instance read prompts of a tenant there; None: there are no keys."""
        return None if self._key is None else make_grant(self._key, tenant)

    async def info(self) -> ServerInfo:
        """Ask for `ServerInfo`. ProtocolError; httpx.HTTPError: it is not there."""
        return _decode(ServerInfo, await self._get("/server_info", _JOIN))

    async def costs(self, info: ServerInfo) -> PredictorCosts:
        """Ask for its predictor, which it corrects while its steps run. ProtocolError, httpx.HTTPError."""
        content = await self._get("/predictor", _JOIN)
        try:
            fields: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
            predictor = Corrected(predictor_from_dict(fields["predictor"]))
            predictor.prompt_factor = check_real("prompt_factor", fields["prompt_factor"], _LEAST_FACTOR, _MOST_FACTOR)
            predictor.decode_factor = check_real("decode_factor", fields["decode_factor"], _LEAST_FACTOR, _MOST_FACTOR)
            costs = PredictorCosts(predictor, info.token_budget, info.kv_bytes_per_token, info.plan)
            costs.decode_seconds(1, 1)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"its predictor can't be: {type(error).__name__}: {error}") from None
        return costs

    async def load(self) -> LoadInfo:
        """Ask for `LoadInfo`. ProtocolError; httpx.HTTPError: it is not there."""
        return _decode(LoadInfo, await self._get("/load", _LOOK))

    async def ready(self) -> str | None:
        """Ask why it takes no requests now; None: it does. httpx.HTTPError: it is not there."""
        answer = await self._http.get(f"{self.url}/ready", timeout=_LOOK)
        if answer.status_code == 200:
            return None
        try:
            return msgspec.json.decode(answer.content, type=_Status).status[:_SHOWN]
        except (msgspec.DecodeError, ValueError):
            return f"it is not ready: {answer.text[:_SHOWN]}"

    async def swap(self, keys: list[int], tier: str) -> int:
        """Have it evict blocks of a tier; returns how many it did. ProtocolError, httpx.HTTPError."""
        body = msgspec.json.encode({"keys": keys, "tier": tier})
        headers = self._headers | {"content-type": "application/json"}
        answer = await self._http.post(f"{self.url}/kv_swap", content=body, headers=headers, timeout=_JOIN)
        if answer.status_code != 200:
            raise ProtocolError(f"it answers /kv_swap with status {answer.status_code}: {answer.text[:_SHOWN]}")
        return _decode(_Evicted, answer.content).evicted

    async def resume(self, body: bytes, request_id: str) -> AsyncGenerator[list[EventLine]]:
        """Have it go on with a request: yields no events once it has taken the request, then those of each step.

        Raises:
          Refused: it does not take it.
          ProtocolError: it answers what is none.
          httpx.HTTPError: its connection breaks.
        """
        headers = self._headers | {"content-type": "application/json", "x-request-id": request_id}
        parts = self._stream.post("/resume", headers, body)
        async with contextlib.aclosing(parts):
            head = await anext(parts)
            assert isinstance(head, Head)
            if head.status != 200:
                raise await _refused(head, parts)
            yield []
            async for line in split_lines(_bytes_of(parts)):
                try:
                    yield decode_events(line)
                except (msgspec.DecodeError, ValueError) as error:
                    raise ProtocolError(f"its events are none: {error}") from None

    def close(self) -> None:
        """Close connections that are idle."""
        self._stream.close()

    async def _get(self, path: str, timeout: httpx.Timeout) -> bytes:
        answer = await self._http.get(self.url + path, headers=self._headers, timeout=timeout)
        if answer.status_code != 200:
            raise ProtocolError(f"it answers {path} with status {answer.status_code}: {answer.text[:_SHOWN]}")
        return answer.content


def _decode(kind: type[_T], content: bytes) -> _T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"{kind.__name__} of it can't be: {error}") from None


async def _bytes_of(parts: AsyncGenerator[Head | bytes]) -> AsyncGenerator[bytes]:
    async for part in parts:
        assert isinstance(part, bytes)
        yield part


async def _refused(head: Head, parts: AsyncGenerator[Head | bytes]) -> Refused:
    said = bytearray()
    async for part in _bytes_of(parts):
        said += part[: _MOST_SAID - len(said)]
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
