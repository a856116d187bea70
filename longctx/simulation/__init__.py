"""Serving without devices: the core of the engine in virtual time, workloads, and reports. It loads no JAX."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
