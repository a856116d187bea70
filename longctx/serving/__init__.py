"""One engine: requests, a paged cache with shared prefixes, a scheduler, and one compiled step.

Exports are loaded when they are first used, so that the parts that decide can be imported without JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
