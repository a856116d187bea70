"""Parts of clusters for tests of the conductor: round costs, instances, requests."""

from math import inf
from typing import NamedTuple

import numpy as np

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig, Role
from longctx.cluster.conductor.instance import InstanceSpec
from longctx.cluster.conductor.request import ClusterRequest
from longctx.cluster.prefix_index.index import PrefixIndex

BLOCK = 100


class RoundCosts(NamedTuple):
    """A millisecond a token of a prompt; a step takes a millisecond, and one more for each decode and 10,000 tokens."""

    speed: float = 1.0
    step_tokens: int = 0  # of prompts that a step of decodes has room for

    def prefill_seconds(self, cached: int, prompt: int) -> float:
        return (prompt - cached) / 1000 / self.speed

    def decode_seconds(self, batch: int, tokens: int) -> float:
        return (1 + batch + tokens / 10_000) / 1000 / self.speed

    def inline_seconds(self, batch: int, tokens: int, cached: int, prompt: int) -> float:
        if prompt - cached > self.step_tokens:
            return inf
        return self.decode_seconds(batch, tokens) + self.prefill_seconds(cached, prompt)

    def transfer_bytes(self, tokens: int) -> float:
        return 1000.0 * tokens


def instance(name: str, role: Role = "prefill", **changes: object) -> InstanceSpec:
    """An instance that sends a token in 10 ms, a hundredth of what computing it takes."""
    fields = {"costs": RoundCosts(), "block_size": BLOCK, "decode_tokens": 1_000_000, "max_running": 64}
    return InstanceSpec(name, role, **fields | {"bandwidth": 100_000_000.0} | changes)  # type: ignore[arg-type]


def keys_of(*parts: tuple[int, int]) -> np.ndarray:
    """Keys of a prompt made of (document, blocks) one after another: chained, so each depends on all before."""
    keys, before = [], 7
    for document, blocks in parts:
        for i in range(blocks):
            before = hash((before, document, i)) & (2**64 - 1)
            keys.append(before)
    return np.array(keys, np.uint64)


def request(request_id: str, *parts: tuple[int, int], rest: int = 50, **fields: object) -> ClusterRequest:
    """A request of (document, blocks) and `rest` further tokens."""
    keys = keys_of(*parts)
    values = {"prompt_tokens": len(keys) * BLOCK + rest, "max_tokens": 100, "keys": keys} | fields
    return ClusterRequest(request_id, **values)  # type: ignore[arg-type]


def cluster(*specs: InstanceSpec, **settings: object) -> Conductor:
    """A conductor of instances over an empty index."""
    conductor = Conductor(ConductorConfig(**settings), PrefixIndex())  # type: ignore[arg-type]
    for spec in specs:
        conductor.join(spec, 0.0)
    return conductor
