"""What a server asks of whatever moves requests and their pages between engines: a Protocol, as HTTP knows no engine.

The fields of `kv_transfer_params` are those that vLLM's routers and llm-d's sidecar carry from the answer of a prefill
to the request of its decode: docs/kv_transfer.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from longctx.serving.engine.thread import Received as Received
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Output
from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.kv_metrics import TransferCounts


class TransferParams(BaseModel):
    """`kv_transfer_params` of a body. Fields that are not here are those of other engines."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    lease: str | None = None
    fingerprint: str | None = None
    handoff: dict[str, Any] | None = None


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
