"""Public names of `longctx.nnx`, each loaded when it is first used."""

from .attention_fn import attention_fn as attention_fn
from .context_parallel_attention import ContextParallelAttention as ContextParallelAttention
from .llama_module import LlamaModule as LlamaModule
from .llama_module import from_nnx as from_nnx
from .llama_module import to_nnx as to_nnx
from .loss import next_token_targets as next_token_targets
