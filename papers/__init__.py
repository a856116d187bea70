"""Reproductions of the four papers, over the public names of `longctx`: figures, and schedulers of other systems."""
