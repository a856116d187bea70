"""One device: attention that returns its state, and the merging of states."""

from longctx.kernels.attention import attention
from longctx.kernels.merge import merge_state, merge_states

__all__ = ["attention", "merge_state", "merge_states"]
