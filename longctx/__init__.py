"""longctx: exact inference over very long contexts in JAX.

The parts are imported from their own packages: `longctx.kernels`, `longctx.models`.
"""

__version__ = "0.1.0"
