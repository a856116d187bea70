"""longctx: exact inference over very long contexts in JAX.

The names that are used most, each loaded when it is first used:

* attention on one device (`longctx.kernels`): `attention`, `dot_product_attention`, `merge_state`, `merge_states`,
  `paged_attention`
* attention over a mesh, inside `jax.shard_map` or over whole arrays (`longctx.parallel`): `all_gather_kv`,
  `choose_ring`, `context_parallel_attention`, `kvp_attention`, `make_mesh`, `plan_varseq`, `ring_pass_kv`,
  `ring_pass_q`, `sequence_pipeline`, `shard_positions`, `shard_sequence`, `unshard_sequence`
* Llama, Mistral, Qwen2.5, Qwen3, Gemma 3 checkpoints (`longctx.models`): `Llama`, `LlamaConfig`, `load_checkpoint`,
  `load_tokenizer`, `save_checkpoint`
* the engine (`longctx.serving`): `Engine`, `EngineConfig`, `Output`, `ParallelPlan`, `Request`, `SamplingParams`
* flags for XLA on GPUs: `xla_flags`

Each package exports more than is listed here.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
