"""The meshes of GPUs that programs are compiled for."""

from benchmarks.h100 import gpu_mesh, h100_devices, h100_mesh

__all__ = ["gpu_mesh", "h100_devices", "h100_mesh"]
