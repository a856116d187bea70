"""What devices compute: the compiled step over the mesh, and small programs beside it."""
