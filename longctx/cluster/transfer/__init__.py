"""How pages of the KV cache get from one engine to another: leases, and three ways to fetch their pages.

Exports are loaded when they are first used; none of it imports JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
