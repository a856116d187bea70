"""Devices and links that costs are predicted from: what data sheets say, and which share of it is reached."""

import dataclasses
import math
from collections.abc import Mapping

from longctx.annotations import Real
from longctx.parallel.cost import as_float, check_numbers

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
        reading keys. None: those above.
      element_share: of bytes/s, what norms, residual additions, rotary embedding and activation reach. None: they are
        not counted.
      overlap: of products with weights and reading these, the longer hides so much of the shorter.
      attention_overlap: likewise of attention's products and reading keys.
      layer_seconds: what a layer takes for any number of rows: the latency of its kernels.

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
        for name, number in numbers.items():
            object.__setattr__(self, name, number)

    def reached_flops(self, element_bytes: Real = 2) -> float:
        """FLOP/s that products with weights of this size reach; those of bfloat16 if there is no other number."""
        return self._peak(element_bytes) * self.flops_share

    def reached_attention(self, element_bytes: Real = 2) -> float:
        """FLOP/s that attention's products reach, of elements of this size."""
        share = self.flops_share if self.attention_share is None else self.attention_share
        return self._peak(element_bytes) * share

    def _peak(self, element_bytes: Real) -> float:
        return self.flops.get(_OF_BYTES.get(int(element_bytes), "bfloat16"), self.flops["bfloat16"])

    @property
    def reached_bandwidth(self) -> float:
        """Bytes/s of memory that reading weights reaches."""
        return self.memory_bandwidth * self.memory_share

    @property
    def reached_key_bandwidth(self) -> float:
        """Bytes/s of memory that reading keys reaches."""
        return self.memory_bandwidth * (self.memory_share if self.key_share is None else self.key_share)


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

    def __post_init__(self) -> None:
        for name, number in check_numbers(self).items():
            object.__setattr__(self, name, number)


# Dense products, memory and its bandwidth: NVIDIA's data sheets. Shares and latencies: fitted by
# `benchmarks.calibration` on half of Vidur's tables of A100 and H100, one fit for all models and plans; the
# errors on the other half are in docs/simulation_hardware.md. Attention was measured on A100 alone, so its shares and
# its latency (13 us of a layer's) are the same on H100. Its kernels hide reading keys under products or the reverse, as
# in Mnemosyne's roofline (section 3): no table has chunks so small that it would show.
_HOPPER = {"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12, "float32": 494e12, "float64": 67e12}
_ATTENTION = {"attention_share": 0.59, "key_share": 0.78, "attention_overlap": 1.0}
_ON_HOPPER = {"flops_share": 0.70, "memory_share": 0.92, "element_share": 0.77, "overlap": 0.64, "layer_seconds": 50e-6}
_ON_AMPERE = {"flops_share": 0.74, "memory_share": 0.80, "element_share": 0.55, "overlap": 0.55, "layer_seconds": 51e-6}
DEVICES = {
    "H200": Device("H200", _HOPPER, 4.8e12, 141e9, **_ON_HOPPER, **_ATTENTION),
    "H100": Device("H100", _HOPPER, 3.35e12, 80e9, **_ON_HOPPER, **_ATTENTION),
    # With kernels of FlashAttention-2's generation, as FlashInfer had them in 2024 (Mnemosyne, 5; Medha, 4.4):
    # "FlashAttention-2 achieves only 35 % utilization on the H100" (FlashAttention-3, Shah et al. 2024, abstract).
    "H100-FA2": Device("H100-FA2", _HOPPER, 3.35e12, 80e9, **_ON_HOPPER, **_ATTENTION | {"attention_share": 0.35}),
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
        **_ATTENTION | {"attention_share": 502 / 800},
    ),
    "A100": Device(
        "A100",
        {"bfloat16": 312e12, "float16": 312e12, "float32": 156e12, "float64": 19.5e12},
        2.0e12,
        80e9,
        **_ON_AMPERE,
        **_ATTENTION,
    ),
    # A few cores. Memory's share and the overlap were chosen by steps of 8 to 512 rows (docs/scheduling.md).
    "cpu": Device("cpu", {"bfloat16": 100e9, "float32": 100e9}, 15e9, 16e9, memory_share=0.2, overlap=0.0),
}
_NVLINK_AMPERE = {"latency": 13e-6, "share": 0.95, "collective_share": 0.52, "collective_latency": 34e-6}
LINKS = {
    # One direction: 18 and 12 links of 25 GB/s. An A800 has 8 of these (Mooncake's testbed), of which the same share is
    # assumed. Hops and all-reduces: fitted on Vidur's tables of 2, 4 and 8 devices of a host.
    "nvlink-h100": Link("nvlink-h100", 450e9, 7.6e-6, share=0.80, collective_share=0.71, collective_latency=22e-6),
    "nvlink-a100": Link("nvlink-a100", 300e9, **_NVLINK_AMPERE),
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
