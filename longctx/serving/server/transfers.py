"""Transfers of requests and their pages between engines, as HTTP routes use them: prefill and decode apart.

Source: Mooncake, section 3.

The fields of `kv_transfer_params` are those that vLLM's routers and llm-d's sidecar carry from the answer of a prefill
to the request of its decode: docs/kv_transfer.md.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from longctx.serving.engine.thread import Received as Received
from longctx.serving.request.output import Output
from longctx.serving.request.request import PreparedRequest
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.server.calls import ParsedCall
from longctx.serving.server.errors import ApiError
from longctx.serving.server.schemas import PagePrefix, Prefill, TransferParams


@runtime_checkable
class TransferCounts(Protocol):
    """Counts of the transfers of one direction since the start: how they ended, and how much they moved."""

    bytes: int
    blocks: int
    strangers: int

    @property
    def outcomes(self) -> Mapping[Any, int]:
        """Number of transfers that ended in each way."""
        ...


@runtime_checkable
class Transfers(Protocol):
    """Movement of requests between engines. All methods may be called in the event loop: none waits.

    They raise ApiError for a request that is not for this engine, can't be right, or may not do what it asks.
    """

    def lease(self, wanted: str | None) -> str:
        """Return the id of a new lease: the one that a peer wants, if it may; else a random one."""
        ...

    def params(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return `kv_transfer_params` of a request with a lease, by whose outputs another engine goes on."""
        ...

    def receive(self, params: TransferParams, prepared: PreparedRequest) -> Received:
        """Return what was sent along with a request."""
        ...

    def resume(
        self,
        params: TransferParams | None,
        prefill: Prefill | None,
        prepared: PreparedRequest,
        headers: Mapping[str, str],
    ) -> Received | None:
        """Return what a request of another server begins with, by `params` or by `prefill`; None: nothing."""
        ...

    def fetch_prefix(
        self, prefix: PagePrefix, prepared: PreparedRequest, headers: Mapping[str, str]
    ) -> Received | None:
        """Get the first pages of a prompt from a server that has them, and what its request waits for.

        None: they are here. ApiError: it may not be asked.
        """
        ...

    def lend(self, prepared: PreparedRequest) -> PreparedRequest:
        """Return a request that reads a prompt whose full pages are all here, before others of its urgency."""
        ...

    def draw_first(self, prepared: PreparedRequest, sampling: SamplingParams) -> PreparedRequest:
        """Return a request that draws its one token as another server wants it."""
        ...

    @property
    def counts(self) -> Mapping[str, TransferCounts]:
        """Counts of transfers `"sent"` and `"received"`, for metrics."""
        ...

    def info(self) -> dict[str, Any]:
        """Return what other servers need to fetch pages from here, for `/server_info`."""
        ...

    def close(self) -> None:
        """End all transfers."""
        ...


_NO_TRANSFERS = "this server moves no requests: engines do that are started with --role prefill, decode or both"


def begin_transfer(
    transfers: Transfers | None, call: ParsedCall, headers: Mapping[str, str], is_admin: bool
) -> tuple[ParsedCall, Received | None]:
    """Return a call as the engine gets it: with a lease if another engine decodes, and what it receives."""
    params = call.body.kv_transfer_params
    if params is None or not (params.do_remote_decode or params.do_remote_prefill or params.prefix):
        return call, None
    name = "kv_transfer_params"
    if transfers is None:
        raise ApiError(400, f"{name} can't be followed: {_NO_TRANSFERS}", name)
    if len(call.requests) != 1:
        raise ApiError(400, f"{name} needs one prompt, got {len(call.requests)}", name)
    prepared = call.requests[0]
    if (params.prefix is not None or params.is_cached or params.sampling is not None) and not is_admin:
        message = f"{name} with prefix, is_cached or sampling needs the key of an administrator"
        raise ApiError(403, message, name, "admin_key_needed")
    received = None
    if params.do_remote_prefill:
        received = transfers.receive(params, prepared)
    elif params.prefix is not None:
        received = transfers.fetch_prefix(params.prefix, prepared, headers)
    if params.do_remote_decode:
        if call.body.stream:
            raise ApiError(400, f"{name} with do_remote_decode needs stream: false: its answer has them too", name)
        prepared = transfers.lend(prepared) if params.is_cached else prepared
        request = dataclasses.replace(prepared.request, lease=transfers.lease(params.lease))
        prepared = prepared._replace(request=request)
        if params.sampling is not None:
            prepared = transfers.draw_first(prepared, params.sampling)
        call = call._replace(requests=[prepared])
    return call, received


def response_params(transfers: Transfers | None, call: ParsedCall, outputs: Mapping[tuple[int, int], Output]) -> Any:
    """Return `kv_transfer_params` of the answer of a call with a lease; None: it has none."""
    if transfers is None or call.requests[0].request.lease is None:
        return None
    return transfers.params([outputs[key] for key in sorted(outputs)])
