"""Exact attention that returns its state `(out, lse)`."""

from longctx.kernels.attention.api import attention
from longctx.kernels.attention.attention_plan import AttentionPlan, plan_attention
from longctx.kernels.attention.dot_product import dot_product_attention

__all__ = ["AttentionPlan", "attention", "dot_product_attention", "plan_attention"]
