"""Llama, Mistral, Qwen2.5, Qwen3 and Gemma 3: configuration, forward pass, checkpoints and tokenizers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
