"""Exact attention to keys and values that lie in pages, and the writing of them."""

from longctx.kernels.paged_attention.api import paged_attention
from longctx.kernels.paged_attention.write import write_pages

__all__ = ["paged_attention", "write_pages"]
