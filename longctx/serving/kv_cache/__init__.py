"""Pages of the KV cache: who holds them, by which keys they are found, on which context rank they live."""
