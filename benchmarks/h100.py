"""Meshes of H100s to compile for without the hardware, from its description as XLA wants it."""

import math

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

_MEMORY = 84942979072  # bytes
# H100 SXM, 80 GB: compute capability 9.0, 132 multiprocessors of 228 KiB, 50 MiB of L2, 3.35 TB/s.
_TARGET = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 84942979072
  runtime_version: "12.9.0"
  driver_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
runtime_version { major: 12 minor: 9 }
dnn_version_info { major: 9 minor: 10 }
"""


def h100_devices(hosts: int, each: int, memory: int = _MEMORY) -> list[jax.Device]:
    """Devices of `hosts` hosts with `each` GPUs of so many bytes of memory; every host is a process."""
    target = _TARGET.replace(str(_MEMORY), str(memory))
    topology = topologies.get_topology_desc(platform="cuda", topology=f"1x{hosts}x{each}", target_config=target)
    return list(topology.devices)


def h100_mesh(memory: int = _MEMORY, **sizes: int) -> Mesh:
    """A mesh with these axes and sizes, all on one host."""
    shape = tuple(sizes.values())
    devices = np.array(h100_devices(1, math.prod(shape), memory))
    return Mesh(devices.reshape(shape), tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))
