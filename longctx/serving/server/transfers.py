"""What a server asks of whatever moves requests and their pages between engines: a Protocol, as HTTP knows no engine.

The fields of `kv_transfer_params` are those that vLLM's routers and llm-d's sidecar carry from the answer of a prefill
to the request of its decode: docs/kv_transfer.md.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from longctx.serving.engine.thread import Received as Received
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Output
from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.kv_metrics import TransferCounts


class PagePrefix(BaseModel):
    """A server that has or reads the first tokens of a prompt.

    Attributes:
      url: of its HTTP.
      tokens: how many; None: all full pages before the prompt's last token.
      seconds: predicted until it has read them; None: nobody knows.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    url: Annotated[str, Field(max_length=2048)]
    tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    seconds: Annotated[float, Field(ge=0, le=1e6)] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return self.model_dump(exclude_none=True)


class Prefill(BaseModel):
    """Who reads the prompt of a request that another server sends.

    Attributes:
      url: of that server; None: this one.
      prefix: from where whoever reads it gets the first pages; None: it has or computes them.
      seconds: predicted until it has been read; None: nobody knows.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    url: Annotated[str, Field(max_length=2048)] | None = None
    prefix: PagePrefix | None = None
    seconds: Annotated[float, Field(ge=0, le=1e6)] | None = None


class TransferParams(BaseModel):
    """`kv_transfer_params` of a body. Fields that are not here are those of other engines.

    Attributes:
      remote_followers: `host:port` where the other processes of that engine send their parts of the pages.
      kv_dtype: of keys and values in the pages.
      prefix: from where the first pages of the prompt come.
      is_cached: nothing is to be computed: pages that are here are lent, and if they are not all here, none.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_followers: Annotated[list[Annotated[str, Field(max_length=300)]], Field(max_length=1023)] = []
    lease: str | None = None
    fingerprint: str | None = None
    kv_dtype: Annotated[str, Field(max_length=40)] | None = None
    handoff: dict[str, Any] | None = None
    prefix: PagePrefix | None = None
    is_cached: bool | None = None


@runtime_checkable
class Transfers(Protocol):
    """Moves requests. All methods may be called in the event loop: none waits."""

    def lease(self, wanted: str | None) -> str:
        """The id of a new lease: the one that a peer wants, if it may; else a random one."""
        ...

    def params(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """`kv_transfer_params` of the answer of a request with a lease, by whose outputs another engine goes on."""
        ...

    def receive(self, params: TransferParams, prepared: PreparedRequest) -> Received:
        """What was sent along with a request.

        Raises:
          ApiError: it is not for this engine, or can't be right, or the request would make others too slow here; its
            pages are given up.
        """
        ...

    def resume(
        self,
        params: TransferParams | None,
        prefill: Prefill | None,
        prepared: PreparedRequest,
        headers: Mapping[str, str],
    ) -> Received | None:
        """What a request that another server sends begins with; None: with nothing.

        Args:
          params: what has been computed of it; without leases, no pages come with it.
          prefill: who reads its prompt, where no pages come with it.
          headers: of the request; those that say who sends it go along.

        Raises:
          ApiError: as from `receive`, or nobody may be asked there.
        """
        ...

    def fetch_prefix(
        self, prefix: PagePrefix, prepared: PreparedRequest, headers: Mapping[str, str]
    ) -> Received | None:
        """Get the first pages of a prompt from a server that has them, and what its request waits for.

        None: they are here. ApiError: it may not be asked.
        """
        ...

    def lend(self, prepared: PreparedRequest) -> PreparedRequest:
        """A request that reads a prompt whose full pages are all here, before others of its urgency.

        Raises:
          ApiError: they are not: whoever wants them had better compute them.
        """
        ...

    def dispatch(self, prepared: PreparedRequest, headers: Mapping[str, str]) -> Received | None:
        """Have another server read the prompt of an ordinary request, and what it waits for; None: it is read here.

        Args:
          headers: of the request; those that say who sends it go along.
        """
        ...

    def check_peer(self, host: str) -> None:
        """ApiError, unless requests may be moved to this host."""
        ...

    def release(self, handoff: Handoff) -> None:
        """Nobody needs the pages any more that are kept for a request which has left."""
        ...

    @property
    def counts(self) -> Mapping[str, TransferCounts]:
        """Of transfers `"sent"` and `"received"`, for metrics."""
        ...

    @property
    def prefills(self) -> Mapping[str, Mapping[str, int]] | None:
        """Prompts by where they were read, for metrics; None: no other server reads any."""
        ...

    def info(self) -> dict[str, Any]:
        """What others have to know to fetch pages from here, for `/server_info`."""
        ...

    def close(self) -> None:
        """End all transfers."""
        ...
