"""Devices and links that costs are predicted from: what data sheets say, and which share of it is reached."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from longctx.parallel.cost import as_float

_OF_BYTES = {1: "float8", 2: "bfloat16", 4: "float32", 8: "float64"}
DTYPES = ("float8", "bfloat16", "float16", "float32", "float64")


def _check(name: str, value: Any, most: float = math.inf, may_be_zero: bool = False) -> float:
    number = as_float(value)
    if not (0 < number <= most or (may_be_zero and number == 0)) or number == math.inf:
        kind = "finite number that is not negative" if may_be_zero else "positive, finite number"
        raise ValueError(f"{name} must be a {kind}{'' if most == math.inf else f', at most {most:g}'}, got {value!r}")
    return number


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise ValueError(f"name must be a string, got {name!r}")


@dataclasses.dataclass(frozen=True)
class Device:
    """What an accelerator can do by its data sheet, and which share of that is reached.

    Attributes:
      flops: FLOP/s of dense products by dtype, of `DTYPES`: `"bfloat16"`, which has to be there, and others.
      memory_bandwidth: bytes/s. memory_bytes: of it, if that is known.
      flops_share, memory_share: the shares of both that are reached. The context parallelism paper advises to go by
        achieved rates (3.4).
      step_seconds: what a step takes for any number of rows: the host's work and starting kernels.
      contention: which share of the seconds of a transfer the computation that hides it loses to it, as both take
        memory bandwidth and multiprocessors.

    Raises:
      ValueError: a number is out of range, there are no FLOP/s for bfloat16, a dtype is unknown, or the name is no
        string.
    """

    name: str
    flops: Mapping[str, float] = dataclasses.field(hash=False)
    memory_bandwidth: float
    memory_bytes: float | None = None
    flops_share: float = 0.6
    memory_share: float = 0.6
    step_seconds: float = 0.0
    contention: float = 0.0

    def __post_init__(self) -> None:
        _check_name(self.name)
        if not isinstance(self.flops, Mapping) or "bfloat16" not in self.flops:
            raise ValueError(f"flops must be a mapping from dtypes, with bfloat16 among them, got {self.flops!r}")
        for dtype in self.flops:
            if dtype not in DTYPES:
                raise ValueError(f"flops must be of the dtypes {', '.join(DTYPES)}, got {dtype!r}")
        flops = {dtype: _check(f"flops of {dtype}", value) for dtype, value in self.flops.items()}
        object.__setattr__(self, "flops", flops)
        object.__setattr__(self, "memory_bandwidth", _check("memory_bandwidth", self.memory_bandwidth))
        if self.memory_bytes is not None:
            object.__setattr__(self, "memory_bytes", _check("memory_bytes", self.memory_bytes))
        for name in ("flops_share", "memory_share"):
            object.__setattr__(self, name, _check(name, getattr(self, name), most=1.0))
        for name in ("step_seconds", "contention"):
            object.__setattr__(self, name, _check(name, getattr(self, name), may_be_zero=True))

    def reached_flops(self, element_bytes: float = 2) -> float:
        """FLOP/s that products of elements of so many bytes reach; those of bfloat16 if there is no other number."""
        dtype = _OF_BYTES.get(int(element_bytes), "bfloat16")
        return self.flops.get(dtype, self.flops["bfloat16"]) * self.flops_share

    @property
    def reached_bandwidth(self) -> float:
        """Bytes/s of memory that are reached."""
        return self.memory_bandwidth * self.memory_share


@dataclasses.dataclass(frozen=True)
class Link:
    """The link between the devices of an axis.

    Attributes:
      bandwidth: bytes/s that a device can send, one way. latency: seconds of a hop of few bytes.
      share: of the bandwidth, that a hop to the next device reaches, beside the computation that hides it.
      collective_share, collective_latency: of a collective that nothing runs beside; None: as of a hop.

    Raises:
      ValueError: a number is out of range, or the name is no string.
    """

    name: str
    bandwidth: float
    latency: float = 0.0
    share: float = 0.6
    collective_share: float | None = None
    collective_latency: float | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        object.__setattr__(self, "bandwidth", _check("bandwidth", self.bandwidth))
        object.__setattr__(self, "share", _check("share", self.share, most=1.0))
        object.__setattr__(self, "latency", _check("latency", self.latency, may_be_zero=True))
        if self.collective_share is not None:
            object.__setattr__(self, "collective_share", _check("collective_share", self.collective_share, most=1.0))
        if self.collective_latency is not None:
            latency = _check("collective_latency", self.collective_latency, may_be_zero=True)
            object.__setattr__(self, "collective_latency", latency)


# Dense products, memory and its bandwidth from NVIDIA's data sheets. Shares of 0.6 and the latencies of NVLink are
# guesses, where no source is named.
_HOPPER = {"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12, "float32": 494e12, "float64": 67e12}
DEVICES = {
    "H200": Device("H200", _HOPPER, 4.8e12, 141e9),
    "H100": Device("H100", _HOPPER, 3.35e12, 80e9),
    # The H100 of Meta's Grand Teton hosts: 500 W, 96 GB of HBM2e; 502 of 800 TFLOP/s are reached (context parallelism
    # paper, 4.1 and appendix A). Contention is what makes tables 4 and 5 agree at T = 3200 and 4160.
    "H100-500W": Device("H100-500W", {"bfloat16": 800e12, "float8": 1600e12}, 2.4e12, 96e9, 502 / 800, contention=0.12),
    "A100": Device(
        "A100", {"bfloat16": 312e12, "float16": 312e12, "float32": 156e12, "float64": 19.5e12}, 2.0e12, 80e9
    ),
    # A few cores.
    "cpu": Device("cpu", {"bfloat16": 100e9, "float32": 100e9}, 15e9, 16e9),
}
LINKS = {
    # One direction: 18 and 12 links of 25 GB/s. An A800 has 8 of these (Mooncake's testbed).
    "nvlink-h100": Link("nvlink-h100", 450e9, 10e-6),
    "nvlink-a100": Link("nvlink-a100", 300e9, 10e-6),
    "nvlink-a800": Link("nvlink-a800", 200e9, 10e-6),
    # 400 Gb/s for each GPU (context parallelism paper, 4.1; 50 GB/s for each pair of GPUs in Mnemosyne's hosts). A hop
    # of few bytes takes 35 us (table 8, decode: SendRecv of 3 hops is 105.7 us). Hops reach 26.5 GB/s beside attention
    # (table 5's four SendRecv, less latency). All2All, alone, takes 67 to 81 us for few bytes (table 8), and with 38
    # GB/s its times in table 5 are met within 9 and 21 %.
    "rdma-400g": Link("rdma-400g", 50e9, 35e-6, share=0.53, collective_share=0.76, collective_latency=75e-6),
    # 100 Gb/s for each GPU over TCP, of which 3 GB/s are reached (context parallelism paper, 4.1 and 4.2.1). Where a
    # rank must be a GPU: if 8 GPUs of a host shared 3 GB/s, they could not hide pass-KV at 128k tokens on 4 hosts.
    "tcp-100g": Link("tcp-100g", 12.5e9, 35e-6, share=0.24),
    # 200 Gb/s for each GPU of a DGX-A100 (Medha, 5.1: InfiniBand between Azure's servers; HDR by their data sheet).
    "rdma-200g": Link("rdma-200g", 25e9, 35e-6, share=0.53),
    # 800 Gb/s for each host of 8 GPUs (Mooncake, section 7's testbed): an eighth when all send at once.
    "rdma-800g-host": Link("rdma-800g-host", 12.5e9, 35e-6, share=0.53),
    # One machine's memory, between devices made of its cores.
    "memory": Link("memory", 10e9, 0.0),
    "ethernet-10g": Link("ethernet-10g", 1.25e9, 100e-6),
}
# What connects devices of one host, and devices of several, where nobody says more.
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
    "meta-gtt": ("H100-500W", "nvlink-h100", "rdma-400g", "rdma-400g"),
    "meta-gti": ("H100-500W", "nvlink-h100", "tcp-100g", "tcp-100g"),
    "medha-a100": ("A100", "nvlink-a100", "rdma-200g", "rdma-200g"),
    "cpu": ("cpu", "memory", "memory", "memory"),
}
