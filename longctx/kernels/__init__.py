"""Attention on one device, over arrays and over pages. It returns a state `(out, lse)`, and states merge."""

from longctx.kernels.attention import attention, dot_product_attention, plan_attention
from longctx.kernels.merge import merge_state, merge_states
from longctx.kernels.paged_attention import paged_attention, plan_paged_attention, write_pages
from longctx.kernels.selection import Selection, explain

__all__ = [
    "Selection",
    "attention",
    "dot_product_attention",
    "explain",
    "merge_state",
    "merge_states",
    "paged_attention",
    "plan_attention",
    "plan_paged_attention",
    "write_pages",
]
