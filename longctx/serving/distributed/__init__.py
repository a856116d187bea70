"""One engine in many processes, which meet, plan every step from the same messages, and end together."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
