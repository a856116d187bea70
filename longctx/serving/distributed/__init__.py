"""One engine in many processes: they meet, hear in every step what is new, and end together."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
