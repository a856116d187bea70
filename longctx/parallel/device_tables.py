"""Devices and links that costs are predicted from: what data sheets say, and which share of it is reached."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from longctx.annotations import Real
from longctx.parallel.cost import as_float, check_numbers
from longctx.parallel.operators import AttentionCost, ProductTable, ReduceTable, stored_operators

_OF_BYTES = {1: "float8", 2: "bfloat16", 4: "float32", 8: "float64"}
DTYPES = ("float8", "bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Device:
    """Rates of an accelerator by its data sheet, and the shares of them that are reached.

    Attributes:
      name: what it is called.
      flops: FLOP/s of dense products by dtype, of `DTYPES`: `"bfloat16"`, which has to be there, and others.
      memory_bandwidth: bytes/s.
      memory_bytes: of it, if that is known.
      flops_share, memory_share: the shares of both that are reached, by products with weights and by reading these.
        Achieved rates predict best.
      step_seconds: what a step takes for any number of rows: the host's work and starting kernels.
      contention: which share of the seconds of a transfer the computation that hides it loses to it, as both take
        memory bandwidth and multiprocessors.
      attention_share, key_share: the shares that attention reaches: of FLOP/s by the products of prompts, of bytes/s by
        reading keys. None: those of `attention`, or else those above.
      element_share: of bytes/s, what norms, residual additions, rotary embedding and activation reach. None: they are
        not counted.
      overlap: of products with weights and reading these, the longer hides so much of the shorter.
      attention_overlap: likewise of attention's products and reading keys.
      layer_seconds: what a layer takes for any number of rows: the latency of its kernels, but for those of `products`
        and `attention`.
      products: measured products with weights, tables by dtype or the name of stored ones, in place of `flops_share`,
        `memory_share` and `overlap`.
      attention: measured kernels of attention, by sizes of heads and bytes of cached numbers, or the name of stored
        ones.

    Raises:
      ValueError: a number is out of range, there are no FLOP/s for bfloat16, a dtype is unknown, or the name is no
        string.

    Source:
      Context parallelism paper, 3.4 (achieved rates).

    Examples:
      >>> from longctx.parallel import Device, Link, Topology
      >>> mine = Device("mine", {"bfloat16": 400e12}, memory_bandwidth=2e12, flops_share=0.7, memory_share=0.8)
      >>> round(mine.reached_flops() / 1e12), round(mine.reached_bandwidth / 1e12, 1)  # TFLOP/s, TB/s
      (280, 1.6)
      >>> Topology(mine, {"context": Link("ethernet", 12.5e9, latency=50e-6)}).check(context=4)
    """

    name: str
    flops: Mapping[str, Real] = dataclasses.field(hash=False)
    memory_bandwidth: Real
    memory_bytes: Real | None = None
    flops_share: Real = 0.6
    memory_share: Real = 0.6
    step_seconds: Real = 0.0
    contention: Real = 0.0
    attention_share: Real | None = None
    key_share: Real | None = None
    element_share: Real | None = None
    overlap: Real = 1.0
    attention_overlap: Real = 0.0
    layer_seconds: Real = 0.0
    products: str | Mapping[str, ProductTable] | None = dataclasses.field(default=None, hash=False)
    attention: str | tuple[AttentionCost, ...] = ()

    def __post_init__(self) -> None:
        numbers = check_numbers(self)
        if not isinstance(self.flops, Mapping) or "bfloat16" not in self.flops:
            raise ValueError(f"flops must be a mapping from dtypes, with bfloat16 among them, got {self.flops!r}")
        for dtype, value in self.flops.items():
            if dtype not in DTYPES:
                raise ValueError(f"flops must be of the dtypes {', '.join(DTYPES)}, got {dtype!r}")
            if not 0 < as_float(value) < math.inf:
                raise ValueError(f"flops of {dtype} must be a positive, finite number, got {value!r}")
        flops = {dtype: as_float(value) for dtype, value in self.flops.items()}
        object.__setattr__(self, "flops", flops)
        if isinstance(self.products, str):
            stored_operators("products", self.products)
        elif self.products is not None:
            tables = {dtype: _made(ProductTable, table) for dtype, table in dict(self.products).items()}
            if "bfloat16" not in tables or {*tables} - {*DTYPES}:
                raise ValueError(f"products must have bfloat16, and be of the dtypes {', '.join(DTYPES)}")
            object.__setattr__(self, "products", tables)
        if isinstance(self.attention, str):
            stored_operators("attention", self.attention)
        else:
            object.__setattr__(self, "attention", tuple(_made(AttentionCost, each) for each in self.attention))
        for name, number in numbers.items():
            object.__setattr__(self, name, number)

    def reached_flops(self, element_bytes: Real = 2) -> float:
        """FLOP/s that products with weights of this size reach; those of bfloat16 if there is no other number."""
        return self.data_sheet_flops(element_bytes) * self.flops_share

    def reached_attention(self, element_bytes: Real = 2) -> float:
        """FLOP/s that attention's products reach, of elements of this size."""
        return self.data_sheet_flops(element_bytes) * self.attention_cost().prompt_share

    def data_sheet_flops(self, element_bytes: Real = 2) -> float:
        """FLOP/s of the data sheet for elements of this size; those of bfloat16 if there is no other number."""
        return self.flops.get(_OF_BYTES.get(int(element_bytes), "bfloat16"), self.flops["bfloat16"])

    def attention_cost(self, head_size: int = 128, key_bytes: Real = 2) -> AttentionCost:
        """The kernel that was measured with what is closest to these sizes; without any, one of shares alone."""
        kernels = self.attention
        if isinstance(kernels, str):
            kernels = stored_operators("attention", kernels)
        shares = {"prompt_share": self.attention_share, "key_share": self.key_share}
        own: dict[str, Any] = {name: float(share) for name, share in shares.items() if share is not None}
        if not kernels:
            own = {"prompt_share": float(self.flops_share), "key_share": float(self.memory_share)} | own
            return AttentionCost(head_size, key_bytes, **own)

        def distance(kernel: AttentionCost) -> tuple[float, float]:
            return abs(math.log(kernel.key_bytes / key_bytes)), abs(math.log(kernel.head_size / head_size))

        return dataclasses.replace(min(kernels, key=distance), head_size=head_size, key_bytes=key_bytes, **own)

    def product_tables(self) -> Mapping[str, ProductTable]:
        """The tables of measured products, by dtype; empty: there are none."""
        if isinstance(self.products, str):
            return stored_operators("products", self.products)
        return self.products or {}

    def product_curve(self, n: Real, k: Real, element_bytes: Real) -> tuple[Sequence[int], np.ndarray]:
        """Knots of rows, ascending, and the seconds of those rows times weights `[k, n]`, `[knots]` float64.

        Raises:
          ValueError: the device has no measured products.
        """
        tables = self.product_tables()
        if not tables:
            raise ValueError(f"{self.name} has no measured products")
        table = tables.get(_OF_BYTES.get(int(element_bytes), "bfloat16"), tables["bfloat16"])
        flops = self.data_sheet_flops(element_bytes)
        return table.rows, table.curve(n, k, element_bytes, flops, self.memory_bandwidth)

    @property
    def reached_bandwidth(self) -> float:
        """Bytes/s of memory that reading weights reaches."""
        return self.memory_bandwidth * self.memory_share

    @property
    def reached_key_bandwidth(self) -> float:
        """Bytes/s of memory that reading keys reaches."""
        return self.memory_bandwidth * self.attention_cost().key_share


def _made(kind: type, value: Any) -> Any:
    """A table or kernel, from itself or from its attributes."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"a {kind.__name__} must be a mapping of attributes, got {value!r}")
    try:
        return kind(**value)
    except TypeError as error:
        raise ValueError(f"a {kind.__name__} has wrong attributes: {error}") from None


@dataclasses.dataclass(frozen=True)
class Link:
    """The link between the devices of an axis.

    Attributes:
      name: what it is called.
      bandwidth: bytes/s that a device can send, one way.
      latency: seconds of a hop of few bytes.
      share: of the bandwidth, that a hop to the next device reaches, beside the computation that hides it.
      collective_share, collective_latency: the share and seconds of a collective that nothing runs beside; None: as of
        a hop.
      reduce_latency: seconds of each hop of an all-reduce's tree over hosts; None: latency.
      all_reduces: measured all-reduces of a host's devices, a table or the name of a stored one, in place of
        `collective_share` and `collective_latency`.

    Raises:
      ValueError: a number is out of range, or the name is no string.

    Examples:
      >>> from longctx.parallel import Link, Topology
      >>> infiniband = Link("infiniband", bandwidth=50e9, latency=10e-6, share=0.8)
      >>> topology = Topology(Topology.preset("h100-nvlink").device, {"context": infiniband})
      >>> topology.hardware("context").hop(40e6)  # seconds for 40 MB
      0.00101
    """

    name: str
    bandwidth: Real
    latency: Real = 0.0
    share: Real = 0.6
    collective_share: Real | None = None
    collective_latency: Real | None = None
    reduce_latency: Real | None = None
    all_reduces: str | ReduceTable | None = None

    def __post_init__(self) -> None:
        for name, number in check_numbers(self).items():
            object.__setattr__(self, name, number)
        if isinstance(self.all_reduces, str):
            stored_operators("all_reduces", self.all_reduces)
        elif self.all_reduces is not None:
            object.__setattr__(self, "all_reduces", _made(ReduceTable, self.all_reduces))

    @property
    def reduce_table(self) -> ReduceTable | None:
        """The measured all-reduces, if there are any."""
        if isinstance(self.all_reduces, str):
            return stored_operators("all_reduces", self.all_reduces)
        return self.all_reduces


# Dense products, memory and its bandwidth: NVIDIA's data sheets. Products, attention and all-reduces in a host: fitted
# by `benchmarks.measured_operators` to half of AIConfigurator's tables; element-wise operators, hops and networks by
# `benchmarks.calibration` to half of Vidur's. One fit for all models and plans; docs/simulation_hardware.md has the
# errors on the other halves. A layer's five kernels beside these (two norms with additions, rotary embedding, cache,
# activation) take at least what the shortest kernel in a graph does, 2.7 us on Hopper and 2.95 us on Ampere. Kernels of
# attention hide reading cached keys under products or the reverse, as in Mnemosyne's roofline (section 3): no table has
# prompts with a cached prefix. The shares of products and weights are Vidur's, for what has no table.
_HOPPER = {"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12, "float32": 494e12, "float64": 67e12}
_ON_HOPPER: dict[str, Any] = {"flops_share": 0.70, "memory_share": 0.92, "element_share": 0.77, "overlap": 0.64}
_ON_HOPPER |= {"layer_seconds": 5 * 2.7e-6, "attention_overlap": 1.0}
_ON_AMPERE: dict[str, Any] = {"flops_share": 0.74, "memory_share": 0.80, "element_share": 0.55, "overlap": 0.55}
_ON_AMPERE |= {"layer_seconds": 5 * 2.95e-6, "attention_overlap": 1.0}
_H100: dict[str, Any] = {"products": "H100", "attention": "H100"}
DEVICES = {
    "H200": Device("H200", _HOPPER, 4.8e12, 141e9, **_ON_HOPPER, products="H200", attention="H200"),
    "H100": Device("H100", _HOPPER, 3.35e12, 80e9, **_ON_HOPPER, **_H100),
    # With kernels of FlashAttention-2's generation, as FlashInfer had them in 2024 (Mnemosyne, 5; Medha, 4.4):
    # "FlashAttention-2 achieves only 35 % utilization on the H100" (FlashAttention-3, Shah et al. 2024, abstract).
    "H100-FA2": Device("H100-FA2", _HOPPER, 3.35e12, 80e9, **_ON_HOPPER, **_H100, attention_share=0.35),
    # The H100 of Meta's Grand Teton hosts: 500 W, 96 GB of HBM2e; 502 of 800 TFLOP/s are reached (context parallelism
    # paper, 4.1 and appendix A), by attention too (500 and 496: table 5's ATTN). Contention is what makes tables 4 and
    # 5 agree at T = 3200 and 4160. The other shares are the H100's.
    "H100-500W": Device(
        "H100-500W",
        {"bfloat16": 800e12, "float8": 1600e12},
        2.4e12,
        96e9,
        contention=0.12,
        **_ON_HOPPER,
        **_H100,
        attention_share=502 / 800,
    ),
    "A100": Device(
        "A100",
        {"bfloat16": 312e12, "float16": 312e12, "float32": 156e12, "float64": 19.5e12},
        2.0e12,
        80e9,
        **_ON_AMPERE,
        products="A100",
        attention="A100",
    ),
    # A few cores. Memory's share and the overlap were chosen by steps of 8 to 512 rows (docs/scheduling.md).
    "cpu": Device("cpu", {"bfloat16": 100e9, "float32": 100e9}, 15e9, 16e9, memory_share=0.2, overlap=0.0),
}
_NVLINK_AMPERE: dict[str, Any] = {"latency": 13e-6, "share": 0.95, "collective_share": 0.53}
_NVLINK_AMPERE |= {"collective_latency": 13e-6}
LINKS = {
    # One direction: 18 and 12 links of 25 GB/s. An A800 has 8 of these (Mooncake's testbed), of which the same share is
    # assumed. Hops: fitted on Vidur's tables; collectives on NCCL's all-gathers, reduce-scatters and all-to-alls of 2,
    # 4 and 8 devices; all-reduces on those of vLLM in a graph.
    "nvlink-h100": Link(
        "nvlink-h100",
        450e9,
        7.6e-6,
        share=0.80,
        collective_share=0.56,
        collective_latency=7.5e-6,
        all_reduces="nvlink-h100",
    ),
    "nvlink-a100": Link("nvlink-a100", 300e9, **_NVLINK_AMPERE, all_reduces="nvlink-a100"),
    "nvlink-a800": Link("nvlink-a800", 200e9, **_NVLINK_AMPERE),
    # 400 Gb/s for each GPU (context parallelism paper, 4.1; 50 GB/s for each pair of GPUs in Mnemosyne's hosts). A hop
    # of few bytes takes 35 us (table 8, decode: SendRecv of 3 hops is 105.7 us). Hops reach 26.5 GB/s beside attention
    # (table 5's four SendRecv, less latency). All2All, alone, takes 67 to 81 us for few bytes (table 8), and with 38
    # GB/s its times in table 5 are met within 9 and 21 %. Vidur's table of a hop between two hosts that nothing runs
    # beside has 36 GB/s and 19 us.
    "rdma-400g": Link(
        "rdma-400g",
        50e9,
        35e-6,
        share=0.53,
        collective_share=0.76,
        collective_latency=75e-6,
        reduce_latency=19e-6,
    ),
    # 100 Gb/s for each GPU over TCP, of which 3 GB/s are reached (context parallelism paper, 4.1 and 4.2.1). Where a
    # rank must be a GPU: if 8 GPUs of a host shared 3 GB/s, they could not hide pass-KV at 128k tokens on 4 hosts.
    # Latencies are not given: RDMA's, which are the least that they can be.
    "tcp-100g": Link("tcp-100g", 12.5e9, 35e-6, share=0.24, collective_latency=75e-6),
    # 200 Gb/s for each GPU of a DGX-A100 (Medha, 5.1: InfiniBand between Azure's servers; HDR by their data sheet).
    # Share and latency: fitted on Vidur's table of a hop between two hosts.
    "rdma-200g": Link("rdma-200g", 25e9, 28e-6, share=0.31),
    # 800 Gb/s for each host of 8 GPUs (Mooncake, section 7's testbed): an eighth when all send at once. Share and
    # latency are those of Meta's RDMA.
    "rdma-800g-host": Link("rdma-800g-host", 12.5e9, 35e-6, share=0.53),
    # One machine's memory, between devices made of its cores. Here and below, 60 % are a guess.
    "memory": Link("memory", 10e9, 0.0),
    "ethernet-10g": Link("ethernet-10g", 1.25e9, 100e-6),
}
# Default links within a host and across hosts.
FOUND = {
    "H200": ("nvlink-h100", "rdma-400g"),
    "H100": ("nvlink-h100", "rdma-400g"),
    "A100": ("nvlink-a100", "rdma-200g"),
    "A800": ("nvlink-a800", "rdma-200g"),
    "cpu": ("memory", "ethernet-10g"),
}
# Device, and the links of tensor, context and stage.
PRESETS = {
    "h100-nvlink": ("H100", "nvlink-h100", "nvlink-h100", "nvlink-h100"),
    "h200-nvlink": ("H200", "nvlink-h100", "nvlink-h100", "nvlink-h100"),
    "a100-nvlink": ("A100", "nvlink-a100", "nvlink-a100", "nvlink-a100"),
    "h100-rdma": ("H100", "nvlink-h100", "rdma-400g", "rdma-400g"),
    "h200-rdma": ("H200", "nvlink-h100", "rdma-400g", "rdma-400g"),
    "h100-tcp": ("H100", "nvlink-h100", "tcp-100g", "tcp-100g"),
    "a100-800g": ("A100", "nvlink-a800", "rdma-800g-host", "rdma-800g-host"),
    "mnemosyne-h100": ("H100-FA2", "nvlink-h100", "rdma-400g", "rdma-400g"),
    "meta-gtt": ("H100-500W", "nvlink-h100", "rdma-400g", "rdma-400g"),
    "meta-gti": ("H100-500W", "nvlink-h100", "tcp-100g", "tcp-100g"),
    "medha-a100": ("A100", "nvlink-a100", "rdma-200g", "rdma-200g"),
    "cpu": ("cpu", "memory", "memory", "memory"),
}
