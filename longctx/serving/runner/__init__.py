"""Programs of the devices: the compiled step over the mesh, and small programs beside it."""
