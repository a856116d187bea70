"""Meshes of GPUs to compile for without the hardware, from their descriptions as XLA wants them."""

import math
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh


class Target(NamedTuple):
    """A GPU as its data sheet describes it."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    threads: int  # of a multiprocessor
    shared_memory: int  # KiB of a multiprocessor; a thread block can have all but one
    l2_cache: int  # MiB
    bandwidth: int  # of memory, GB/s
    memory: int  # bytes


TARGETS = {
    "H100": Target("NVIDIA H100 80GB HBM3", (9, 0), 132, 2048, 228, 50, 3352, 84942979072),
    "A100": Target("NVIDIA A100-SXM4-80GB", (8, 0), 108, 2048, 164, 40, 1935, 84942979072),
    "RTX 4090": Target("NVIDIA GeForce RTX 4090", (8, 9), 128, 1536, 100, 72, 1008, 25757220864),
    "B200": Target("NVIDIA B200", (10, 0), 148, 2048, 228, 126, 8000, 191000000000),
}

_DESCRIPTION = """
gpu_device_info {{
  cuda_compute_capability {{ major: {target.capability[0]} minor: {target.capability[1]} }}
  core_count: {target.multiprocessors}
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {target.threads}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {block_bytes}
  shared_memory_per_core: {core_bytes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: {l2_bytes}
  memory_bandwidth: {target.bandwidth}000000000
  device_memory_size: {target.memory}
  runtime_version: "12.9.0"
  driver_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
}}
platform_name: "CUDA"
device_description_str: "{target.name}"
runtime_version {{ major: 12 minor: 9 }}
dnn_version_info {{ major: 9 minor: 10 }}
"""


def gpu_devices(kind: str, hosts: int, each: int, memory: int | None = None) -> list[jax.Device]:
    """Devices of `hosts` hosts with `each` GPUs of a kind, one of `TARGETS`; every host is a process.

    `memory` is bytes of each, by default as many as the kind has.
    """
    target = TARGETS[kind] if memory is None else TARGETS[kind]._replace(memory=memory)
    description = _DESCRIPTION.format(
        target=target,
        core_bytes=target.shared_memory * 1024,
        block_bytes=(target.shared_memory - 1) * 1024,
        l2_bytes=target.l2_cache * 1024**2,
    )
    topology = topologies.get_topology_desc(platform="cuda", topology=f"1x{hosts}x{each}", target_config=description)
    return list(topology.devices)


def gpu_mesh(kind: str, memory: int | None = None, **sizes: int) -> Mesh:
    """A mesh of GPUs of a kind with these axes and sizes, all on one host; `memory` as in `gpu_devices`."""
    shape = tuple(sizes.values())
    devices = np.array(gpu_devices(kind, 1, math.prod(shape), memory))
    return Mesh(devices.reshape(shape), tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def h100_devices(hosts: int, each: int) -> list[jax.Device]:
    """Devices of `hosts` hosts with `each` H100s."""
    return gpu_devices("H100", hosts, each)


def h100_mesh(memory: int | None = None, **sizes: int) -> Mesh:
    """A mesh of H100s; `memory` as in `gpu_devices`."""
    return gpu_mesh("H100", memory, **sizes)
