"""Pages beyond the devices: in host memory, on disk, in a distributed store. No JAX."""
