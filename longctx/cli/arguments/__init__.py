"""The flags of every command. Nothing here imports JAX, numpy or the engine, so that `--help` is there at once."""
