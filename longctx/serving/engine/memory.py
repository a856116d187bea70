"""Memory that an engine needs on its devices, estimated before it is allocated, and memory that there is."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from longctx.models import Llama
from longctx.models.footprint import layer_cache_bytes
from longctx.models.params import Ffn
from longctx.models.sharded_params import abstract_sharded_params
from longctx.parallel.topology import AXES
from longctx.serving.config import EngineConfig
from longctx.serving.executor.executor import read_bytes
from longctx.serving.executor.page_mover import PLACED_BYTES
from longctx.serving.kv_cache.window_pages import PageBytes
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.request.sampling_params import MAX_LOGIT_BIAS
from longctx.serving.runner.device_memory import DeviceMemory, MemoryUse
from longctx.serving.runner.page_transfer import MAX_BUCKET_BYTES

_UNKNOWN = 1 << 60  # bytes: nothing takes as many


def estimate(
    model: Llama,
    config: EngineConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    num_pages: int,
    max_length: int,
    is_loaded: bool = False,
    plan: ParallelPlan | None = None,
) -> MemoryUse:
    """Estimate what an engine takes of memory: its pages exactly, its steps roughly.

    This is of one accelerator; of CPU devices, which share the host's memory, of all of this process's together. A CPU
    holds parameters twice while an engine is made, as loaded and as `shard_params` arranges them.

    Args:
      num_pages: of each context rank.
      max_length: tokens of the longest sequence.
      is_loaded: whether the parameters are loaded already.
      plan: of the mesh; None: pages grow from rank to rank.
    """
    ffn: Ffn = "tensor" if plan is None else plan.ffn
    weights, sizes = param_bytes(model, mesh, dtype, ffn), page_bytes(model, config, mesh, dtype)
    slots = _slot_bytes(model, config, mesh, dtype, max_length)
    temporaries = _temporary_bytes(model, config, mesh, ffn)
    memory = DeviceMemory.of(mesh.local_devices)
    if memory is None:
        limit, count = available_bytes() or _UNKNOWN, len(mesh.local_devices)
        is_copied = np.dtype(dtype).itemsize <= 4 and model.config.quantization is None
        weights *= count * ((2 if is_copied else 1) - is_loaded)
        slots, temporaries, page, window_page = (x * count for x in (slots, temporaries, *sizes))
        host = DeviceMemory(limit, 0, limit, limit)
        use = MemoryUse(host, weights, slots, 0, page, config.page_size, temporaries)
        return _with_windows(use, model, config, mesh, window_page, max_length, plan).with_pages(num_pages)
    if not is_loaded:
        memory = memory._replace(used=memory.used + weights)
    use = MemoryUse(
        memory,
        weights,
        slots,
        0,
        sizes.page,
        config.page_size,
        temporaries,
        outputs=steps_in_flight(config) * config.token_budget * model.config.hidden_size * np.dtype(dtype).itemsize,
        autotuning=_autotuning_bytes(model, config, mesh, dtype),
        transfers=_transfer_bytes(config, mesh, sum(sizes)),
    )
    return _with_windows(use, model, config, mesh, sizes.window, max_length, plan).with_pages(num_pages)


def _with_windows(
    use: MemoryUse,
    model: Llama,
    config: EngineConfig,
    mesh: Mesh,
    window_page: int,
    max_length: int,
    plan: ParallelPlan | None,
) -> MemoryUse:
    """Return a memory use with the window pages of a model that has some."""
    sizes: Any = {axis: mesh.shape[axis] for axis in AXES}
    window, plan = model.config.sliding_window, plan or ParallelPlan(**sizes)
    most = config.count_window_pages(window, plan, _UNKNOWN, max_length)
    return use._replace(window_page=window_page, most_windows=most)


def default_pages(
    model: Llama,
    config: EngineConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    max_length: int,
    plan: ParallelPlan | None = None,
) -> int:
    """Pages on each context rank: as many as all that may run could ever need, if there is room by estimation.

    There is room for what fits into 1 GiB of a CPU's host, or into the memory that an accelerator has beside all else,
    of which parameters are still to be loaded.
    """
    if DeviceMemory.of(mesh.local_devices) is None:
        sizes, nothing = page_bytes(model, config, mesh, dtype), DeviceMemory(0, 0, 0, 0)
        use = MemoryUse(nothing, 0, 0, 0, sizes.page, config.page_size)
        fit = _with_windows(use, model, config, mesh, sizes.window, max_length, plan).pages_within(1 << 30)
        if not fit:
            raise ValueError(f"num_pages: there is no room for a page of {sum(sizes):,} bytes in 1 GiB")
    else:
        use = estimate(model, config, mesh, dtype, 0, max_length, plan=plan)
        fit = use.num_fitting
        if not fit:
            use.check(needed=use.page)
    return min(fit, config.most_pages(max_length))


def steps_in_flight(config: EngineConfig) -> int:
    """Steps whose outputs are on the devices at a time: those that run, and one whose results are read."""
    return config.run_ahead + 1


def _autotuning_bytes(model: Llama, config: EngineConfig, mesh: Mesh, dtype: DTypeLike) -> int:
    """Bytes of the operands and the result of a step's largest product."""
    local, tensor, rows, itemsize = model.config, mesh.shape["tensor"], config.token_budget, np.dtype(dtype).itemsize
    hidden, heads, ffn = (
        local.hidden_size,
        local.num_heads * local.head_dim // tensor,
        local.intermediate_size // tensor,
    )
    vocab = -(-local.vocab_size // (tensor * mesh.shape["stage"]))
    products = [(rows, hidden, ffn, itemsize), (rows, hidden, heads, itemsize), (config.max_running, hidden, vocab, 4)]
    return max(itemsize * (n + out) * hidden + size * n * out for n, hidden, out, size in products)


def _transfer_bytes(config: EngineConfig, mesh: Mesh, page: int) -> int:
    """Bytes of pages on their way between a device and other memory, and of what the programs that move them take."""
    if config.tiers is None and not config.transfers:
        return 0
    return read_bytes(config, mesh.shape["context"], page) + PLACED_BYTES + 2 * MAX_BUCKET_BYTES


def _temporary_bytes(model: Llama, config: EngineConfig, mesh: Mesh, ffn: Ffn) -> int:
    """Bytes of a step's temporaries, roughly: activations of a layer, or all logits as they are sorted."""
    local, tensor = model.config, mesh.shape["tensor"]
    wide = 3 * local.intermediate_size // tensor + 3 * local.num_heads * local.head_dim // tensor
    gathered = 2 * mesh.shape["context"] if ffn == "all" else 0  # the feed-forward's inputs and products, of all ranks
    activations = 4 * config.token_budget * ((4 + gathered) * local.hidden_size + wide)
    return max(activations, 32 * config.max_running * local.vocab_size)


def _slot_bytes(model: Llama, config: EngineConfig, mesh: Mesh, dtype: DTypeLike, max_length: int) -> int:
    """Bytes that a step keeps for sequences beside their pages, and of the rows that go from stage to stage."""
    stages, ranks = mesh.shape["stage"], mesh.shape["context"]
    tables = (8 if ranks > 1 else 4) + (0 if model.config.sliding_window is None else 4)  # for each entry
    slot = 4 * model.config.vocab_size + 8 * MAX_LOGIT_BIAS + tables * -(-max_length // config.page_size)
    rows = 3 * config.token_budget if ranks > 1 else config.token_budget
    row = model.config.hidden_size * np.dtype(dtype).itemsize
    return config.max_running * slot + (rows * row if stages > 1 else 0)


def param_bytes(model: Llama, mesh: Mesh, dtype: DTypeLike, ffn: Ffn = "tensor") -> int:
    """Bytes of the parameters that each device has."""
    params = abstract_sharded_params(model.config, mesh, dtype, ffn=ffn)
    if model.config.tie_embeddings and mesh.shape["stage"] * mesh.shape["tensor"] == 1:
        del params["lm_head"]  # it is the embedding itself; otherwise it is sharded differently
    leaves = jax.tree.leaves(params)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def page_bytes(model: Llama, config: EngineConfig, mesh: Mesh, dtype: DTypeLike) -> PageBytes:
    """Bytes of the keys and values of a page on each device; `dtype`: of the parameters."""
    sizes, itemsize = mesh.shape, np.dtype(dtype).itemsize
    token = layer_cache_bytes(model.config, sizes["stage"], sizes["tensor"], itemsize, config.kv_dtype)
    return PageBytes(*(config.page_size * count for count in token))


def available_bytes() -> int | None:
    """Memory that this host has available; None where that is unknown."""
    return min(_host_bytes(), default=None)


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
            # Pages of files that were not touched lately are given back when memory is short.
            files = statistics[statistics.index("inactive_file") + 1] if "inactive_file" in statistics else "0"
            yield max(0, int(most) - int(now) + int(files))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
