"""What work costs on an instance, by the predictor that it sends."""

from typing import Any

from longctx.cluster.conductor.instance import Costs
from longctx.cluster.router.instance_client import ServerInfo


class _Plain:
    def __init__(self, info: ServerInfo) -> None:
        self._bytes = info.kv_bytes_per_token

    def prefill_seconds(self, cached: int, prompt: int) -> float:
        return 1e-4 * (prompt - cached)

    def decode_seconds(self, batch: int, tokens: int) -> float:
        return 1e-3

    def transfer_bytes(self, tokens: int) -> float:
        return self._bytes * tokens


def read_costs(predictor: Any, info: ServerInfo) -> Costs:
    return _Plain(info)
