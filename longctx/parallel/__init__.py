"""Attention over many devices: the exchanges of a mesh axis, sequence layouts, plans and a cost model."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
