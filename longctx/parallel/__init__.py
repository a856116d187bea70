"""Many devices: attention over a mesh axis, by what moves, and who computes which token."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
