"""Transfer of pages of the KV cache from one engine to another: leases, and three ways to fetch their pages.

Exports are loaded when they are first used; none of it imports JAX.
"""

from typing import Any

import lazy_loader

from longctx import extras

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    with extras.needed("transfer", f"{__name__}.{name}"):
        return _load(name)
