"""How much memory an engine needs on its devices, estimated before it is allocated, and how much there is."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from longctx.models import Llama
from longctx.models.footprint import cache_bytes
from longctx.models.sharded_params import abstract_sharded_params
from longctx.serving.config import EngineConfig
from longctx.serving.request.sampling_params import MAX_LOGIT_BIAS
from longctx.serving.runner.paged_cache import default_num_pages

LOWER = {
    "params": "give plan a larger stage or tensor, or the parameters a smaller dtype",
    "pages": "lower num_pages or page_size; about {fit:,} pages fit",
    "steps": "lower max_running or token_budget",
}
"""What to do where parameters, pages or steps are what takes most."""


class MemoryEstimate(NamedTuple):
    """Bytes of the parameters, of the cache's pages, and of what a step computes with and keeps for each slot.

    They are of one accelerator; of CPU devices, which share the host's memory, of all of this process's together. A CPU
    holds parameters twice while an engine is made, as loaded and as `shard_params` arranges them.
    """

    params: int
    pages: int
    steps: int
    page: int  # one page

    def check(self, device: jax.Device, lower: Mapping[str, str] = LOWER) -> int | None:
        """Check that it fits; the bytes that there are, None where they are unknown.

        Args:
          lower: what to do where parameters, pages or steps take most; `{fit}` is how many pages fit.

        Raises:
          ValueError: it doesn't; the message has the numbers and what to do.
        """
        limit = available_bytes(device)
        if limit is None or self.total <= limit:
            return limit
        largest = max(lower, key=lambda name: getattr(self, name))
        fit = max(0, limit - self.params - self.steps) // self.page
        where = "the host" if device.platform == "cpu" else str(device)
        raise ValueError(
            f"{in_units(self.total)} of memory are needed ({self}), and {where} has {in_units(limit)}: "
            + lower[largest].format(fit=fit)
        )

    @property
    def total(self) -> int:
        return self.params + self.pages + self.steps

    def __str__(self) -> str:
        parts = ((self.params, "parameters"), (self.pages, "pages"), (self.steps, "steps"))
        return ", ".join(f"{name} {in_units(count)}" for count, name in parts)


def estimate(
    model: Llama,
    config: EngineConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    num_pages: int,
    max_length: int,
    is_loaded: bool = False,
) -> MemoryEstimate:
    """Estimate what an engine needs: its pages exactly, its steps roughly.

    Args:
      num_pages: of each context rank.
      max_length: tokens of the longest sequence.
      is_loaded: whether the parameters are loaded already; what a CPU's host has available excludes them then.
    """
    page = page_bytes(model, config, mesh, dtype)
    params, steps = param_bytes(model, mesh, dtype), _step_bytes(model, config, mesh, max_length)
    devices = mesh.local_devices
    if devices[0].platform == "cpu":
        page, params, steps = (x * len(devices) for x in (page, params, steps))
        is_copied = np.dtype(dtype).itemsize <= 4 and model.config.quantization is None
        params *= (2 if is_copied else 1) - is_loaded
    return MemoryEstimate(params, num_pages * page, steps, page)


def default_pages(
    model: Llama, config: EngineConfig, mesh: Mesh, dtype: DTypeLike, max_length: int, reserved_bytes: int
) -> int:
    """Pages on each context rank: as many as all that may run could ever need, if there is room.

    Args:
      reserved_bytes: memory of a device that is free now, and that arrays still to be placed will take.

    Raises:
      ValueError: there is no room for one.
    """
    most = config.max_running * -(-max_length // config.page_size)
    return default_num_pages(page_bytes(model, config, mesh, dtype), mesh.local_devices[0], most, reserved_bytes)


def _step_bytes(model: Llama, config: EngineConfig, mesh: Mesh, max_length: int) -> int:
    """Bytes of a step's temporaries, roughly: activations of a layer, or all logits as they are sorted; and slots."""
    local, tensor = model.config, mesh.shape["tensor"]
    wide = 3 * local.intermediate_size // tensor + 3 * local.num_heads * local.head_dim // tensor
    activations = 4 * config.token_budget * (4 * local.hidden_size + wide)
    logits = 32 * config.max_running * local.vocab_size
    slots = config.max_running * (4 * local.vocab_size + 8 * MAX_LOGIT_BIAS + 8 * -(-max_length // config.page_size))
    return max(activations, logits) + slots


def param_bytes(model: Llama, mesh: Mesh, dtype: DTypeLike) -> int:
    """Of the parameters that each device has."""
    params = abstract_sharded_params(model.config, mesh, dtype)
    if model.config.tie_embeddings and mesh.shape["stage"] * mesh.shape["tensor"] == 1:
        del params["lm_head"]  # it is the embedding itself; otherwise it is sharded differently
    leaves = jax.tree.leaves(params)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def head_bytes(model: Llama, mesh: Mesh, dtype: DTypeLike) -> int:
    """Of the head's part that each device has."""
    leaves = jax.tree.leaves(abstract_sharded_params(model.config, mesh, dtype)["lm_head"])
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def page_bytes(model: Llama, config: EngineConfig, mesh: Mesh, dtype: DTypeLike) -> int:
    """Of the keys and values of a page on each device; `dtype`: of the parameters."""
    sizes, itemsize = mesh.shape, np.dtype(dtype).itemsize
    return cache_bytes(model.config, config.page_size, sizes["stage"], sizes["tensor"], itemsize, config.kv_dtype)


def available_bytes(device: jax.Device) -> int | None:
    """Memory of an accelerator, or what a CPU's host has available; None where that is unknown."""
    if device.platform == "cpu":
        return min(_host_bytes(), default=None)
    memory = device.memory_stats()
    return None if memory is None else memory["bytes_limit"]


def _host_bytes() -> Iterator[int]:
    """Bytes that are available by Linux's account, and that the control group of a container leaves."""
    meminfo = _read("/proc/meminfo").split()
    if "MemAvailable:" in meminfo:
        yield 1024 * int(meminfo[meminfo.index("MemAvailable:") + 1])
    group = "/sys/fs/cgroup/"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, now = _read(group + limit).strip(), _read(group + used).strip()
        if most.isdecimal() and now.isdecimal():
            statistics = _read(group + str(Path(used).with_name("memory.stat"))).split()
            # Pages of files that nobody has touched lately are given back when memory is short.
            files = statistics[statistics.index("inactive_file") + 1] if "inactive_file" in statistics else "0"
            yield max(0, int(most) - int(now) + int(files))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def in_units(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
