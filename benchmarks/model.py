"""The 100M-parameter model that benchmarks share: the built-in model's architecture, scaled."""

from longctx.models import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=258,
    hidden_size=768,
    intermediate_size=2816,
    num_layers=12,
    num_heads=12,
    num_kv_heads=6,
    head_dim=64,
    max_positions=8192,
)
