"""Workloads as plain data: read from traces, or synthetic; who arrives when, and who follows whom."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
