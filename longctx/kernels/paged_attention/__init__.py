"""Exact attention to keys and values in pages, and writing them to pages."""

from longctx.kernels.paged_attention.api import paged_attention
from longctx.kernels.paged_attention.paged_plan import PagedPlan, plan_paged_attention
from longctx.kernels.paged_attention.write import write_pages

__all__ = ["PagedPlan", "paged_attention", "plan_paged_attention", "write_pages"]
