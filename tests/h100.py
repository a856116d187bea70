"""The meshes of H100s that programs are compiled for."""

from benchmarks.h100 import h100_devices, h100_mesh

__all__ = ["h100_devices", "h100_mesh"]
