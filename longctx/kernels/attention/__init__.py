"""Exact attention that returns its state `(out, lse)`."""

from longctx.kernels.attention.api import attention

__all__ = ["attention"]
