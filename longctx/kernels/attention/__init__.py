"""Exact attention that returns its state `(out, lse)`."""

from longctx.kernels.attention.api import attention
from longctx.kernels.attention.attention_plan import AttentionPlan, plan_attention

__all__ = ["AttentionPlan", "attention", "plan_attention"]
