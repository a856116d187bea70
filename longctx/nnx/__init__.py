"""Flax NNX modules over `longctx.parallel`, for models of one's own, and Llama checkpoints as modules to fine-tune.

They need flax: `pip install 'longctx-jax[train]'`.
"""

import lazy_loader

from longctx import extras

with extras.needed("train", "longctx.nnx"):
    import flax  # noqa: F401

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
