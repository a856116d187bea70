"""Flax NNX modules over `longctx.parallel`, for models of one's own, and Llama checkpoints as modules to fine-tune.

They need flax: `pip install 'longctx-jax[train]'`.
"""

import lazy_loader

try:
    import flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError("longctx.nnx needs flax: pip install 'longctx-jax[train]'", name="flax") from None

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
