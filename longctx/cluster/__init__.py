"""Many engines: how they hand each other pages of the KV cache."""
