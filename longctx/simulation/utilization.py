"""FLOPs and bytes of batches, the share of the devices that these use (MFU, MBU), GPU-seconds, and memory.

Source: Mnemosyne, section 3 (equations 1 to 4) and figures 20 to 22; context parallelism paper, appendix A (MFU).
"""

import dataclasses
import math

from longctx.models.config import LlamaConfig
from longctx.models.footprint import kv_row_bytes, layer_cache_bytes, weight_bytes
from longctx.parallel.device_tables import Device
from longctx.serving.config import EngineConfig
from longctx.serving.kv_cache.window_pages import PageBytes
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.roofline import layer_weights
from longctx.serving.predictor.work import Work
from longctx.simulation.record import Totals


def _products(model: LlamaConfig, work: Totals | Work, causal: bool) -> tuple[float, float]:
    """FLOPs of products in 16 bits, and of those with quantised weights."""
    if isinstance(work, Work):
        work = work.seen_through(model.sliding_window or 0)
        decodes, in_windows = work.decode_keys, work.window_decode_keys
    else:
        decodes, in_windows = work.decode_pairs, work.window_decode_pairs
    full_layers, sliding_layers = _layer_counts(model)
    pairs = full_layers * work.pairs + sliding_layers * work.window_pairs
    if not causal:
        pairs = 2 * pairs - full_layers * decodes - sliding_layers * in_windows
    full, quantized = (2 * model.num_layers * weights * work.rows for weights in layer_weights(model))
    head = 2 * model.vocab_size * model.hidden_size * work.samples
    return full + head + 4 * model.num_heads * model.head_dim * pairs, quantized


def _layer_counts(model: LlamaConfig) -> tuple[int, int]:
    """Layers without a sliding window, and those with one."""
    sliding = sum(model.sliding_layers)
    return model.num_layers - sliding, sliding


def model_flops(model: LlamaConfig, work: Totals | Work, causal: bool = True) -> float:
    """Compute the FLOPs that a model needs for some work: 2 a weight and row, 4 a pair, head element and layer.

    In sliding layers pairs count that the window leaves.

    Args:
      model: its sizes.
      work: of all context ranks, where a token that several of them compute counts once; see `Work.seen_through`.
      causal: whether pairs count that the causal mask leaves, about half of a prompt's. False: those of prompts
        count twice, so a prompt of T tokens has T (T + 1): Mnemosyne's equation 1 has T^2. Decodes count alike.

    Returns:
      FLOPs, those of products with quantised weights among them.

    Source:
      Mnemosyne, equation 1.

    Examples:
      >>> from longctx.serving.predictor import Work
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.utilization import model_flops
      >>> round(model_flops(MODELS["llama-3-8b"], Work.of([(0, 100_000, True)])) / 1e15, 1)  # PFLOP of a prompt
      4.0
    """
    return sum(_products(model, work, causal))


def model_bytes(
    model: LlamaConfig,
    work: Totals | Work,
    plan: ParallelPlan | None = None,
    kv_dtype: str | None = None,
) -> float:
    """Bytes of memory that all devices of a plan read for some work: 16-bit weights in each step, and keys and values.

    Each context rank reads all weights, but those that ranks share (`ParallelPlan.ffn`). Keys and values count once for
    each chunk; where KV heads are repeated over `tensor`, each device reads its own.

    Args:
      plan: None: one device.
      kv_dtype: of the cache, as of `EngineConfig`.
    """
    plan = plan or ParallelPlan()
    steps = work.steps if isinstance(work, Totals) else 1
    full, quantized = (model.num_layers * weights for weights in layer_weights(model, plan.ffn_ranks))
    weights = 2 * (full + model.vocab_size * model.hidden_size) + quantized
    key = 2 * max(model.num_kv_heads, plan.tensor) * kv_row_bytes(model.head_dim, 2, kv_dtype)
    full_layers, sliding_layers = _layer_counts(model)
    work = work.seen_through(model.sliding_window or 0) if isinstance(work, Work) else work
    keys = full_layers * work.keys + sliding_layers * work.window_keys
    return steps * plan.context * weights + keys * key


def mfu(
    model: LlamaConfig, work: Totals | Work, device: Device, devices: int, seconds: float, causal: bool = True
) -> float:
    """Compute the share of the data sheet's FLOP/s that a model's products make up, at most 1.

    Args:
      model: its sizes.
      work: of all instances' devices.
      device: of the data sheet; quantised products count by its FLOP/s in 8 bits.
      devices: how many.
      seconds: in which the devices could have computed, such as those while they were busy.
      causal: see `model_flops`. Not causal it can be above 1, as half of the pairs are not computed.

    Returns:
      Model FLOPs utilisation.

    Raises:
      ValueError: seconds or devices are not positive.

    Source:
      Context parallelism paper, appendix A; Mnemosyne, figure 20.

    Examples:
      >>> from longctx.parallel import Topology
      >>> from longctx.serving.predictor import Work
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.utilization import mfu
      >>> prompt = Work.of([(0, 1000, True)])
      >>> round(mfu(MODELS["llama-3-8b"], prompt, Topology.preset("h100-nvlink").device, devices=1, seconds=0.05), 2)
      0.29
    """
    full, quantized = _products(model, work, causal)
    peak = device.flops["bfloat16"]
    ideal = full / peak + quantized / device.flops.get("float8", peak)
    return ideal / gpu_seconds(seconds, devices)


def mbu(
    model: LlamaConfig,
    work: Totals | Work,
    device: Device,
    plan: ParallelPlan,
    seconds: float,
    kv_dtype: str | None = None,
) -> float:
    """Compute the share of the data sheet's memory bandwidth that reading weights, keys and values makes up.

    Args:
      model: its sizes.
      work: of all instances' devices.
      device: of the data sheet.
      plan: of parallelism.
      seconds: in which the devices could have read, such as those while they were busy.
      kv_dtype: of the cache, as of `EngineConfig`.

    Returns:
      Memory bandwidth utilisation.

    Raises:
      ValueError: seconds are not positive.

    Source:
      Mnemosyne, figure 21.

    Examples:
      >>> from longctx.parallel import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.serving.predictor import Work
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.utilization import mbu
      >>> device, decode = Topology.preset("h100-nvlink").device, Work.of([(999, 1, True)])
      >>> round(mbu(MODELS["llama-3-8b"], decode, device, ParallelPlan(), seconds=0.01), 2)
      0.45
    """
    whole = gpu_seconds(seconds, plan.num_devices)
    return model_bytes(model, work, plan, kv_dtype=kv_dtype) / device.memory_bandwidth / whole


def gpu_seconds(seconds: float, devices: int) -> float:
    """Seconds of all devices together.

    Raises:
      ValueError: seconds or devices are not positive.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be positive and finite, got {seconds}")
    if devices < 1:
        raise ValueError(f"devices must be at least 1, got {devices}")
    return seconds * devices


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on each device of a plan, and how many of the device's may be used.

    Attributes:
      weights: bytes of the parameters.
      cache: bytes of keys and values.
      activations: bytes of a step, as those of one layer.
      usable: bytes that the three may take together.

    Examples:
      >>> from longctx.simulation.utilization import DeviceMemory
      >>> memory = DeviceMemory(weights=16e9, cache=40e9, activations=1e9, usable=72e9)
      >>> memory.total, memory.fits
      (57000000000.0, True)
    """

    weights: float
    cache: float
    activations: float
    usable: float

    @property
    def total(self) -> float:
        """Bytes of weights, cache and activations."""
        return self.weights + self.cache + self.activations

    @property
    def fits(self) -> bool:
        """True if the total may be used."""
        return self.total <= self.usable

    def check(self) -> None:
        """Check that it fits.

        Raises:
          ValueError: it doesn't; the message has the numbers.
        """
        if not self.fits:
            parts = (("weights", self.weights), ("keys and values", self.cache), ("activations", self.activations))
            listed = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in parts)
            raise ValueError(
                f"plan needs {self.total / 1e9:.1f} GB on each device ({listed}), which has {self.usable / 1e9:.1f} GB "
                "to use: a larger stage or tensor divides all of it, a larger context the keys and values, and with "
                "ffn='all' most weights"
            )


USABLE_SHARE = 0.9
"""Of a device's memory, what engines use by default: the rest is the driver's, the libraries' and fragments (vLLM)."""


def device_memory(
    model: LlamaConfig,
    plan: ParallelPlan,
    device: Device,
    tokens: int,
    rows: int = 2048,
    usable_share: float = USABLE_SHARE,
    kv_dtype: str | None = None,
    config: EngineConfig | None = None,
) -> DeviceMemory:
    """Memory on each device of a plan, by arithmetic.

    Sliding layers have window pages, as many as an engine gives them.

    Args:
      model: its sizes.
      plan: of parallelism.
      device: whose `memory_bytes` is known.
      tokens: of all requests whose keys and values shall fit, evenly spread over context ranks.
      rows: of a step on one rank; their activations count as those of one layer.
      usable_share: of the device's memory, what may be used.
      kv_dtype: of the cache, as of `EngineConfig`.
      config: of the engine, from which the number of window pages follows; None: the default one.

    Returns:
      What takes how many bytes.

    Raises:
      ValueError: the plan doesn't suit the model, or the device's memory is not known.

    Examples:
      >>> from longctx.parallel import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.utilization import device_memory
      >>> h100 = Topology.preset("h100-rdma").device
      >>> memory = device_memory(MODELS["llama-3-70b"], ParallelPlan(tensor=8), h100, tokens=131_072)
      >>> f"{memory.total / 1e9:.0f} of {memory.usable / 1e9:.0f} GB"
      '23 of 72 GB'
    """
    plan.check(model, plan.num_devices)
    if device.memory_bytes is None:
        raise ValueError(f"device must have memory_bytes, {device.name} has none")
    local_tokens, config = math.ceil(tokens / plan.context), config or EngineConfig()
    full, sliding = layer_cache_bytes(model, plan.stage, plan.tensor, kv_dtype=kv_dtype)
    windows = _window_pages(model, plan, config, -(-local_tokens // config.page_size))
    cache = full * local_tokens + sliding * windows * config.page_size
    wide = 3 * (model.intermediate_size + model.num_heads * model.head_dim) / plan.tensor
    gathered = 2 * plan.context if plan.ffn_ranks > 1 else 0  # the feed-forward's inputs and products, of all ranks
    return DeviceMemory(
        weight_bytes(model, plan.stage, plan.tensor, ffn_ranks=plan.ffn_ranks),
        cache,
        2 * rows * ((4 + gathered) * model.hidden_size + wide),
        usable_share * device.memory_bytes,
    )


def max_tokens(
    model: LlamaConfig,
    plan: ParallelPlan,
    device: Device,
    rows: int = 2048,
    usable_share: float = USABLE_SHARE,
    kv_dtype: str | None = None,
    config: EngineConfig | None = None,
) -> int:
    """Tokens whose keys and values fit beside the weights.

    Args:
      model, plan, device, rows, usable_share, kv_dtype, config: as for `device_memory`.

    Returns:
      Tokens over all context ranks; 0 if not even the weights fit. Of a model with sliding layers they are whole pages,
      and no more than all that may run could ever need, as such a model may need little or no memory for more.

    Examples:
      >>> from longctx.parallel import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.utilization import max_tokens
      >>> h100 = Topology.preset("h100-rdma").device
      >>> max_tokens(MODELS["llama-3-8b"], ParallelPlan(tensor=8), h100) // 1_000_000  # million tokens
      4
    """
    empty = device_memory(model, plan, device, 0, rows, usable_share)
    full, sliding = layer_cache_bytes(model, plan.stage, plan.tensor, kv_dtype=kv_dtype)
    room = empty.usable - empty.total
    if model.sliding_window is None:
        return max(0, math.floor(room / full)) * plan.context
    config = config or EngineConfig()
    most, page = config.most_pages(config.longest_sequence(model.max_positions)), config.page_size
    sizes, windows = PageBytes(full * page, sliding * page), _window_pages(model, plan, config, most)
    return min(sizes.pages_within(room, windows), most) * page * plan.context


def _window_pages(model: LlamaConfig, plan: ParallelPlan, config: EngineConfig, num_pages: int) -> int:
    """Return the window pages of a rank that has `num_pages` pages."""
    longest = config.longest_sequence(model.max_positions)
    return config.count_window_pages(model.sliding_window, plan, num_pages, longest)
