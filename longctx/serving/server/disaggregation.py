"""Prefill and decode apart: what `kv_transfer_params` of a call ask for.

Source: Mooncake, section 3; the fields are those of vLLM's routers and llm-d's sidecar.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from longctx.serving.request.output import Output
from longctx.serving.server.errors import ApiError
from longctx.serving.server.read_call import Call
from longctx.serving.server.transfers import Received, Transfers

_NO_TRANSFERS = "this server moves no requests: engines do that are started with --role prefill, decode or both"


def begin_transfer(
    transfers: Transfers | None, call: Call, headers: Mapping[str, str], is_admin: bool
) -> tuple[Call, Received | None]:
    """A call as the engine gets it: with a lease if another engine decodes, and with what another one computes for it.

    Args:
      headers: of the request.
      is_admin: whether an administrator sends it: others name no server that is to be asked for a prefix.

    Raises:
      ApiError: that can't be.
    """
    params = call.body.kv_transfer_params
    if params is None or not (params.do_remote_decode or params.do_remote_prefill or params.prefix):
        return call, None if transfers is None else _dispatch(transfers, call, headers)
    name = "kv_transfer_params"
    if transfers is None:
        raise ApiError(400, f"{name} can't be followed: {_NO_TRANSFERS}", name)
    if len(call.requests) != 1:
        raise ApiError(400, f"{name} needs one prompt, got {len(call.requests)}", name)
    prepared = call.requests[0]
    if (params.prefix is not None or params.is_cached) and not is_admin:
        message = f"{name} with prefix or is_cached needs the key of an administrator"
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
        call = call._replace(requests=[prepared._replace(request=request)])
    return call, received


def _dispatch(transfers: Transfers, call: Call, headers: Mapping[str, str]) -> Received | None:
    """Let another server read the prompt, if that is better."""
    return transfers.dispatch(call.requests[0], headers) if len(call.requests) == 1 else None


def answer_params(transfers: Transfers | None, call: Call, outputs: Mapping[tuple[int, int], Output]) -> Any:
    """`kv_transfer_params` of the answer of a call with a lease; None: it has none."""
    if transfers is None or call.requests[0].request.lease is None:
        return None
    return transfers.params([outputs[key] for key in sorted(outputs)])
