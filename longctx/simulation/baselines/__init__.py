"""The systems that the papers compare with, on the same cost model as ours."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
