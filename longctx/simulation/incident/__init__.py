"""Replays of recorded engines (`longctx.serving.recording`) in virtual time: as it was, and otherwise. No JAX."""
